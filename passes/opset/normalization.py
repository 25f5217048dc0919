"""Adapters for Softmax, LogSoftmax, Hardmax, Dropout and the normalizations."""

from __future__ import annotations

import numpy as np

from passes.opset.adapter_context import AdapterContext, CannotConvert


def softmax_over_one_axis(ctx: AdapterContext) -> None:
    """Opset 13: Softmax, LogSoftmax and Hardmax work along one axis.

    Before, they flattened all dimensions from `axis` on into one.
    """
    x, axis = ctx.input(0), ctx.attr("axis", 1)
    sizes = ctx.sizes(x)
    if sizes is not None and axis < 0:
        axis += len(sizes)
    if axis == -1 or (sizes is not None and axis == len(sizes) - 1):
        ctx.set(axis=-1)
    elif sizes is not None and all(size == 1 for size in sizes[axis + 1 :]):
        ctx.set(axis=axis)
    else:
        matrix = ctx.op("Flatten", x, axis=axis)
        ctx.set_inputs(matrix)
        ctx.set(axis=-1)
        result, name = ctx.hand_over()
        ctx.define(name, "Reshape", result, ctx.op("Shape", x))


def dropout_test_mode(ctx: AdapterContext) -> None:
    """Opset 7: `is_test` is gone; a Dropout whose mask is unused is in inference mode."""
    if not ctx.take("is_test", 0) and ctx.used_outputs(1):
        raise CannotConvert("it is in training mode")


def dropout_mask(ctx: AdapterContext) -> None:
    """Opset 10: the mask is boolean; cast it back to the type of the data."""
    if ctx.used_outputs(1):
        dtype = ctx.types.of(ctx.graph, ctx.input(0))
        if dtype is None or not dtype.dtype:
            raise CannotConvert(f"the element type of '{ctx.input(0)}' is unknown")
        mask, name = ctx.hand_over(1)
        ctx.define(name, "Cast", mask, to=dtype.dtype)


def dropout_ratio(ctx: AdapterContext) -> None:
    """Opset 12: the ratio became an input, which inference ignores; the mask became all true."""
    if ctx.used_outputs(1):
        raise CannotConvert("its mask, which is undefined in inference mode, is used")
    ctx.take("ratio")


def batch_norm_test_mode(ctx: AdapterContext) -> None:
    """Opset 7: `is_test` is gone; a BatchNormalization with one output is in inference mode."""
    if ctx.take("is_test", 0):
        if ctx.used_outputs(1):
            raise CannotConvert("statistics that only training computes are used")
        ctx.graph.set_outputs(ctx.node, ctx.node.output[:1])


def batch_norm_spatial(ctx: AdapterContext) -> None:
    """Opset 9: statistics are per channel; for `spatial=0`, flatten the elements into channels."""
    if ctx.take("spatial", 1):
        return
    x, *statistics = ctx.node.input
    every = ctx.constant([-1], hint="flat")
    flat = [ctx.op("Reshape", value, every) for value in statistics]
    ctx.set_inputs(ctx.op("Flatten", x, axis=1), *flat)
    result, name = ctx.hand_over()
    ctx.define(name, "Reshape", result, ctx.op("Shape", x))


def batch_norm_training(ctx: AdapterContext) -> None:
    """Opset 14: training mode is an attribute; before, more than one output implied it."""
    if any(ctx.node.output[1:]):
        if ctx.used_outputs(3):
            raise CannotConvert("the statistics of its batch are used")
        ctx.set(training_mode=1)
    ctx.graph.set_outputs(ctx.node, ctx.node.output[:3])


def group_norm_per_channel(ctx: AdapterContext) -> None:
    """Opset 21: scale and bias are per channel instead of per group."""
    x, *affine = ctx.node.input
    groups: int = ctx.attr("num_groups")
    sizes = ctx.sizes(x)
    channels = sizes[1] if sizes else None
    if channels == groups:
        return
    if channels is not None:
        known = [ctx.graph.const(value) for value in affine]
        repeated = [
            _repeat(ctx, value, groups, ctx.constant([groups, channels // groups]))
            if array is None
            else ctx.constant(np.repeat(array, channels // groups), array.dtype, "affine")
            for value, array in zip(affine, known, strict=True)
        ]
    else:
        count = ctx.constant([groups], hint="groups")
        share = ctx.op("Div", ctx.op("Shape", x, start=1, end=2), count)
        target = ctx.op("Concat", count, share, axis=0)
        repeated = [_repeat(ctx, value, groups, target) for value in affine]
    ctx.set_inputs(x, *repeated)


def _repeat(ctx: AdapterContext, value: str, groups: int, target: str) -> str:
    """Repeat each element of a vector: `target` is [groups, repeats]."""
    column = ctx.op("Reshape", value, ctx.constant([groups, 1], hint="column"))
    flat = ctx.constant([-1], hint="flat")
    return ctx.op("Reshape", ctx.op("Expand", column, target), flat)
