"""Rules of reductions, TopK and normalizations."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

from passes.analysis.axes import positive_axis
from passes.analysis.shapes.facts import (
    CONTENT_TYPES,
    INT64,
    Answer,
    Array,
    Fact,
    Op,
    Rule,
    Size,
    Sizes,
    blank,
    in_range,
    same_as_input,
    scalar,
)
from toolkit.ir.op_traits import REDUCTIONS
from toolkit.symbolic import Dim, maximum, minimum


def reduction(function: Callable[[Any, Any], Dim] | None = None) -> Rule:
    """Return the rule of a reduction; `function` reduces its contents."""

    def rule(op: Op) -> Answer:
        dtype, shape = op.dtype(0), op.shape(0)
        if shape is None:
            return Fact(dtype, None)
        keep = op.int("keepdims", 1) != 0
        axes = op.axes(1)
        if axes is None and op.given(1):
            unknown_axes = op.shape(1) != (0,)
            return Fact(dtype, blank(len(shape)) if keep and unknown_axes else None)
        if not axes:
            if op.int("noop_with_empty_axes"):
                return Fact(dtype, shape, None)
            axes = list(range(len(shape)))
        gone = {positive_axis(axis, len(shape)) for axis in axes}
        sizes = reduced(shape, gone, keep)
        data = op.data(0)
        if function is None or data is None or data.ndim != len(gone) or dtype not in CONTENT_TYPES:
            return Fact(dtype, sizes)
        total = _folded(function, data)
        if total is None:
            return Fact(dtype, sizes)
        item = scalar(in_range(total, dtype))
        return Fact(dtype, sizes, item.reshape([1] * len(shape)) if keep else item)

    return rule


def _folded(function: Callable[[Any, Any], Dim], data: Array) -> Size:
    items: list[Dim] = data.reshape(-1).tolist()
    return reduce(function, items) if items else None


def reduced(shape: Sizes, gone: set[int], keep: bool) -> Sizes:
    """Return the shape without these axes or, with `keep`, with 1 in their place."""
    if keep:
        return tuple(1 if place in gone else size for place, size in enumerate(shape))
    return tuple(size for place, size in enumerate(shape) if place not in gone)


def top_k(op: Op) -> Answer:
    dtype, shape = op.dtype(0), op.shape(0)
    if shape is None:
        return [Fact(dtype, None), Fact(INT64, None)]
    axis = positive_axis(op.int("axis", -1), len(shape))
    count: Size = op.int("k") or None
    given = op.sizes(1)
    if given is not None:
        count = given[0]
    sizes = (*shape[:axis], count, *shape[axis + 1 :])
    return [Fact(dtype, sizes), Fact(INT64, sizes)]


# -- normalization


def layer_normalization(op: Op) -> Answer:
    return same_as_input(op) if op.outputs == 1 else None


RULES: dict[str, Rule] = {
    **dict.fromkeys(sorted(REDUCTIONS), reduction()),
    "ReduceSum": reduction(operator.add),
    "ReduceProd": reduction(operator.mul),
    "ReduceMax": reduction(maximum),
    "ReduceMin": reduction(minimum),
    "TopK": top_k,
    "LayerNormalization": layer_normalization,
    "SimplifiedLayerNormalization": layer_normalization,
    "RotaryEmbedding": same_as_input,
}
