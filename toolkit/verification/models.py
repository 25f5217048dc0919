"""`verify`: run two models on the same feeds and compare their outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from onnx import helper

from toolkit.errors import RuntimeRefused, UsageError
from toolkit.feeds import Feed, FeedSet, Sample
from toolkit.feeds.generate import RecordedRun
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model, Source
from toolkit.ir.tensor_type import FLOATS, FLOATS_OF_8_BITS, dtype_name
from toolkit.runtime.session import Session
from toolkit.verification.compare import Difference, json_number
from toolkit.verification.reference import Reference
from toolkit.verification.structure import check_input
from toolkit.verification.tolerance import VERIFY_TOLERANCE

_FLOATS = FLOATS | FLOATS_OF_8_BITS


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """One output of the second model against the first's, over all feeds."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    """The shape on the first feed; None for sequences, maps and optionals."""
    max_abs: float
    max_rel: float
    """Relative to the output's scale; inf when not comparable."""
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two models."""

    ok: bool
    error: float
    """The largest of the outputs' relative errors."""
    per_output: list[OutputComparison]
    feeds: int
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "error": json_number(self.error),
            "feeds": self.feeds,
            "note": self.note,
            "outputs": [
                asdict(o) | {"max_abs": json_number(o.max_abs), "max_rel": json_number(o.max_rel)}
                for o in self.per_output
            ],
        }


def verify(
    a: Source,
    b: Source,
    *,
    tolerance: float = VERIFY_TOLERANCE,
    samples: Sequence[Sample] = (),
    seed: int = 0,
    custom_ops: Sequence[str] = (),
) -> Comparison:
    """Compare `b` with the reference `a` on synthetic inputs (and on the user's samples).

    Raises UsageError when their inputs or outputs do not correspond, RuntimeRefused when one of
    them does not run.
    """
    first, second = _load(a), _load(b)
    _require_same_interface(first.graph, second.graph)
    reference = Reference.of(first, samples, seed, custom_ops=custom_ops)
    if not len(reference.feeds):
        raise RuntimeRefused(f"A runs on none of the feeds: {reference.feeds.refusal}")
    session = Session(second, custom_ops=custom_ops)
    common = _for_second(reference, second.graph)
    try:
        found = common.differences(session)
    except RuntimeRefused as refusal:
        return Comparison(False, math.inf, [], len(common.feeds), f"B fails on a feed: {refusal}")
    shown = [_output(common, name, found[name], tolerance) for name in found]
    error = max((output.max_rel for output in shown), default=0.0)
    notes = [f"not compared, it differs from run to run: '{name}'" for name in common.unstable]
    if len(common.feeds) < len(reference.feeds):
        notes.append("B accepts only some of the sizes A accepts")
    ok = all(output.ok for output in shown)
    return Comparison(ok, error, shown, len(common.feeds), "; ".join(notes))


def _load(source: Source) -> Model:
    model = Model.of(source)
    check_input(model)
    return model


def _require_same_interface(a: Graph, b: Graph) -> None:
    for kind, in_a, in_b in (("inputs", a.feeds, b.feeds), ("outputs", a.outputs, b.outputs)):
        if set(in_a) != set(in_b):
            raise UsageError(
                f"the models' {kind} differ: A has {', '.join(in_a)}; B has {', '.join(in_b)}"
            )
    for name in a.feeds:
        here, there = a.type(name), b.type(name)
        if here is None or there is None:
            continue
        if here.dtype != there.dtype and not {here.dtype, there.dtype} <= _FLOATS:
            kinds = f"{dtype_name(here.dtype)} in A, {dtype_name(there.dtype)} in B"
            raise UsageError(f"input '{name}' is {kinds}")
        if here.rank is not None and there.rank is not None and here.rank != there.rank:
            raise UsageError(f"input '{name}' has rank {here.rank} in A, {there.rank} in B")


def _for_second(reference: Reference, graph: Graph) -> Reference:
    """Cast the feeds to the second model's types; drop those of sizes that it does not declare."""
    runs: list[RecordedRun] = []
    for run in reference.feeds.runs:
        feed: Feed = {name: _cast(value, graph, name) for name, value in run.feed.items()}
        if all(_fits(value, graph, name) for name, value in feed.items()):
            runs.append(replace(run, feed=feed))
    if not runs:
        raise UsageError("B accepts none of the input sizes A ran with; give a --sample")
    return replace(reference, feeds=FeedSet(runs))


def _cast(value: Any, graph: Graph, name: str) -> Any:
    dtype = graph.dtype(name)
    return value.astype(helper.tensor_dtype_to_np_dtype(dtype)) if dtype in _FLOATS else value


def _fits(value: Any, graph: Graph, name: str) -> bool:
    declared, given = graph.shape(name), getattr(value, "shape", None)
    if declared is None or given is None:
        return True
    return all(not isinstance(d, int) or d == s for d, s in zip(declared, given, strict=True))


def _output(
    reference: Reference, name: str, found: Difference, tolerance: float
) -> OutputComparison:
    value = reference.feeds.runs[0].outputs[reference.outputs.index(name)]
    return OutputComparison(
        name=name,
        dtype=str(getattr(value, "dtype", type(value).__name__)),
        shape=getattr(value, "shape", None),
        max_abs=found.absolute,
        max_rel=found.relative,
        ok=found.relative <= tolerance,
        reason=found.reason,
    )
