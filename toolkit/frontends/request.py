"""Request: what the user asked of an export, decided once and read by every front end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from toolkit.errors import UsageError
from toolkit.verification.tolerance import EXPORT_TOLERANCE

Exporter = Literal["auto", "dynamo", "torchscript"]

Axes = Mapping[str, Mapping[int, str]]
"""The dynamic dimensions: a name for an axis of an input, as `{"x": {0: "batch"}}`."""

MIN_OPSET = 7
"""The oldest opset that any exporter writes; the newest is what onnxruntime loads."""

_AXIS = re.compile(r"^(-?\d+)=([A-Za-z_]\w*)$")


def _silent(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Request:
    """What to export and how. A field that is None (or empty) is for the front end to find out."""

    task: str | None = None
    framework: str | None = None
    """The name of a front end, where more than one would take the source."""
    exporter: Exporter = "auto"
    opset: int | None = None
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    dynamic: Axes | None = None
    """None: sensible ones; empty: every size is fixed."""
    example: Any = None
    """What the model is called with: a tuple of arguments, a dict of keyword arguments, or one
    argument."""
    weights: str | os.PathLike[str] | None = None
    """A file of weights to load into the model that the source builds."""
    translations: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """Operators of the framework that the user translates, and how."""
    custom_ops: tuple[str, ...] = ()
    """Libraries of custom operators that onnxruntime loads for the proof."""
    trust_remote_code: bool = False
    seed: int = 0
    tolerance: float = EXPORT_TOLERANCE
    """The largest difference allowed, relative to an output's scale."""
    progress: Callable[[str], None] = _silent
    """Told in a few words what is being done."""

    def __post_init__(self) -> None:
        from toolkit.runtime import MAX_OPSET
        from toolkit.settings import require_choice

        require_choice("exporter", self.exporter, Exporter)
        if self.opset is not None and not MIN_OPSET <= self.opset <= MAX_OPSET:
            raise UsageError(
                f"opset {self.opset} is out of range: exporters write {MIN_OPSET} and later, "
                f"onnxruntime loads up to {MAX_OPSET}"
            )
        for kind, names in (("input", self.input_names), ("output", self.output_names)):
            _require_distinct(kind, names)


def _require_distinct(kind: str, names: tuple[str, ...]) -> None:
    for name in names:
        if not name:
            raise UsageError(f"an {kind} name is empty")
        if names.count(name) > 1:
            raise UsageError(f"{kind} name '{name}' is given twice: every {kind} has its own")


def parse_dynamic(texts: Iterable[str]) -> Axes | None:
    """`--dynamic`: `input:0=batch,1=sequence` for each input, or `none`; None without any.

    `*` stands for every input.
    """
    axes: dict[str, dict[int, str]] = {}
    listed = list(texts)
    if "none" in listed:
        if len(listed) > 1:
            raise UsageError("--dynamic none stands alone: every size is fixed")
        return {}
    for text in listed:
        name, colon, rest = text.rpartition(":")
        if not colon or not name or not rest:
            raise UsageError(f"--dynamic '{text}' is not valid: write input:0=batch,1=sequence")
        for item in rest.split(","):
            found = _AXIS.match(item.strip())
            if found is None:
                raise UsageError(
                    f"--dynamic '{text}': '{item}' is not valid: write an axis and its name, "
                    "as in 0=batch"
                )
            axes.setdefault(name, {})[int(found[1])] = found[2]
    return axes or None


def resolve_axes(
    asked: Axes, ranks: Mapping[str, int], outputs: Iterable[str] = ()
) -> dict[str, dict[int, str]]:
    """The axes that the user names, on these inputs: `*` expanded, negative axes counted out.

    Axes of outputs, which torch's own `dynamic_axes` lists too, follow from those of the inputs.
    Raises UsageError for an input that there is not, or an axis that it does not have.
    """
    found: dict[str, dict[int, str]] = {}
    for name, axes in asked.items():
        if name in set(outputs) - set(ranks):
            continue
        if name != "*" and name not in ranks:
            known = ", ".join(ranks) or "none"
            raise UsageError(f"dynamic axes of '{name}': there is no such input; inputs: {known}")
        for each in ranks if name == "*" else (name,):
            for axis, dim in _named(axes, each).items():
                rank = ranks[each]
                if not -rank <= axis < rank:
                    if name == "*":
                        continue
                    raise UsageError(
                        f"dynamic axis {axis} of '{each}': it has {rank} axes, 0 to {rank - 1}"
                    )
                found.setdefault(each, {})[axis % rank] = dim
    return found


def _named(axes: Mapping[int, str] | Iterable[int], name: str) -> dict[int, str]:
    """Names for axes that have none: torch's `dynamic_axes` takes plain lists too."""
    if isinstance(axes, Mapping):
        return dict(cast("Mapping[int, str]", axes))
    return {axis: "batch" if axis == 0 else f"{name}_{axis}" for axis in axes}
