"""The interface of a pass: its members, its inputs besides the model, and its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from toolkit.ir.model import Model
from toolkit.settings import Settings
from toolkit.targets import Target
from toolkit.verification.tolerance import Tolerance

if TYPE_CHECKING:
    from toolkit.accuracy.evaluator import Evaluator
    from toolkit.calibrate.data import CalibrationData
    from toolkit.feeds import Feed
    from toolkit.quantization.plan import Plan
    from toolkit.rewriting.match_failure import NearMisses


@runtime_checkable
class Pass(Protocol):
    """A step of the pipeline. Built-in passes are frozen dataclasses whose fields are options.

    The members below are required. Optional ones are declared by the protocols `Idempotent`,
    `Incomparable`, `KeepsOpset`, `Guarded`, `Checked` and `rewriting.anchors.Anchored`.
    """

    @property
    def name(self) -> str:
        """The name in the report."""
        ...

    @property
    def tolerance(self) -> Tolerance:
        """The largest error it may introduce."""
        ...

    def run(self, model: Model, ctx: Context) -> None:
        """Edit the model through its graphs."""
        ...


class ClassPass(Protocol):
    """A pass whose name and tolerance are class variables.

    Such a pass is a `Pass` at run time, but type checkers do not accept a class variable where a
    protocol has a property.
    """

    name: ClassVar[str]
    tolerance: ClassVar[Tolerance]

    def run(self, model: Model, ctx: Context) -> None: ...


AnyPass: TypeAlias = Pass | ClassPass
"""A pass as users may write it, for type annotations."""


@runtime_checkable
class Idempotent(Protocol):
    """A pass of which the pipeline may skip a second run in a row, which would change nothing."""

    @property
    def idempotent(self) -> bool: ...


@runtime_checkable
class Incomparable(Protocol):
    """A pass whose result may not be comparable with the original."""

    @property
    def incomparable(self) -> str:
        """The reason; empty when the result can be compared."""
        ...


@runtime_checkable
class KeepsOpset(Protocol):
    """A pass that may convert the model to an opset that the user asked for by name."""

    @property
    def keeps_opset(self) -> bool:
        """Whether the result stays at that opset, even if an older one would do."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """A pass with a precondition."""

    def requires(self, model: Model, ctx: Context) -> None:
        """Raise PreconditionFailed if the pass does not apply to the model; it is then skipped."""
        ...


@runtime_checkable
class Checked(Protocol):
    """A pass with a postcondition."""

    def ensures(self, model: Model, ctx: Context) -> None:
        """Raise PostconditionFailed if the pass broke its guarantee; it is then undone."""
        ...


@dataclass(frozen=True, slots=True)
class Origin:
    """The original opset and IR version of a model; opset 0 if unknown."""

    opset: int = 0
    ir_version: int = 3


@dataclass(slots=True)
class PassReport:
    """The findings of a pass besides its edits.

    `notes` appear in the report; `plans` are the quantization plans that were applied. `redefined`
    holds the outputs that the pass redefines on purpose: functions of a feed and the old value. The
    result is verified against these, and undone as a whole. Such a pass must run before
    quantization.
    """

    notes: list[str] = field(default_factory=list[str])
    plans: list[Plan] = field(default_factory=list["Plan"])
    redefined: dict[str, Redefinition] = field(default_factory=dict[str, "Redefinition"])


@dataclass(slots=True)
class Context:
    """The inputs of a pass besides the model, and the report it fills in.

    - `calibration`: the calibration data; None without any.
    - `reference`: the model before the first pass that quantizes.
    - `evaluator`: compares a quantized model with `reference`; None if nothing can be run.
    - `holds`: runs a candidate and returns whether it is within the pass's tolerance of the
      original; None if nothing can be run.
    - `misses`: the recorder of near misses; None if they are not recorded.
    - `origin`: the opset and IR version of the original.
    - `progress`: called by long-running passes with a stage in words and the fraction done.
    """

    settings: Settings = field(default_factory=Settings)
    calibration: CalibrationData | None = None
    reference: Model | None = None
    evaluator: Evaluator | None = None
    holds: Callable[[Model], bool] | None = None
    misses: NearMisses | None = None
    origin: Origin = field(default_factory=Origin)
    progress: Callable[[str, float], None] = lambda stage, part: None
    report: PassReport = field(default_factory=PassReport)

    @property
    def target(self) -> Target:
        """The runtime that the model is written for."""
        return self.settings.find_target()

    @property
    def notes(self) -> list[str]:
        return self.report.notes

    @property
    def redefined(self) -> dict[str, Redefinition]:
        return self.report.redefined

    def note(self, text: str) -> None:
        """Add a line to the report, once."""
        if text not in self.report.notes:
            self.report.notes.append(text)


class Redefinition(Protocol):
    """The new definition of an output, as a function of a feed and the original output."""

    def __call__(self, feed: Feed, output: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """The position of a run: pass `index` of `total`, `stage` in words, `part` of it done."""

    index: int
    total: int
    name: str
    stage: str
    part: float = 0.0
