"""Request: the options of an export, validated once and read by every front end."""

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
"""Names of dynamic dimensions by input and axis, as `{"x": {0: "batch"}}`."""

MIN_OPSET = 7
"""The oldest opset that any exporter writes; the newest is the newest that onnxruntime loads."""

_AXIS = re.compile(r"^(-?\d+)=([A-Za-z_]\w*)$")


@dataclass(frozen=True, slots=True)
class Request:
    """The options of an export; the front end chooses where a field is None or empty."""

    task: str | None = None
    framework: str | None = None
    """The name of a front end; needed only if several accept the source."""
    exporter: Exporter = "auto"
    opset: int | None = None
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    dynamic: Axes | None = None
    """None: detected by the front end; empty: every size is fixed."""
    example: Any = None
    """Arguments for one call: a tuple, a dict of keyword arguments, or a single argument."""
    weights: str | os.PathLike[str] | None = None
    """A file of weights to load into the source model."""
    translations: Mapping[Any, Any] = field(default_factory=dict[Any, Any])
    """The user's translations to ONNX, by operator of the framework."""
    custom_ops: tuple[str, ...] = ()
    """Libraries of custom operators that onnxruntime loads for the proof."""
    trust_remote_code: bool = False
    seed: int = 0
    tolerance: float = EXPORT_TOLERANCE
    """The largest difference allowed, relative to an output's scale."""
    progress: Callable[[str], None] = lambda _: None
    """Called with a short description of each step."""

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

    def axes_of(
        self, feed: Mapping[str, Any], outputs: Iterable[str] = ()
    ) -> dict[str, dict[int, str]] | None:
        """Return the requested dynamic axes of these inputs, or None to detect them."""
        if self.dynamic is None:
            return None
        return resolve_axes(self.dynamic, {n: value.ndim for n, value in feed.items()}, outputs)


def _require_distinct(kind: str, names: tuple[str, ...]) -> None:
    for name in names:
        if not name:
            raise UsageError(f"an {kind} name is empty: separate the names by single commas")
        if names.count(name) > 1:
            raise UsageError(f"{kind} name '{name}' is given twice: give each {kind} its own name")


def parse_dynamic(texts: Iterable[str]) -> Axes | None:
    """Parse --dynamic: `input:0=batch,1=sequence` per input (`*`: every input), or `none`.

    Return None if nothing is given, and no axes for `none`.
    """
    axes: dict[str, dict[int, str]] = {}
    listed = list(texts)
    if "none" in listed:
        if len(listed) > 1:
            raise UsageError("--dynamic none fixes every size: drop the other --dynamic options")
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
    """Resolve requested axes for inputs of these ranks: expand `*`, make negative axes positive.

    Axes of `outputs`, which torch's `dynamic_axes` lists too, are ignored: they follow from the
    inputs. Raise UsageError for an unknown input or an axis out of range.
    """
    found: dict[str, dict[int, str]] = {}
    for name, axes in asked.items():
        if name in set(outputs) - set(ranks):
            continue
        if name != "*" and name not in ranks:
            known = ", ".join(ranks) or "none"
            raise UsageError(f"dynamic axes of '{name}': no such input; inputs: {known}")
        for each in ranks if name == "*" else (name,):
            rank = ranks[each]
            for axis, dim in _with_names(axes, each).items():
                if -rank <= axis < rank:
                    found.setdefault(each, {})[axis % rank] = dim
                elif name != "*":
                    raise UsageError(
                        f"dynamic axis {axis} of '{each}' is out of range: it has {rank} axes"
                    )
    return found


def _with_names(axes: Mapping[int, str] | Iterable[int], name: str) -> dict[int, str]:
    """Return the axes with names, which torch's `dynamic_axes` may lack."""
    if isinstance(axes, Mapping):
        return dict(cast("Mapping[int, str]", axes))
    return {axis: "batch" if axis == 0 else f"{name}_{axis}" for axis in axes}
