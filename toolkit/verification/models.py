"""`verify`: two models run on the same feeds and compared, output by output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onnx import helper

from toolkit.errors import RuntimeRefused, UsageError
from toolkit.feeds import Feed, Feeds, Sample
from toolkit.feeds.generate import Trial
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model, Source
from toolkit.ir.tensor_type import dtype_name
from toolkit.runtime.session import Session
from toolkit.verification.compare import Difference, json_number
from toolkit.verification.reference import Reference
from toolkit.verification.structure import check_input


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """One output of the second model against the first's, over all feeds."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    """On the first feed; None for what is no tensor."""
    max_abs: float
    max_rel: float
    """Relative to the output's scale; inf when the two are not comparable."""
    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How two models compare."""

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
                {
                    "name": o.name,
                    "dtype": o.dtype,
                    "shape": None if o.shape is None else list(o.shape),
                    "max_abs": json_number(o.max_abs),
                    "max_rel": json_number(o.max_rel),
                    "ok": o.ok,
                    "reason": o.reason,
                }
                for o in self.per_output
            ],
        }


def verify(
    a: Source,
    b: Source,
    *,
    tolerance: float = 1e-4,
    samples: Sequence[Sample] = (),
    seed: int = 0,
    custom_ops: Sequence[str] = (),
) -> Comparison:
    """Compare `b` with the reference `a` on feeds made for `a` (and on the user's samples).

    Raises UsageError when their inputs or outputs do not correspond, RuntimeRefused when one of
    them does not run at all.
    """
    first, second = _load(a), _load(b)
    _require_same_interface(first.graph, second.graph)
    reference = Reference.of(first, samples, seed, custom_ops=custom_ops)
    if not len(reference.feeds):
        raise RuntimeRefused(f"no feed was found that A runs on: {reference.feeds.refusal}")
    session = Session(second, custom_ops=custom_ops)
    common = _for_second(reference, second.graph)
    try:
        found = common.differences(session)
    except RuntimeRefused as refusal:
        return Comparison(False, math.inf, [], len(common.feeds), f"B refuses a feed: {refusal}")
    shown = [_output(common, name, found[name], tolerance) for name in found]
    error = max((output.max_rel for output in shown), default=0.0)
    notes = [f"not compared, it differs from run to run: '{name}'" for name in common.unstable]
    if len(common.feeds) < len(reference.feeds):
        notes.append("B takes only some of the sizes that A takes")
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
        if here.dtype != there.dtype and not (_is_float(here.dtype) and _is_float(there.dtype)):
            kinds = f"{dtype_name(here.dtype)} in A, {dtype_name(there.dtype)} in B"
            raise UsageError(f"input '{name}' is {kinds}")
        if here.rank is not None and there.rank is not None and here.rank != there.rank:
            raise UsageError(f"input '{name}' has rank {here.rank} in A, {there.rank} in B")


def _for_second(reference: Reference, graph: Graph) -> Reference:
    """The reference with its feeds in the second model's types, without those of other sizes."""
    trials: list[Trial] = []
    for trial in reference.feeds.trials:
        feed: Feed = {name: _cast(value, graph, name) for name, value in trial.feed.items()}
        if all(_fits(value, graph, name) for name, value in feed.items()):
            trials.append(Trial(feed, trial.outputs, trial.sizes))
    if not trials:
        raise UsageError("B takes none of the input sizes that A was run with; give a --sample")
    return Reference(reference.outputs, Feeds(trials), reference.unstable)


def _cast(value: Any, graph: Graph, name: str) -> Any:
    dtype = graph.dtype(name)
    return value.astype(helper.tensor_dtype_to_np_dtype(dtype)) if _is_float(dtype) else value


def _fits(value: Any, graph: Graph, name: str) -> bool:
    declared, given = graph.shape(name), _shape_of(value)
    if declared is None or given is None:
        return True
    return all(not isinstance(d, int) or d == s for d, s in zip(declared, given, strict=True))


def _shape_of(value: Any) -> tuple[int, ...] | None:
    return getattr(value, "shape", None)


def _is_float(dtype: int) -> bool:
    return dtype_name(dtype).startswith(("float", "bfloat"))


def _output(
    reference: Reference, name: str, found: Difference, tolerance: float
) -> OutputComparison:
    value = reference.feeds.trials[0].outputs[reference.outputs.index(name)]
    return OutputComparison(
        name=name,
        dtype=str(getattr(value, "dtype", type(value).__name__)),
        shape=_shape_of(value),
        max_abs=found.absolute,
        max_rel=found.relative,
        ok=found.relative <= tolerance,
        reason=found.reason,
    )
