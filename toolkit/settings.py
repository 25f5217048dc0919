"""The settings of a run, for the command line and for Python alike. Imports no onnx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from toolkit.errors import UsageError
from toolkit.targets import DEFAULT_TARGET, Target, find_target
from toolkit.targets.releases import find_release

if TYPE_CHECKING:
    from toolkit.accuracy.requirement import Function, Requirement
    from toolkit.calibrate.data import Calib
    from toolkit.feeds import Sample

Validate = Literal["each", "final", "off"]
"""When a model is verified: after each pass, once at the end, or not at all."""

Prefer = Literal["speed", "size"]
"""The goal of quantization; for size, layers may be slower than in float."""

OpsetLimit: TypeAlias = int | Literal["keep"] | None
"""The newest opset that the result may need; "keep": the original's; None: as the passes need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a run is given besides the model and the passes.

    - `target`: the name of the runtime that the model is written for (see `toolkit.targets`).
    - `runtime`: the oldest onnxruntime that must load and run the result; None: the installed one.
    - `validate`: when the model is verified against the original.
    - `opset`: the newest opset that the result may need; a newer model is lowered, or rejected.
    - `samples`: real inputs to verify with, in addition to synthetic ones.
    - `seed`: the seed of synthetic inputs.
    - `custom_ops`: custom-operator libraries that onnxruntime loads.
    - `calib`: the source of calibration data, for passes that quantize by measured ranges.
    - `max_drop`, `metric`: the error budget of quantization (see `accuracy.requirement`).
    - `prefer`: whether a quantized layer must be faster, or only smaller.
    - `measure`: whether passes may time candidates on this machine.
    - `fix`: sizes of dimensions, by name or as `input:axis` (see `pass_manager.specialize`).
    - `freeze`: values of inputs that become constants.
    """

    target: str = DEFAULT_TARGET
    runtime: str | None = None
    validate: Validate = "each"
    opset: OpsetLimit = None
    samples: Sequence[Sample] = ()
    seed: int = 0
    custom_ops: tuple[str, ...] = ()
    calib: Calib | None = None
    max_drop: float | str | None = None
    metric: str | Function | None = None
    prefer: Prefer = "speed"
    measure: bool = True
    fix: Mapping[str, int | str] = field(default_factory=dict[str, "int | str"])
    freeze: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        require_choice("validate", self.validate, Validate)
        for option, chosen in (("fix", self.fix), ("freeze", self.freeze)):
            if not isinstance(chosen, Mapping) or not all(isinstance(n, str) for n in chosen):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"{option} is {chosen!r}: give a dict by name")
        require_choice("prefer", self.prefer, Prefer)
        _require_opset(self.opset, self.find_target())
        if self.max_drop is not None or self.metric is not None:
            has_budget = not self.requirement().off
            if has_budget and self.validate == "off" and self.calib is None:
                raise UsageError(
                    "--max-drop and --metric have no effect with --validate off and no --calib"
                )

    def find_target(self) -> Target:
        """Return the target, limited to the onnxruntime release in `runtime`."""
        target = find_target(self.target)
        if self.runtime is None:
            return target
        return replace(target, release=find_release(self.runtime))

    def requirement(self) -> Requirement:
        """Return the error budget that `max_drop` and `metric` describe."""
        from toolkit.accuracy.requirement import Requirement

        return Requirement.of(self.max_drop, self.metric)


def require_choice(what: str, value: str, choices: Any) -> None:
    """Raise unless `value` is one of the Literal `choices`."""
    known = get_args(choices)
    if value not in known:
        raise UsageError(f"unknown {what} '{value}': choose one of {', '.join(known)}")


def _require_opset(limit: OpsetLimit, target: Target) -> None:
    if limit is None or limit == "keep":
        return
    if not isinstance(limit, int) or isinstance(limit, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"opset {limit!r} is not valid: give a number or 'keep'")
    if not 1 <= limit <= target.max_opset:
        raise UsageError(
            f"opset {limit} is out of range: {target.release} loads opsets 1 to {target.max_opset}"
        )
