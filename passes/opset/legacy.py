"""Adapters for opsets 2 to 7: early attributes that became defaults, integers or broadcasting."""

from __future__ import annotations

from onnx import TensorProto

from passes.opset.adapter_context import AdapterContext, CannotConvert


def integer_p(ctx: AdapterContext) -> None:
    """LpPool, GlobalLpPool: p, the order of the norm, is an integer."""
    p = ctx.attr("p", 2.0)
    if p != int(p):
        raise CannotConvert(f"p={p} is not an integer")
    if ctx.node.op_type == "LpPool" and ctx.attr("kernel_shape") is None:
        raise CannotConvert("it has no kernel_shape")
    ctx.set(p=int(p))


def concat_axis(ctx: AdapterContext) -> None:
    """Concat: the axis has no default any more; write the old one, 1."""
    ctx.set(axis=ctx.attr("axis", 1))


def cast_to_number(ctx: AdapterContext) -> None:
    """Cast: `to` is the number of an element type instead of its name."""
    name: str = ctx.attr("to")
    try:
        ctx.set(to=TensorProto.DataType.Value(name.upper()))
    except ValueError as error:
        raise CannotConvert(f"'{name}' is not an element type") from error


def selu_constants(ctx: AdapterContext) -> None:
    """Selu: the defaults became more precise; write the old ones."""
    ctx.take("consumed_inputs")
    ctx.set(alpha=ctx.attr("alpha", 1.6732), gamma=ctx.attr("gamma", 1.0507))


def split_lengths_as_attribute(ctx: AdapterContext) -> None:
    """Split: the lengths, formerly an attribute or an input, are an attribute until opset 13."""
    lengths = ctx.input(1)
    if lengths:
        values = ctx.graph.const(lengths)
        if values is None:
            raise CannotConvert("the lengths of the parts are computed")
        ctx.set(split=[int(v) for v in values])
        ctx.set_inputs(ctx.input(0))


def tile_repeats(ctx: AdapterContext) -> None:
    """Tile: the number of tiles and the axis become one number of repeats per axis."""
    tiles, axis = (ctx.graph.const(ctx.input(i)) for i in (1, 2))
    rank = ctx.rank(ctx.input(0))
    if tiles is None or axis is None or rank is None:
        raise CannotConvert("tiles, axis or the rank of the input is not constant")
    repeats = [1] * rank
    repeats[int(axis.item())] = int(tiles.item())
    ctx.set_inputs(ctx.input(0), ctx.constant(repeats, hint="repeats"))


def align_broadcast(ctx: AdapterContext) -> None:
    """Broadcast B along the last dimensions of A, no longer along those from `axis` on.

    A of shape (2, 3, 4, 5) and B of shape (3, 4) at axis 1: B becomes (3, 4, 1).
    """
    axis, broadcast = ctx.take("axis"), ctx.take("broadcast", 0)
    if not broadcast or axis is None:
        return
    rank_a, rank_b = ctx.rank(ctx.input(0)), ctx.rank(ctx.input(1))
    if rank_a is None or rank_b is None:
        raise CannotConvert(f"axis={axis} cannot be converted: the ranks of its inputs are unknown")
    _append_dimensions(ctx, rank_b, rank_a - rank_b - (axis if axis >= 0 else axis + rank_a))


def prelu_slope(ctx: AdapterContext) -> None:
    """PRelu: a vector of slopes, formerly one per channel, is broadcast along the last axis."""
    slope = ctx.sizes(ctx.input(1))
    if slope is None:
        raise CannotConvert("the shape of its slope is unknown")
    if len(slope) != 1 or slope[0] == 1:
        return
    rank = ctx.rank(ctx.input(0))
    if rank is None:
        raise CannotConvert("the rank of its input is unknown")
    _append_dimensions(ctx, 1, rank - 2)


def _append_dimensions(ctx: AdapterContext, rank: int, count: int) -> None:
    """Append `count` dimensions of size 1 to the second input, which has this rank."""
    if count > 0:
        axes = list(range(rank, rank + count))
        ctx.set_inputs(ctx.input(0), ctx.op("Unsqueeze", ctx.input(1), axes=axes))
