"""Rules of reductions, normalizations, quantization and random numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

from onnx import TensorProto

from passes.analysis.axes import positive_axis
from passes.analysis.shapes.facts import (
    BOOL,
    CONTENT_TYPES,
    FLOAT,
    INT32,
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
    """Reduce*: the axes go, or stay as 1. `function` folds contents."""

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
    """The shape without these axes, or with ones in their place."""
    if keep:
        return tuple(1 if place in gone else size for place, size in enumerate(shape))
    return tuple(size for place, size in enumerate(shape) if place not in gone)


def arg_reduction(op: Op) -> Answer:
    shape = op.shape(0)
    if shape is None:
        return Fact(INT64, None)
    axis = positive_axis(op.int("axis"), len(shape))
    return Fact(INT64, reduced(shape, {axis}, op.int("keepdims", 1) != 0))


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


def batch_normalization(op: Op) -> Answer:
    channels = op.shape(1) or (None,)
    same = same_as_input(op)
    statistics = [Fact(op.dtype(3) or same.dtype, channels)] * 4
    return [same, *statistics]


def layer_normalization(op: Op) -> Answer:
    """Y, and mean and inverse deviation over the axes from `axis` on, kept as ones."""
    same = same_as_input(op)
    if op.outputs == 1 or same.shape is None:
        return [same, *[Fact(FLOAT, None)] * 2]
    axis = positive_axis(op.int("axis", -1), len(same.shape))
    sizes = (*same.shape[:axis], *[1] * (len(same.shape) - axis))
    dtype = op.int("stash_type", FLOAT)
    return [same, Fact(dtype, sizes), Fact(dtype, sizes)]


def rms_normalization(op: Op) -> Answer:
    return Fact(op.dtype(1) or op.dtype(0), op.shape(0))


def dropout(op: Op) -> Answer:
    same = same_as_input(op)
    return [same, Fact(BOOL if op.version >= 10 else same.dtype, same.shape)]


# -- quantization


def quantize_linear(op: Op) -> Answer:
    dtype = op.dtype(2) if op.given(2) else op.int("output_dtype") or TensorProto.UINT8
    return Fact(dtype, op.shape(0))


def dequantize_linear(op: Op) -> Answer:
    return Fact(op.int("output_dtype") or op.dtype(1), op.shape(0))


def dynamic_quantize_linear(op: Op) -> Answer:
    return [Fact(TensorProto.UINT8, op.shape(0)), Fact(FLOAT, ()), Fact(TensorProto.UINT8, ())]


# -- random numbers and windows of their own size


def random(op: Op) -> Answer:
    return Fact(op.int("dtype", FLOAT), op.ints("shape"))


def random_like(op: Op) -> Answer:
    return Fact(op.int("dtype") or op.dtype(0), op.shape(0))


def multinomial(op: Op) -> Answer:
    shape = op.shape(0)
    rows = shape[0] if shape is not None else None
    return Fact(op.int("dtype", INT32), (rows, op.int("sample_size", 1)))


def loss(op: Op) -> Answer:
    """Losses are one number unless they are not reduced."""
    dtype, scores, labels = op.dtype(0), op.shape(0), op.shape(1)
    whole: Sizes | None = () if op.text("reduction", "mean") != "none" else labels
    return [Fact(dtype, whole), Fact(dtype, scores)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(sorted(REDUCTIONS), reduction()),
    "ReduceSum": reduction(operator.add),
    "ReduceProd": reduction(operator.mul),
    "ReduceMax": reduction(maximum),
    "ReduceMin": reduction(minimum),
    "ArgMax": arg_reduction,
    "ArgMin": arg_reduction,
    "TopK": top_k,
    "BatchNormalization": batch_normalization,
    "LayerNormalization": layer_normalization,
    "SimplifiedLayerNormalization": layer_normalization,
    "RMSNormalization": rms_normalization,
    "RotaryEmbedding": same_as_input,
    "Dropout": dropout,
    "QuantizeLinear": quantize_linear,
    "DequantizeLinear": dequantize_linear,
    "DynamicQuantizeLinear": dynamic_quantize_linear,
    "RandomNormal": random,
    "RandomUniform": random,
    "RandomNormalLike": random_like,
    "RandomUniformLike": random_like,
    "Bernoulli": random_like,
    "EyeLike": random_like,
    "Multinomial": multinomial,
    "NegativeLogLikelihoodLoss": loss,
    "SoftmaxCrossEntropyLoss": loss,
}
