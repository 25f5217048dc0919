"""Operators written out in those of the opset before: the same numbers, in more nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from passes.analysis.axes import positive_axis
from passes.opset.adapter_context import AdapterContext, Array, CannotConvert
from passes.opset.inputs_to_attributes import nonnegative_axes

_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def _scalar(ctx: AdapterContext, value: float, like: str) -> str:
    return ctx.constant(value, ctx.dtype(like), "factor")


def element_type(ctx: AdapterContext, value: str) -> int:
    """Return the element type of a value; raise CannotConvert if it is unknown."""
    found = ctx.types.of(ctx.graph, value)
    if found is None or not found.dtype:
        raise CannotConvert(f"the element type of '{value}' is unknown")
    return found.dtype


# -- activations


def gelu(ctx: AdapterContext) -> None:
    """Gelu(x) = x/2 (1 + erf(x / sqrt 2)), or the same with tanh(sqrt(2/pi) (x + 0.044715 x^3))."""
    x = ctx.input(0)
    number = [_scalar(ctx, v, x) for v in (1.0, 0.5)]
    if ctx.attr("approximate", "none") == "tanh":
        cube = ctx.op("Mul", ctx.op("Mul", x, x), x)
        sum_ = ctx.op("Add", x, ctx.op("Mul", cube, _scalar(ctx, 0.044715, x)))
        inner = ctx.op("Tanh", ctx.op("Mul", sum_, _scalar(ctx, math.sqrt(2 / math.pi), x)))
    else:
        inner = ctx.op("Erf", ctx.op("Mul", x, _scalar(ctx, math.sqrt(0.5), x)))
    gate = ctx.op("Add", inner, number[0])
    ctx.become("Mul", ctx.op("Mul", x, number[1]), gate)


def hard_swish(ctx: AdapterContext) -> None:
    """HardSwish(x) = x HardSigmoid(x), with slope 1/6 and offset 1/2."""
    x = ctx.input(0)
    ctx.become("Mul", x, ctx.op("HardSigmoid", x, alpha=1 / 6, beta=0.5))


def mish(ctx: AdapterContext) -> None:
    """Mish(x) = x tanh(softplus(x))."""
    x = ctx.input(0)
    ctx.become("Mul", x, ctx.op("Tanh", ctx.op("Softplus", x)))


def swish(ctx: AdapterContext) -> None:
    """Swish(x) = x sigmoid(alpha x)."""
    x, alpha = ctx.input(0), ctx.attr("alpha", 1.0)
    inner = x if alpha == 1 else ctx.op("Mul", x, _scalar(ctx, alpha, x))
    ctx.become("Mul", x, ctx.op("Sigmoid", inner))


# -- normalizations


def _trailing_axes(ctx: AdapterContext, x: str) -> list[int]:
    axis = ctx.attr("axis", -1)
    if axis >= 0:
        axis -= ctx.known_rank(x)
    return list(range(axis, 0))


def _in_stash_type(ctx: AdapterContext, x: str) -> tuple[str, int]:
    """Return the operand in the type that statistics are computed in, and its own type."""
    own = element_type(ctx, x)
    wanted = ctx.attr("stash_type", TensorProto.FLOAT)
    if own in (TensorProto.DOUBLE, wanted):
        return x, own
    return ctx.op("Cast", x, to=wanted), own


def layer_norm(ctx: AdapterContext) -> None:
    """LayerNormalization: (x - mean) / sqrt(mean((x - mean)^2) + epsilon) * scale + bias."""
    x, scale, bias = (ctx.input(i) for i in range(3))
    axes = _trailing_axes(ctx, x)
    wide, own = _in_stash_type(ctx, x)
    epsilon = _epsilon(ctx, wide, x)
    mean = ctx.op("ReduceMean", wide, axes=axes)
    centered = ctx.op("Sub", wide, mean)
    variance = ctx.op("ReduceMean", ctx.op("Mul", centered, centered), axes=axes)
    deviation = ctx.op("Sqrt", ctx.op("Add", variance, epsilon))
    for index, (op_type, value) in {1: ("Identity", mean), 2: ("Reciprocal", deviation)}.items():
        if index < len(ctx.node.output) and ctx.node.output[index]:
            _, name = ctx.hand_over(index)
            ctx.define(name, op_type, value)
    normal = ctx.op("Div", centered, deviation)
    if wide != x:
        normal = ctx.op("Cast", normal, to=own)
    if bias:
        ctx.become("Add", ctx.op("Mul", normal, scale), bias)
    else:
        ctx.become("Mul", normal, scale)


def rms_norm(ctx: AdapterContext) -> None:
    """RMSNormalization: x / sqrt(mean(x^2) + epsilon) * scale."""
    x, scale = ctx.input(0), ctx.input(1)
    axes = _trailing_axes(ctx, x)
    wide, own = _in_stash_type(ctx, x)
    epsilon = _epsilon(ctx, wide, x)
    mean = ctx.op("ReduceMean", ctx.op("Mul", wide, wide), ctx.constant(axes, hint="axes"))
    normal = ctx.op("Div", wide, ctx.op("Sqrt", ctx.op("Add", mean, epsilon)))
    if wide != x:
        normal = ctx.op("Cast", normal, to=own)
    ctx.become("Mul", normal, scale)


def _epsilon(ctx: AdapterContext, wide: str, x: str) -> str:
    dtype: Any = ctx.dtype(x) if wide == x else np.float32
    if wide != x and ctx.attr("stash_type", TensorProto.FLOAT) != TensorProto.FLOAT:
        raise CannotConvert("it computes in a type of its own (stash_type)")
    return ctx.constant(ctx.attr("epsilon", 1e-5), dtype, "epsilon")


def group_norm(ctx: AdapterContext) -> None:
    """GroupNormalization-21: InstanceNormalization of groups, then scale and bias per channel."""
    x, scale, bias = ctx.node.input
    rank, groups, dtype = ctx.known_rank(x), ctx.attr("num_groups"), ctx.dtype(x)
    one, zero = (ctx.constant(np.full(groups, v), dtype, "affine") for v in (1, 0))
    normal = _normal_groups(ctx, x, one, zero)
    column = ctx.constant([-1, *[1] * (rank - 2)], hint="shape")
    scale, bias = (ctx.op("Reshape", value, column) for value in (scale, bias))
    ctx.become("Add", ctx.op("Mul", normal, scale), bias)


def group_norm_by_groups(ctx: AdapterContext) -> None:
    """GroupNormalization-18: InstanceNormalization of groups, with their scale and bias."""
    ctx.become("Identity", _normal_groups(ctx, *ctx.node.input))


def _normal_groups(ctx: AdapterContext, x: str, scale: str, bias: str) -> str:
    shape = ctx.constant([0, ctx.attr("num_groups"), -1], hint="shape")
    rows, epsilon = ctx.op("Reshape", x, shape), ctx.attr("epsilon", 1e-5)
    normal = ctx.op("InstanceNormalization", rows, scale, bias, epsilon=epsilon)
    return ctx.op("Reshape", normal, ctx.op("Shape", x))


def along_last_axis(ctx: AdapterContext) -> None:
    """Softmax, LogSoftmax, Hardmax along an inner axis: transpose it to the end and back."""
    x = ctx.input(0)
    rank = ctx.known_rank(x)
    axis = positive_axis(ctx.attr("axis", -1), rank)
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    ctx.set_inputs(ctx.op("Transpose", x, perm=order))
    ctx.set(axis=rank - 1)
    result, name = ctx.hand_over()
    ctx.define(name, "Transpose", result, perm=order)


# -- rotary embedding


def rotary_embedding(ctx: AdapterContext) -> None:
    """RotaryEmbedding: each pair (a, b) of a head becomes (a cos - b sin, a sin + b cos)."""
    x, cos, sin, positions = (ctx.input(i) for i in range(4))
    rank = ctx.known_rank(x)
    given, heads = ctx.sizes(x), ctx.attr("num_heads", 0)
    if given is None:
        raise CannotConvert(f"the shape of '{x}' is unknown")
    size = given[-1] if rank == 4 else (given[-1] // heads if given[-1] and heads else None)
    if size is None:
        raise CannotConvert("the size of its heads is unknown")
    turned: int = ctx.attr("rotary_embedding_dim", 0) or size
    whole = x
    if rank == 3:  # [batch, length, heads, size]
        whole = ctx.op("Reshape", x, ctx.constant([0, 0, heads, size], hint="shape"))
    axis = ctx.constant([1 if rank == 4 else 2], hint="axis")
    cos, sin = (
        ctx.op("Unsqueeze", ctx.op("Gather", v, positions) if positions else v, axis)
        for v in (cos, sin)
    )
    cos, sin = (_first(ctx, v, turned // 2) for v in (cos, sin))
    kept = ""
    part = whole
    if turned < size:
        part, kept = _split(ctx, whole, [turned, size - turned], -1)
    if ctx.attr("interleaved", 0):
        # zeros keep leading sizes: [.., turned] -> [.., turned/2, 2]
        pairs = ctx.op("Reshape", part, ctx.constant([0, 0, 0, turned // 2, 2], hint="shape"))
        last = ctx.constant([-1], hint="axis")
        one, other = (ctx.op("Squeeze", v, last) for v in _split(ctx, pairs, [1, 1], -1))
        rotated = _rotated(ctx, one, other, cos, sin)
        stacked = ctx.op("Concat", *(ctx.op("Unsqueeze", v, last) for v in rotated), axis=-1)
        result = ctx.op("Reshape", stacked, ctx.constant([0, 0, 0, turned], hint="shape"))
    else:
        one, other = _split(ctx, part, [turned // 2] * 2, -1)
        result = ctx.op("Concat", *_rotated(ctx, one, other, cos, sin), axis=-1)
    if kept:
        result = ctx.op("Concat", result, kept, axis=-1)
    if rank == 3:
        ctx.become("Reshape", result, ctx.constant([0, 0, heads * size], hint="shape"))
    else:
        ctx.become("Identity", result)


def _rotated(ctx: AdapterContext, one: str, other: str, cos: str, sin: str) -> tuple[str, str]:
    real = ctx.op("Sub", ctx.op("Mul", one, cos), ctx.op("Mul", other, sin))
    return real, ctx.op("Add", ctx.op("Mul", one, sin), ctx.op("Mul", other, cos))


def _first(ctx: AdapterContext, value: str, count: int) -> str:
    """Return the first `count` elements of the last axis; caches may hold more."""
    bounds = (ctx.constant([v], hint="bound") for v in (0, count, -1))
    return ctx.op("Slice", value, *bounds)


def _split(ctx: AdapterContext, value: str, lengths: Sequence[int], axis: int) -> list[str]:
    node = ctx.graph.add(
        "Split",
        [value, ctx.constant(lengths, hint="split")],
        len(lengths),
        {"axis": axis},
        at=ctx.node,
    )
    return list(node.output)


# -- data movement


def split_at_run_time(ctx: AdapterContext) -> None:
    """Split-18 into n parts: ceil(size / n) elements each, the last one what is left."""
    x, count = ctx.input(0), ctx.attr("num_outputs")
    if count is None:
        raise CannotConvert("it has neither lengths nor a number of parts")
    size = ctx.op("Gather", ctx.op("Shape", x), ctx.constant([ctx.attr("axis", 0)], hint="axis"))
    one, parts = ctx.constant([1], hint="one"), ctx.constant([count], hint="count")
    part = ctx.op("Div", ctx.op("Sub", ctx.op("Add", size, parts), one), parts)
    rest = ctx.op("Sub", size, ctx.op("Mul", part, ctx.constant([count - 1], hint="count")))
    ctx.take("num_outputs")
    ctx.set_inputs(x, ctx.op("Concat", *[part] * (count - 1), rest, axis=0))


def reshape_nonempty(ctx: AdapterContext) -> None:
    """Reshape-13 to a computed shape, in which a 0 only occurs if the tensor is empty."""
    if ctx.graph.is_const(ctx.input(1)):
        raise CannotConvert("its shape has a size of 0 (allowzero)")
    ctx.take("allowzero")


def integer_extremum(ctx: AdapterContext) -> None:
    """Max-8, Min-8 of integers: comparisons, for which runtimes have kernels of these types."""
    compare = "Less" if ctx.node.op_type == "Min" else "Greater"
    if element_type(ctx, ctx.input(0)) not in (TensorProto.INT32, TensorProto.INT64):
        raise CannotConvert("it uses types that are new")
    first, *others = ctx.node.input
    chosen = first
    for value in others[:-1]:
        chosen = ctx.op("Where", ctx.op(compare, chosen, value), chosen, value)
    last = others[-1] if others else first
    ctx.become("Where", ctx.op(compare, chosen, last), chosen, last)


def trilu(ctx: AdapterContext) -> None:
    """Trilu: keep the elements on one side of a diagonal, by comparing row and column."""
    x = ctx.input(0)
    sizes, dtype = ctx.sizes(x), ctx.dtype(x)
    if sizes is None or len(sizes) < 2:
        raise CannotConvert("the rank of its input is unknown")
    upper = ctx.attr("upper", 1)
    diagonal = int(ctx.const(ctx.input(1), "its diagonal").reshape(-1)[0]) if ctx.input(1) else 0
    rows, columns = sizes[-2:]
    if rows is not None and columns is not None and rows * columns <= 1 << 20:
        kept: Array = np.tri(rows, columns, diagonal - (1 if upper else 0), dtype=bool)
        mask = ctx.constant(~kept if upper else kept, np.bool_, "kept")
    else:
        row, column = (
            ctx.op("Unsqueeze", _indices(ctx, x, axis), ctx.constant([1 - i], hint="axis"))
            for i, axis in enumerate((-2, -1))
        )
        frontier = ctx.op("Add", row, ctx.constant([diagonal], hint="diagonal"))
        outside = ctx.op("Less" if upper else "Greater", column, frontier)
        mask = ctx.op("Not", outside)
    ctx.become("Where", mask, x, ctx.constant(0, dtype, "zero"))


def _indices(ctx: AdapterContext, x: str, axis: int) -> str:
    """Return 0, 1, ... up to the size of an axis."""
    rank = ctx.known_rank(x)
    place = ctx.constant(positive_axis(axis, rank), hint="axis")
    size = ctx.op("Gather", ctx.op("Shape", x), place)
    return ctx.op("Range", ctx.constant(0), size, ctx.constant(1))


def wrapped_indices(ctx: AdapterContext) -> None:
    """Gather-1: negative indices count from the end."""
    nonnegative_axes(ctx)
    x, indices, axis = ctx.input(0), ctx.input(1), ctx.attr("axis", 0)
    dtype = ctx.dtype(indices)
    size = ctx.op("Gather", ctx.op("Shape", x), ctx.constant(axis, hint="axis"))
    size = ctx.op("Cast", size, to=element_type(ctx, indices))
    negative = ctx.op("Less", indices, ctx.constant(0, dtype, "zero"))
    wrapped = ctx.op("Where", negative, ctx.op("Add", indices, size), indices)
    ctx.set_inputs(x, wrapped)


# -- quantization


def dequantize_wide(ctx: AdapterContext) -> None:
    """DequantizeLinear-21 of 4-bit constants, in blocks or not: stored as int8 or uint8."""
    x, scale, zero = (ctx.input(i) for i in range(3))
    block = ctx.attr("block_size", 0)
    codes = _bytes(ctx, x, "its operand")
    zeros = _bytes(ctx, zero, "its zero point") if zero else None
    if not block:
        values = [ctx.constant(codes, codes.dtype, "codes"), scale]
        if zeros is not None:
            values.append(ctx.constant(zeros, zeros.dtype, "zero_point"))
        ctx.take("block_size")
        ctx.set_inputs(*values)
        ctx.drop_unused([x, zero])
        return
    sizes = ctx.sizes(scale)
    if sizes is None or None in sizes:
        raise CannotConvert("the shape of its scale is unknown")
    axis = positive_axis(ctx.attr("axis", 1), codes.ndim)
    count = sizes[axis]
    if count is None or codes.shape[axis] != count * block:
        raise CannotConvert("its last block is not complete")
    to = element_type(ctx, scale)
    shape = list(codes.shape)
    blocks = codes.reshape([*shape[:axis], count, block, *shape[axis + 1 :]])
    after = ctx.constant([axis + 1], hint="axis")
    value = ctx.op("Cast", ctx.constant(blocks, blocks.dtype, "codes"), to=to)
    if zeros is not None:
        shifts = ctx.constant(np.expand_dims(zeros, axis + 1), zeros.dtype, "zero_point")
        value = ctx.op("Sub", value, ctx.op("Cast", shifts, to=to))
    value = ctx.op("Mul", value, ctx.op("Unsqueeze", scale, after))
    ctx.become("Reshape", value, ctx.constant(shape, hint="shape"))
    ctx.drop_unused([x, zero])


def _bytes(ctx: AdapterContext, value: str, what: str) -> Array:
    """Return a constant of 4-bit or 8-bit integers as int8 or uint8."""
    dtype = element_type(ctx, value)
    if dtype not in (TensorProto.INT4, TensorProto.UINT4, TensorProto.INT8, TensorProto.UINT8):
        name = TensorProto.DataType.Name(dtype).lower()
        raise CannotConvert(f"{what} is a tensor({name})")
    signed = dtype in (TensorProto.INT4, TensorProto.INT8)
    return ctx.const(value, what).astype(np.int8 if signed else np.uint8)


def quantize_half(ctx: AdapterContext) -> None:
    """QuantizeLinear-13, DequantizeLinear-13: half precision is cast to and from float32."""
    x, scale, zero = (ctx.input(i) for i in range(3))
    own = element_type(ctx, scale)
    if own not in _HALVES:
        raise CannotConvert("it uses types that are new")
    wide = ctx.op("Cast", scale, to=TensorProto.FLOAT)
    if ctx.node.op_type == "QuantizeLinear":
        ctx.set_inputs(ctx.op("Cast", x, to=TensorProto.FLOAT), wide, zero)
    else:
        ctx.set_inputs(x, wide, zero)
        result, name = ctx.hand_over()
        ctx.define(name, "Cast", result, to=own)


def dequantize_to(ctx: AdapterContext) -> None:
    """DequantizeLinear-21: the result, formerly of any type, is cast."""
    to = ctx.take("output_dtype")
    if not to:
        raise CannotConvert("it uses types that are new")
    result, name = ctx.hand_over()
    ctx.define(name, "Cast", result, to=to)


def dequantize_channels(ctx: AdapterContext) -> None:
    """DequantizeLinear-10 per channel: (x - zero point) * scale, broadcast along the axis."""
    x, scale, zero = (ctx.input(i) for i in range(3))
    rank, to = ctx.known_rank(x), element_type(ctx, scale)
    axis = positive_axis(ctx.attr("axis", 1), rank)
    column = ctx.constant([-1, *[1] * (rank - axis - 1)], hint="shape")
    value = ctx.op("Cast", x, to=to)
    if zero:
        shift = ctx.op("Reshape", ctx.op("Cast", zero, to=to), column)
        value = ctx.op("Sub", value, shift)
    ctx.become("Mul", value, ctx.op("Reshape", scale, column))
