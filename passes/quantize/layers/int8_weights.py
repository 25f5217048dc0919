"""Quantize float32 weights to 8 bits: w ~ s (q - z), with one scale per channel or per tensor.

    symmetric   s = max |w| / limit,                  q = round(w / s), halves to even
    affine      s = (max w - min w) / (2 limit + 1),  q = round(w / s) + z,  z = round(-min w / s)

All in float32. Symmetric weights are int8 in -limit..limit without a zero point, or the same codes
shifted to the middle of uint8. Affine weights are uint8, and their range contains zero. A channel
of zeros or of denormals has the scale 1 and zero codes.

`limit` is that of int8, or 64 with a reduced range: the sum of two uint8 * int8 products then fits
into 16 bits, which x86 processors without VNNI need.

Weights are read twice, in blocks of rows, and a large result is mapped to a file: memory does not
grow with the size of a weight.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from passes.quantize.layers.row_blocks import RowSource, blocks
from toolkit.ir.graph import Array
from toolkit.quantization.number_format import INT8, UINT8, NumberFormat
from toolkit.quantization.qparams import QParams, QTensor
from toolkit.storage.spill import allocate

FULL_LIMIT, REDUCED_LIMIT = INT8.limit, 64
"""The largest code of the full range, and of the range for processors without VNNI."""

_SMALLEST = float(np.finfo(np.float32).tiny)
"""The least normal float32."""
_MOST_VANISHED = 0.5
"""A weight stays float if a larger share of its nonzero elements would become zero."""


def limit_of(reduce_range: bool) -> int:
    """Return the largest code of symmetric int8 weights."""
    return REDUCED_LIMIT if reduce_range else FULL_LIMIT


class Unfit(Exception):
    """The weights cannot be quantized; the message names the reason."""


def quantize(
    weights: RowSource, axis: int | None, limit: int = FULL_LIMIT, transpose: bool = False
) -> QTensor:
    """Quantize to symmetric int8, with a scale for each index of `axis`, or one for all.

    `transpose` returns the transposed matrix; `axis` is one of the given matrix. Raises Unfit for
    weights with NaN or infinity, and if most weights would vanish.
    """
    scale = scale_of(largest(weights, axis), limit)
    return quantize_by(weights, axis, scale, limit, transpose)


def quantize_by(
    weights: RowSource,
    axis: int | None,
    scale: Array,
    limit: int = FULL_LIMIT,
    transpose: bool = False,
) -> QTensor:
    """Quantize to symmetric int8 with the given scales."""
    by_axis = scale
    if axis is not None:
        by_axis = scale.reshape([-1 if i == axis else 1 for i in range(len(weights.shape))])
    nonzero = left = 0

    def rounded(block: Array, rows: slice) -> Array:
        nonlocal nonzero, left
        found = np.rint(block / (by_axis[rows] if axis == 0 else by_axis))
        np.clip(found, -limit, limit, out=found)
        nonzero += int(np.count_nonzero(block))
        left += int(np.count_nonzero(found))
        return found

    codes = _codes(weights, INT8, rounded, transpose)
    require_kept(nonzero, left, _MOST_VANISHED)
    along = 1 - axis if transpose and axis is not None else axis
    return QTensor(codes, QParams.of(scale, INT8.middle, INT8, along))


def unsigned(signed: QTensor) -> QTensor:
    """Return the same weights as uint8."""
    codes = _codes(signed.codes, UINT8, lambda block, _: block.astype(np.int16) + UINT8.middle)
    return QTensor(codes, QParams.of(signed.params.scale, UINT8.middle, UINT8, signed.params.axis))


def quantize_affine(weights: RowSource, limit: int = FULL_LIMIT) -> QTensor:
    """Quantize to uint8 with one scale and one zero point. Raises Unfit like `quantize`."""
    _require_float32(weights)
    ends: Array = np.zeros(2)
    for _, block in blocks(weights):
        ends = np.array([np.minimum(ends[0], block.min()), np.maximum(ends[1], block.max())])
    require_finite(ends)
    steps = 2 * limit + 1
    scale = scale_of((ends[1] - ends[0]) / steps, 1)
    params = QParams.of(scale, int(np.rint(-ends[0] / float(scale))), UINT8)

    def rounded(block: Array, _: slice) -> Array:
        return np.clip(np.rint(block / scale) + int(params.zero_point), 0, steps)

    return QTensor(_codes(weights, UINT8, rounded), params)


def scale_of(most: Array, limit: int) -> Array:
    """Return max |w| / limit, or 1 where that is not a normal float32."""
    scale = np.asarray(most, dtype=np.float32) / np.float32(limit)
    return np.where(scale < _SMALLEST, np.float32(1), scale).astype(np.float32)


def largest(weights: RowSource, axis: int | None) -> Array:
    """Return max |w| of each channel, or of all. Raises Unfit for NaN and infinity."""
    _require_float32(weights)
    others = tuple(i for i in range(len(weights.shape)) if i != axis)
    found: Array = np.zeros(() if axis is None else weights.shape[axis], dtype=np.float32)
    for rows, block in blocks(weights):
        # NaN propagates through both.
        most = np.maximum(block.max(axis=others, initial=0), -block.min(axis=others, initial=0))
        if axis == 0:
            found[rows] = most
        else:
            found = np.maximum(found, most)
    require_finite(found)
    return found


def require_kept(nonzero: int, left: int, most_vanished: float) -> None:
    """Raise Unfit if too large a share of the nonzero weights vanishes."""
    if nonzero - left > most_vanished * nonzero:
        raise Unfit(f"weights of which {1 - left / nonzero:.0%} would round to zero")


def require_finite(numbers: Array) -> None:
    """Raise Unfit for NaN and infinity."""
    if not np.isfinite(numbers).all():
        raise Unfit("NaN among its weights" if np.isnan(numbers).any() else "infinite weights")


def _codes(
    weights: RowSource,
    fmt: NumberFormat,
    rounded: Callable[[Array, slice], Array],
    transpose: bool = False,
) -> Array:
    """Return the codes of a weight, or of its transpose, computed by blocks of rows."""
    if transpose and len(weights.shape) != 2:
        raise ValueError("only a matrix can be transposed")
    codes = allocate(weights.shape[::-1] if transpose else weights.shape, fmt.dtype)
    into: Array = np.transpose(codes) if transpose else codes
    for rows, block in blocks(weights):
        into[rows] = rounded(block, rows)
    codes.flags.writeable = False
    return codes


def _require_float32(weights: RowSource) -> None:
    if weights.dtype != np.float32:
        raise ValueError(f"weights of {weights.dtype}, not float32")
