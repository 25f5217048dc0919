"""Rules of operators over spatial dimensions: convolution, pooling, resizing."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np

from passes.analysis.shapes.dims import product, window
from passes.analysis.shapes.facts import (
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
    quantized,
)
from toolkit.ir.tensor_type import Shape
from toolkit.symbolic import ceildiv, floordiv

_SAME = ("SAME_UPPER", "SAME_LOWER")


def _spatial(op: Op, spatial: Sizes, kernel: Sizes, ceil: bool = False) -> list[Size]:
    """Return the output sizes of a window that slides over `spatial`."""
    count = len(spatial)
    strides = op.ints("strides") or [1] * count
    dilations = op.ints("dilations") or [1] * count
    auto = op.text("auto_pad", "NOTSET")
    if auto in _SAME:
        return [
            None if size is None else ceildiv(size, stride)
            for size, stride in zip(spatial, strides, strict=True)
        ]
    pads = (op.ints("pads") if auto in ("NOTSET", "") else None) or [0] * (2 * count)
    return [
        window(spatial[i], kernel[i], strides[i], dilations[i], (pads[i], pads[i + count]), ceil)
        for i in range(count)
    ]


def conv(op: Op) -> Answer:
    """Infer [batch, filters, *windows] from images [batch, channels, ...] and the filters."""
    x, weight = op.shape(0), op.shape(1)
    shape = x if x is not None else weight
    if shape is None:
        return Fact(op.dtype(0), None)
    count = len(shape) - 2
    kernel: Sizes = op.ints("kernel_shape") or (weight[2:] if weight is not None else blank(count))
    spatial: Sizes = x[2:] if x is not None else blank(count)
    batch = x[0] if x is not None else None
    filters = weight[0] if weight is not None else None
    return Fact(op.dtype(0), (batch, filters, *_spatial(op, spatial, kernel)))


def conv_transpose(op: Op) -> Answer:
    """Infer stride*(size - 1) + output_padding + extent of the kernel - pads per axis.

    The attribute `output_shape` takes precedence.
    """
    x, weight = op.shape(0), op.shape(1)
    if x is None or weight is None:
        return Fact(op.dtype(0), None)
    count = len(x) - 2
    filters = product((weight[1], op.int("group", 1)))
    given = op.ints("output_shape")
    if given is not None:
        return Fact(op.dtype(0), (x[0], filters, *given[len(given) - count :]))
    strides = op.ints("strides") or [1] * count
    auto = op.text("auto_pad", "NOTSET")
    extra = op.ints("output_padding") or [0] * count
    if auto in _SAME:
        sizes = [size * stride for size, stride in zip(x[2:], strides, strict=True)]
        return Fact(op.dtype(0), (x[0], filters, *(blank(count) if any(extra) else sizes)))
    kernel: Shape = tuple(op.ints("kernel_shape") or weight[2:])
    dilations = op.ints("dilations") or [1] * count
    pads = (op.ints("pads") if auto in ("NOTSET", "") else None) or [0] * (2 * count)
    sizes: list[Size] = []
    for i in range(count):
        extent = (kernel[i] - 1) * dilations[i] + 1
        sizes.append((x[2 + i] - 1) * strides[i] + extra[i] + extent - pads[i] - pads[i + count])
    return Fact(op.dtype(0), (x[0], filters, *sizes))


def pool(op: Op) -> Answer:
    shape, kernel = op.shape(0), op.ints("kernel_shape")
    if shape is None or kernel is None:
        fact = Fact(op.dtype(0), None)
    else:
        sizes = _spatial(op, shape[2:], kernel, op.int("ceil_mode") != 0)
        if None in sizes and op.version >= 22:
            return None  # since opset 22, ONNX specifies the number of windows
        fact = Fact(op.dtype(0), (*shape[:2], *sizes))
    return [fact, Fact(INT64, fact.shape)]


def global_pool(op: Op) -> Answer:
    shape = op.shape(0)
    return Fact(op.dtype(0), None if shape is None else (*shape[:2], *[1] * (len(shape) - 2)))


# -- resizing


def resize(op: Op) -> Answer:
    """Infer `sizes` as given, or floor(size * scale); defer the other modes to ONNX."""
    shape = op.shape(0)
    if shape is None:
        return None
    if op.version < 11:
        return _scaled(op, shape, op.const(1))
    if op.ints("axes") is not None or op.text("coordinate_transformation_mode").startswith("tf_"):
        return None
    if op.given(3):
        if op.text("keep_aspect_ratio_policy", "stretch") != "stretch":
            return None
        sizes = op.sizes(3)
        if sizes is None:
            return Fact(op.dtype(0), blank(len(shape)))
        return Fact(op.dtype(0), sizes) if len(sizes) == len(shape) else None
    return _scaled(op, shape, op.const(2))


def upsample(op: Op) -> Answer:
    shape, scales = op.shape(0), op.attribute("scales")
    if shape is None:
        return None
    if scales is not None:
        return _scaled(op, shape, np.asarray(scales.floats, dtype=np.float32))
    return _scaled(op, shape, op.const(1)) if op.version >= 9 else None


def _scaled(op: Op, shape: Shape, scales: Array | None) -> Fact:
    if scales is None or scales.size != len(shape):
        return Fact(op.dtype(0), blank(len(shape)))
    factors: list[float] = scales.reshape(-1).tolist()
    return Fact(op.dtype(0), [_scaled_size(s, f) for s, f in zip(shape, factors, strict=True)])


def _scaled_size(size: Size, scale: float) -> Size:
    """Return floor(size * scale), the product rounded to single precision as runtimes do.

    For a symbolic size, None unless the product is exact in single precision.
    """
    if isinstance(size, int):
        return floor(float(np.float32(size * scale)))
    exact = Fraction(scale)
    if size is None or exact <= 0 or exact.denominator > 64 or exact.numerator > 1024:
        return None
    return floordiv(size * exact.numerator, exact.denominator)


RULES: dict[str, Rule] = {
    "Conv": conv,
    "ConvInteger": quantized(conv, slice(2), None, INT32),
    "QLinearConv": quantized(conv, slice(0, 6, 3), 7),
    "ConvTranspose": conv_transpose,
    "MaxPool": pool,
    "AveragePool": pool,
    "LpPool": pool,
    "GlobalAveragePool": global_pool,
    "GlobalMaxPool": global_pool,
    "GlobalLpPool": global_pool,
    "Resize": resize,
    "Upsample": upsample,
}
