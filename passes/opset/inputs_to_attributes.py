"""Adapters to an older opset that moves inputs back to attributes, or writes defaults explicitly.

Each is exact and costs nothing at run time.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto, numpy_helper

from passes.analysis.axes import positive_axis
from passes.analysis.operands import dims
from passes.opset.adapter_context import Adapter, AdapterContext, Array, CannotConvert
from toolkit.ir import node as nd
from toolkit.symbolic import is_positive

_TO_END = np.iinfo(np.int64).max


def to_attributes(*names: str) -> Adapter:
    """Move integer inputs 1, 2, ... to attributes."""

    def adapt(ctx: AdapterContext) -> None:
        given = {name: ctx.input(i) for i, name in enumerate(names, 1)}
        known = {n: ctx.const(value, f"its input {n}") for n, value in given.items() if value}
        for name, array in known.items():
            ctx.set(**{name: [int(v) for v in array.reshape(-1)]})
        _keep_inputs(ctx, 1)

    return adapt


def _keep_inputs(ctx: AdapterContext, count: int) -> None:
    """Drop the inputs behind the first `count`."""
    dropped = list(ctx.node.input[count:])
    ctx.set_inputs(*ctx.node.input[:count])
    ctx.drop_unused(dropped)


def top_k(ctx: AdapterContext) -> None:
    """TopK-1: k is an attribute."""
    k = int(ctx.const(ctx.input(1), "k").reshape(-1)[0])
    _keep_inputs(ctx, 1)
    ctx.set(k=k)


def reduce_axes(ctx: AdapterContext) -> None:
    """Reduce*: the axes are an attribute; an empty list that reduces nothing is an Identity."""
    given = ctx.input(1)
    axes = [int(v) for v in ctx.const(given, "its axes").reshape(-1)] if given else []
    if not axes and ctx.attr("noop_with_empty_axes", 0):
        if ctx.node.op_type in ("ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum"):
            raise CannotConvert("it applies its function without reducing an axis")
        ctx.become("Identity", ctx.input(0))
        return
    _keep_inputs(ctx, 1)
    ctx.take("noop_with_empty_axes")
    if axes:
        ctx.set(axes=axes)


def slice_bounds(ctx: AdapterContext) -> None:
    """Slice-1: starts, ends and axes are attributes, and every step is 1."""
    if ctx.input(4) and (ctx.const(ctx.input(4), "its step") != 1).any():
        raise CannotConvert("its step is not 1")
    to_attributes("starts", "ends", "axes")(ctx)
    if ctx.attr("axes") is not None:
        nonnegative_axes(ctx)


def pad_attributes(ctx: AdapterContext) -> None:
    """Pad-2: the widths and the value are attributes."""
    pads = ctx.const(ctx.input(1), "its pads")
    value = ctx.const(ctx.input(2), "its value") if ctx.input(2) else None
    if value is not None:
        ctx.set(value=_float_attribute(value, "its value"))
    _keep_inputs(ctx, 1)
    ctx.set(pads=[int(v) for v in pads.reshape(-1)])


def pad_all_axes(ctx: AdapterContext) -> None:
    """Pad-13: there are widths for all axes."""
    given = ctx.input(3)
    if not given:
        ctx.set_inputs(*ctx.node.input[:3])
        return
    axes, pads = ctx.const(given, "its axes").reshape(-1), ctx.const(ctx.input(1), "its pads")
    rank = ctx.known_rank(ctx.input(0))
    widths = np.zeros((2, rank), np.int64)
    widths[:, [positive_axis(int(axis), rank) for axis in axes]] = pads.reshape(2, -1)
    dropped = [ctx.input(1), given]
    ctx.set_inputs(ctx.input(0), ctx.constant(widths.reshape(-1), hint="pads"), ctx.input(2))
    ctx.drop_unused(dropped)


def clip_attributes(ctx: AdapterContext) -> None:
    """Clip-6: the bounds are attributes."""
    bounds = {name: ctx.input(i) for i, name in enumerate(("min", "max"), 1)}
    known = {n: ctx.const(v, f"its bound {n}") for n, v in bounds.items() if v}
    ctx.set(**{n: _float_attribute(array, f"its bound {n}") for n, array in known.items()})
    _keep_inputs(ctx, 1)


def _float_attribute(value: Array, what: str) -> float:
    """Return a scalar as an attribute, which is a 32-bit float."""
    number = value.reshape(-1)[0]
    with np.errstate(over="ignore"):
        narrow = np.float32(number)
    if narrow != number and not np.isnan(number):
        raise CannotConvert(f"{what} is not a 32-bit float")
    return float(narrow)


def split_parts(ctx: AdapterContext) -> None:
    """Split-13: without lengths, the parts are equal."""
    count = ctx.attr("num_outputs")
    if count is None or ctx.input(1):
        return
    size = _axis_size(ctx)
    if size is None:
        raise CannotConvert("whether its parts are equal is only known at run time")
    ctx.take("num_outputs")
    if size % count:
        part = math.ceil(size / count)
        lengths = [part] * (count - 1) + [size - part * (count - 1)]
        ctx.set_inputs(ctx.input(0), ctx.constant(lengths, hint="split"))


def _axis_size(ctx: AdapterContext) -> int | None:
    sizes, axis = ctx.sizes(ctx.input(0)), int(ctx.attr("axis", 0))
    return None if sizes is None else sizes[axis]


def softmax_from_axis(ctx: AdapterContext) -> None:
    """Softmax, LogSoftmax, Hardmax: all dimensions from `axis` on are one; their others are 1."""
    axis = ctx.attr("axis", -1)
    if axis != -1:
        sizes = ctx.sizes(ctx.input(0))
        if sizes is None or any(size != 1 for size in sizes[positive_axis(axis, len(sizes)) + 1 :]):
            raise CannotConvert(f"it works along axis {axis} alone")
    ctx.set(axis=axis)


def shape_bounds(ctx: AdapterContext) -> None:
    """Shape-13 returns all sizes: a Slice selects those between `start` and `end`."""
    start, end = ctx.take("start", 0), ctx.take("end", _TO_END)
    if (start, end) == (0, _TO_END):
        return
    bounds = [ctx.constant([bound], hint="bound") for bound in (start, end)]
    axes = ctx.constant([0], hint="axes")
    ctx.become("Slice", ctx.op("Shape", ctx.input(0)), *bounds, axes)


def reshape_zeros(ctx: AdapterContext) -> None:
    """Reshape-13: 0 in the shape copies a size."""
    if ctx.attr("allowzero", 0):
        sizes = dims(ctx.graph, ctx.input(1))
        if sizes is None or not all(size == -1 or is_positive(size) for size in sizes):
            raise CannotConvert("its shape may have a size of 0 (allowzero)")
    ctx.take("allowzero")


def cast_like(ctx: AdapterContext) -> None:
    """CastLike: a Cast to the type, which is known."""
    found = ctx.types.of(ctx.graph, ctx.input(1))
    if found is None or not found.dtype:
        raise CannotConvert(f"the element type of '{ctx.input(1)}' is unknown")
    kept = {n: ctx.attr(n) for n in ("saturate", "round_mode") if ctx.attr(n) is not None}
    ctx.become("Cast", ctx.input(0), to=found.dtype, **kept)


def cast_saturate(ctx: AdapterContext) -> None:
    """Cast, QuantizeLinear: `saturate` only concerns 8-bit floats."""
    ctx.take("saturate")


def dft_axis(ctx: AdapterContext) -> None:
    """DFT-17: the axis is an attribute, counted from the front."""
    given = ctx.input(2)
    axis = int(ctx.const(given, "its axis").reshape(-1)[0]) if given else -2
    if axis < 0:
        axis += ctx.known_rank(ctx.input(0))
    _keep_inputs(ctx, 2)
    ctx.set(axis=axis)


def grid_sample_mode(ctx: AdapterContext) -> None:
    """GridSample-16: the modes have a `bi`, and there are two dimensions."""
    if ctx.known_rank(ctx.input(0)) != 4:
        raise CannotConvert("its input does not have two spatial dimensions")
    mode = ctx.attr("mode", "linear")
    ctx.set(mode={"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode))


def roi_align_corners(ctx: AdapterContext) -> None:
    """RoiAlign-10 does not shift positions by half a pixel."""
    if ctx.attr("coordinate_transformation_mode", "half_pixel") != "output_half_pixel":
        raise CannotConvert("it shifts positions by half a pixel")
    ctx.take("coordinate_transformation_mode")


def dropout_attributes(ctx: AdapterContext) -> None:
    """Dropout-10 at inference: without ratio, seed and training mode."""
    training = ctx.input(2)
    if training and ctx.const(training, "its training mode").any():
        raise CannotConvert("it is in training mode")
    if ctx.used_outputs(1):
        raise CannotConvert("its mask is used")
    ctx.take("seed")
    ctx.graph.set_outputs(ctx.node, ctx.node.output[:1])
    _keep_inputs(ctx, 1)


def dropout_mask(ctx: AdapterContext) -> None:
    """Dropout-7: the mask has the type of the data."""
    if ctx.used_outputs(1):
        raise CannotConvert("its mask is used")
    ctx.graph.set_outputs(ctx.node, ctx.node.output[:1])


def constant_tensor(ctx: AdapterContext) -> None:
    """Constant-11: the value is a tensor."""
    for name, dtype in (
        ("value_int", np.int64),
        ("value_ints", np.int64),
        ("value_float", np.float32),
        ("value_floats", np.float32),
    ):
        value = ctx.attr(name)
        if value is not None:
            ctx.take(name)
            array: Array = np.asarray(value, dtype)
            ctx.set(value=numpy_helper.from_array(array))


def scatter(ctx: AdapterContext) -> None:
    """ScatterElements is Scatter."""
    nonnegative_axes(ctx)
    _require_nonnegative(ctx, 1)
    ctx.graph.set_op(ctx.node, "Scatter")


def gemm_bias(ctx: AdapterContext) -> None:
    """Gemm-9: the third operand is required."""
    if not ctx.input(2):
        zero = ctx.constant(0, ctx.dtype(ctx.input(0)), "zero")
        ctx.set_inputs(ctx.input(0), ctx.input(1), zero)


def nonnegative_axes(ctx: AdapterContext) -> None:
    """Below opset 11, axes are counted from the front."""
    name = "axes" if ctx.attr("axes") is not None else "axis"
    found: int | list[int] | None = ctx.attr(name)
    listed = found if isinstance(found, list) else [] if found is None else [found]
    if all(axis >= 0 for axis in listed):
        return
    rank = ctx.known_rank(ctx.input(0))
    if ctx.node.op_type == "Unsqueeze":
        rank += len(listed)
    elif ctx.node.op_type == "OneHot":
        rank += 1
    counted = [positive_axis(axis, rank) for axis in listed]
    ctx.set(**{name: counted if name == "axes" else counted[0]})


def nonnegative_slice_axes(ctx: AdapterContext) -> None:
    """Slice-10: the axes are counted from the front."""
    axes = ctx.input(3)
    if not axes:
        return
    known = ctx.const(axes, "its axes").reshape(-1)
    if (known < 0).any():
        rank = ctx.known_rank(ctx.input(0))
        counted = ctx.constant([positive_axis(int(a), rank) for a in known], known.dtype, "axes")
        ctx.graph.set_input(ctx.node, 3, counted)
        ctx.drop_unused([axes])


def nonnegative_indices(ctx: AdapterContext) -> None:
    """Gather-1, OneHot-9: indices are not negative."""
    nonnegative_axes(ctx)
    _require_nonnegative(ctx, 1 if ctx.node.op_type == "Gather" else 0)


def _require_nonnegative(ctx: AdapterContext, index: int) -> None:
    known = ctx.graph.const(ctx.input(index))
    if known is None or (known < 0).any():
        raise CannotConvert("its indices may be negative")


# -- quantization


def quantize_type(ctx: AdapterContext) -> None:
    """QuantizeLinear-19: the zero point tells the type."""
    wanted, zero = ctx.attr("output_dtype", 0), ctx.input(2)
    if wanted and not zero and wanted != TensorProto.UINT8:
        sizes = ctx.sizes(ctx.input(1))
        if sizes is None or None in sizes:
            raise CannotConvert("the shape of its scale is unknown")
        if wanted not in (TensorProto.INT8, TensorProto.UINT8):
            raise CannotConvert(f"it quantizes to {TensorProto.DataType.Name(wanted).lower()}")
        zeros: Array = np.zeros([size for size in sizes if size is not None], np.int8)
        ctx.set_inputs(ctx.input(0), ctx.input(1), ctx.constant(zeros, np.int8, "zero_point"))
    ctx.take("output_dtype")


def dequantized_type(ctx: AdapterContext) -> None:
    """DequantizeLinear-21: the scale tells the type."""
    wanted = ctx.attr("output_dtype", 0)
    found = ctx.types.of(ctx.graph, ctx.input(1))
    if wanted and (found is None or found.dtype != wanted):
        raise CannotConvert("its result does not have the type of its scale (output_dtype)")
    ctx.take("output_dtype")


def quantize_precision(ctx: AdapterContext) -> None:
    """QuantizeLinear-21: it divides in the type of its operands."""
    wanted = ctx.attr("precision", 0)
    found = ctx.types.of(ctx.graph, ctx.input(0))
    if wanted and (found is None or found.dtype != wanted):
        raise CannotConvert("it divides in a type of its own (precision)")
    ctx.take("precision")


def per_tensor(ctx: AdapterContext) -> None:
    """QuantizeLinear-10, DequantizeLinear-10: the scale is a scalar."""
    scale, zero = ctx.input(1), ctx.input(2)
    sizes = ctx.sizes(scale)
    if sizes is None or sizes not in ((), (1,)):
        raise CannotConvert("it has a scale per channel")
    if sizes == (1,):
        known = [ctx.const(value, "its scale") for value in (scale, zero) if value]
        ctx.set_inputs(
            ctx.input(0), *(ctx.constant(a.reshape(()), a.dtype, "scale") for a in known)
        )
        ctx.drop_unused([scale, zero])
    ctx.take("axis")


# -- Resize


def resize_all_axes(ctx: AdapterContext) -> None:
    """Resize-13: there are scales or sizes for all axes."""
    axes = ctx.attr("axes")
    if axes is None:
        return
    x, roi, scales, sizes = (ctx.input(i) for i in range(4))
    if roi or ctx.attr("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise CannotConvert("it resizes some axes, by a region or an aspect ratio")
    rank = ctx.known_rank(x)
    places = [positive_axis(axis, rank) for axis in axes]
    if scales:
        factors: Array = np.ones(rank, np.float32)
        factors[places] = ctx.const(scales, "its scales").reshape(-1)
        scales = ctx.constant(factors, np.float32, "scales")
    else:
        known = ctx.sizes(x)
        wanted = ctx.const(sizes, "its sizes").reshape(-1).tolist()
        given = dict(zip(places, wanted, strict=True))
        whole = [given.get(i, known[i] if known is not None else None) for i in range(rank)]
        if None in whole:
            raise CannotConvert("the sizes of its other axes are unknown")
        sizes = ctx.constant(whole, hint="sizes")
    dropped = nd.inputs_of(ctx.node)
    ctx.take("axes")
    ctx.set_inputs(x, roi, scales, sizes)
    ctx.drop_unused(dropped)


def resize_empty_inputs(ctx: AdapterContext) -> None:
    """Resize-11: unused inputs are empty instead of omitted."""
    inputs = [ctx.input(i) for i in range(4)]
    for index in (1, 2):
        inputs[index] = inputs[index] or ctx.constant([], np.float32, "empty")
    ctx.set_inputs(*inputs)


def resize_factors(ctx: AdapterContext) -> None:
    """Resize-10: by scales, with position = index / scale; nearest by the direction of scaling."""
    scales, mode = ctx.input(2), ctx.attr("mode", "nearest")
    if ctx.input(3):
        raise CannotConvert("it resizes to given sizes")
    position = ctx.attr("coordinate_transformation_mode", "half_pixel")
    if position != "asymmetric" or mode not in ("nearest", "linear"):
        raise CannotConvert(f"older opsets have no {position} {mode} sampling")
    known = ctx.const(scales, "its scales")
    rounding = ctx.attr("nearest_mode", "round_prefer_floor")
    up, down = rounding == "floor" and (known >= 1).all(), rounding == "ceil" and (known <= 1).all()
    if mode == "nearest" and not (up or down or (known == 1).all()):
        raise CannotConvert(f"older opsets do not round by {rounding}")
    dropped = [ctx.input(1)]
    ctx.set_inputs(ctx.input(0), scales)
    for name in (
        "coordinate_transformation_mode",
        "cubic_coeff_a",
        "exclude_outside",
        "extrapolation_value",
        "nearest_mode",
    ):
        ctx.take(name)
    ctx.drop_unused(dropped)


def resize_to_upsample(ctx: AdapterContext) -> None:
    """Upsample-9: every scale is at least 1."""
    if (ctx.const(ctx.input(1), "its scales") < 1).any():
        raise CannotConvert("it shrinks its input")
    ctx.graph.set_op(ctx.node, "Upsample")
