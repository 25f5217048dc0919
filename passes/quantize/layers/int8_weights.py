"""Weights as integers: w ~ s (q - z), with one scale s a channel, or one for all.

    symmetric   s = max |w| / limit,                  q = round(w / s), halves to even
    lopsided    s = (max w - min w) / (2 limit + 1),  q = round(w / s) + z,  z = round(-min w / s)

All in 32-bit floats. Symmetric ones are signed, in -limit..limit, and need no zero point; the
same numbers plus 128 are unsigned. Lopsided ones are unsigned, and zero lies in their range. A
channel of zeros, or of numbers too small to be told from zero, has the scale 1 and is all zeros.

The limit is 127; 64 keeps the sum of two products of an unsigned and a signed byte inside 16 bits,
which processors without VNNI need.

Weights are read in blocks of rows, twice, where they lie; the result of a large one goes to a file
of its own. No float copy of a weight is made, so memory does not grow with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from passes.quantize.layers.row_blocks import Rows, blocks
from toolkit.ir.graph import Array
from toolkit.storage.spill import allocate

FULL, REDUCED = 127, 64
"""The largest integers: of the whole range, and of the one for processors without VNNI."""

_SMALLEST = float(np.finfo(np.float32).tiny)
_VANISHED = 0.5
"""A weight is not quantized when more than this share of what is not zero would become zero."""


def limit_of(reduce_range: bool) -> int:
    return REDUCED if reduce_range else FULL


class Unfit(Exception):
    """Weights that no scale fits; the message says what they have."""


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """Weights in 8 bits, and their scale: one number, or one for each channel."""

    values: Array
    scale: Array
    zero: int = 0


def quantize(weights: Rows, axis: int | None, limit: int = FULL, turned: bool = False) -> Quantized:
    """Float32 weights in int8, with a scale for each index of `axis`, or one for all.

    `turned` gives the transpose of a matrix; `axis` is one of the matrix as it comes in. Raises
    Unfit for weights with NaN or infinity, and where the largest would make zeros of most others.
    """
    scale = scale_of(largest(weights, axis), limit)
    return quantize_by(weights, axis, scale, limit, turned)


def quantize_by(
    weights: Rows, axis: int | None, scale: Array, limit: int = FULL, turned: bool = False
) -> Quantized:
    """The same by scales that are given."""
    if turned and len(weights.shape) != 2:
        raise ValueError("only a matrix can be turned")
    shape = weights.shape[::-1] if turned else weights.shape
    values = allocate(shape, np.int8)
    by_axis = scale
    if axis is not None:
        by_axis = scale.reshape([-1 if i == axis else 1 for i in range(len(weights.shape))])
    there = left = 0
    for rows, block in blocks(weights):
        factor = by_axis[rows] if axis == 0 else by_axis
        rounded = np.rint(block / factor)
        np.clip(rounded, -limit, limit, out=rounded)
        if turned:
            values[:, rows] = rounded.T
        else:
            values[rows] = rounded
        there += int(np.count_nonzero(block))
        left += int(np.count_nonzero(rounded))
    if there - left > _VANISHED * there:
        lost = 1 - left / there
        raise Unfit(f"weights of which {lost:.0%} would be zero beside the largest")
    values.flags.writeable = False
    return Quantized(values, scale)


def unsigned(signed: Quantized) -> Quantized:
    """The same numbers in uint8, around the zero point 128."""
    values = allocate(signed.values.shape, np.uint8)
    for rows, block in blocks(signed.values):
        values[rows] = block.astype(np.int16) + 128
    values.flags.writeable = False
    return Quantized(values, signed.scale, 128)


def quantize_lopsided(weights: Rows, limit: int = FULL) -> Quantized:
    """Float32 weights in uint8 with one scale and one zero point. Raises Unfit as `quantize`."""
    _require_floats(weights)
    ends: Array = np.zeros(2)
    for _, block in blocks(weights):
        ends = np.array([np.minimum(ends[0], block.min()), np.maximum(ends[1], block.max())])
    _require_finite(ends)
    steps = 2 * limit + 1
    scale = scale_of((ends[1] - ends[0]) / steps, 1)
    zero = int(np.rint(-ends[0] / float(scale)))
    values = allocate(weights.shape, np.uint8)
    for rows, block in blocks(weights):
        values[rows] = np.clip(np.rint(block / scale) + zero, 0, steps)
    values.flags.writeable = False
    return Quantized(values, scale, zero)


def scale_of(most: Array, limit: int) -> Array:
    """max |w| / limit, and 1 where that is as good as zero."""
    scale = np.asarray(most, dtype=np.float32) / np.float32(limit)
    return np.where(scale < _SMALLEST, np.float32(1), scale).astype(np.float32)


def largest(weights: Rows, axis: int | None) -> Array:
    """max |w| of each channel, or of all. Raises Unfit for NaN and infinity."""
    _require_floats(weights)
    others = tuple(i for i in range(len(weights.shape)) if i != axis)
    found: Array = np.zeros(() if axis is None else weights.shape[axis], dtype=np.float32)
    for rows, block in blocks(weights):
        # NaN passes through both.
        most = np.maximum(block.max(axis=others, initial=0), -block.min(axis=others, initial=0))
        if axis == 0:
            found[rows] = most
        else:
            found = np.maximum(found, most)
    _require_finite(found)
    return found


def _require_floats(weights: Rows) -> None:
    if weights.dtype != np.float32:
        raise ValueError(f"weights of {weights.dtype}, not float32")


def _require_finite(found: Array) -> None:
    if not np.all(np.isfinite(found)):
        raise Unfit("NaN among its weights" if np.isnan(found).any() else "infinite weights")
