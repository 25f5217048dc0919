"""Adapters for experimental operators, most of which onnxruntime runs below opset 10.

Old PyTorch, CoreML and Caffe2 exports contain them. Each is decomposed into standard operators.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper

from passes.opset.adapter_context import Adapter, AdapterContext, CannotConvert

_END = np.iinfo(np.int64).max


def line(factor: str, shift: str = "") -> Adapter:
    """Return the adapter of factor * x + shift, for these attribute names.

    A list of shifts has one per channel of [N, C, H, W].
    """

    def adapt(ctx: AdapterContext) -> None:
        x, scale, offset = ctx.input(0), ctx.take(factor, 1.0), ctx.take(shift, 0.0)
        if not shift:
            return _replace_op(ctx, "Mul", x, _number(ctx, scale))
        per_channel: Any = np.reshape(offset, (-1, 1, 1)) if np.ndim(offset) else offset
        scaled = ctx.op("Mul", x, _number(ctx, scale))
        return _replace_op(ctx, "Add", scaled, ctx.constant(per_channel, ctx.dtype(x), "bias"))

    return adapt


def scaled(function: str) -> Adapter:
    """Return the adapter of alpha * function(beta * x)."""

    def adapt(ctx: AdapterContext) -> None:
        alpha, beta = ctx.take("alpha", 1.0), ctx.take("beta", 1.0)
        inner = ctx.op(function, ctx.op("Mul", ctx.input(0), _number(ctx, beta)))
        _replace_op(ctx, "Mul", inner, _number(ctx, alpha))

    return adapt


def crop(ctx: AdapterContext) -> None:
    """Cut off `border` = [left, top, right, bottom], or keep `scale` = [h, w] from its corner."""
    left, top, right, bottom = ctx.take("border")
    size = ctx.take("scale")
    ends = [top + size[0], left + size[1]] if size else [-bottom or _END, -right or _END]
    bounds = ([top, left], ends, [2, 3])
    _replace_op(ctx, "Slice", ctx.input(0), *(ctx.constant(values) for values in bounds))


def constant_fill(ctx: AdapterContext) -> None:
    """Fill a shape with `value`: that of the input, or the input itself, or `shape`, extended by
    `extra_shape`."""
    source, is_shape = ctx.input(0), ctx.take("input_as_shape", 0)
    given, extra = ctx.take("shape", []), ctx.take("extra_shape")
    if not source:
        shape = ctx.constant(given, hint="shape")
    elif is_shape:
        shape = ctx.op("Cast", source, to=TensorProto.INT64)
    else:
        shape = ctx.op("Shape", source)
    if extra:
        shape = ctx.op("Concat", shape, ctx.constant(extra, hint="shape"), axis=0)
    filling = ctx.take("dtype", TensorProto.FLOAT), [1], [ctx.take("value", 0.0)]
    _replace_op(ctx, "ConstantOfShape", shape)
    ctx.set(value=helper.make_tensor("value", *filling))


def mean_variance(ctx: AdapterContext) -> None:
    """Refuse: the standard operator of this name (opset 9) takes other statistics."""
    raise CannotConvert("it is onnxruntime's operator of that name, not ONNX's")


def _number(ctx: AdapterContext, value: float) -> str:
    return ctx.constant(value, ctx.dtype(ctx.input(0)), "factor")


def _replace_op(ctx: AdapterContext, op_type: str, *inputs: str) -> None:
    ctx.graph.set_op(ctx.node, op_type)
    ctx.set_inputs(*inputs)
