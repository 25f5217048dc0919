"""What passes are: the protocol, and what the pipeline tells a pass beside the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from toolkit.ir.model import Model
from toolkit.settings import OpsetLimit, Prefer
from toolkit.verification.tolerance import Tolerance

if TYPE_CHECKING:
    from toolkit.accuracy.evaluator import Judge
    from toolkit.calibrate.data import CalibrationData
    from toolkit.feeds import Feed
    from toolkit.rewriting.match_failure import Misses


@runtime_checkable
class Pass(Protocol):
    """What the pipeline runs. Built-in passes are frozen dataclasses whose fields are options.

    A pass that finds nothing more to do when it runs twice may say so with a class variable
    `idempotent = True`: it is then skipped where nothing has changed since it last ran. One that
    fuses may say with `cores` what it is after, for `toolkit explain` (see `toolkit.cores`).
    """

    @property
    def name(self) -> str:
        """How the report calls it."""
        ...

    @property
    def tolerance(self) -> Tolerance:
        """How far it may move the outputs."""
        ...

    def run(self, model: Model, ctx: Context) -> None:
        """Edit the model through its graphs."""
        ...


@dataclass(slots=True)
class Context:
    """What a pass may know beside the model.

    `misses` records where rules nearly matched. `opset` bounds how far a pass may lift the model
    where the user did not name an opset to that pass itself. `calibration` are the user's samples,
    None without any. `floats` is the model as it was before the first pass that quantizes, and
    `judge` says what others are worth beside it (None when there is nothing to judge by).

    `holds` runs a model on the feeds and says whether it is as close to the original as the pass
    has to be, for a pass that has to try what it cannot tell; None where nothing is run behind it.

    A pass that changes what an output means, on purpose, says so in `redefined`: what it is to be
    from now on, given a feed and what it was. It is proven against that, and undone as a whole.
    What quantizing costs is told beside the floats: such a pass has to come before that.

    `prefer` and `measure` are for passes that choose by speed: whether a smaller model may be
    slower, and whether to time it on this machine. Plans that passes have applied go into `plans`.
    A pass that takes long says what it does with `tell`: in words, and which part of it is done.
    """

    target: str = "ort-cpu"
    custom_ops: tuple[str, ...] = ()
    misses: Misses | None = None
    opset: OpsetLimit = None
    calibration: CalibrationData | None = None
    floats: Model | None = None
    judge: Judge | None = None
    holds: Callable[[Model], bool] | None = None
    prefer: Prefer = "speed"
    measure: bool = True
    tell: Callable[[str, float], None] = lambda stage, part: None
    plans: list[Written] = field(default_factory=list["Written"])
    notes: list[str] = field(default_factory=list[str])
    redefined: dict[str, Redefinition] = field(default_factory=dict[str, "Redefinition"])

    @property
    def on_runtime(self) -> bool:
        """Whether the model is for onnxruntime, which has operators of its own."""
        return self.target.startswith("ort")

    def note(self, text: str) -> None:
        """Say something about this run of the pass; it ends up in the report."""
        if text not in self.notes:
            self.notes.append(text)


class Redefinition(Protocol):
    """What an output is to be, given a feed and the original's answer to it."""

    def __call__(self, feed: Feed, answer: Any, /) -> Any: ...


class Written(Protocol):
    """What a pass has decided, and can write down: a plan of quantization is one."""

    def to_json(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the pipeline is: pass `index` of `total`, `stage` in words, `part` of it done."""

    index: int
    total: int
    name: str
    stage: str
    part: float = 0.0
