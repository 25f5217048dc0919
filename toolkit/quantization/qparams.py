"""Quantization parameters, and tensors quantized with them.

    x ~ scale (q - zero_point)          q: codes of a `NumberFormat`, low..high

    affine      scale = (max x - min x) / (high - low),  zero_point = round(low - min x / scale)
    symmetric   scale = max |x| / limit,                 zero_point = middle of the format

A range is widened to contain zero, and a degenerate one becomes [0, 1] (see `Range`): zero always
has a code, and padding and Relu are exact. A scale is computed in double precision and rounded to
float32 once; the zero point follows from the rounded scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from toolkit.calibrate.statistics import Range
from toolkit.ir.graph import Array
from toolkit.quantization.number_format import UINT8, NumberFormat

_LARGEST = float(np.finfo(np.float32).max)
_EXACT_BITS = 24
"""Integers of up to this many bits are exact in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class QParams:
    """One scale and zero point for a tensor, or one for each index along `axis`."""

    scale: Array
    """Float32, a scalar or a vector."""
    zero_point: Array
    """Codes of the format, in the shape of `scale`."""
    format: NumberFormat
    axis: int | None = None

    @classmethod
    def of(
        cls, scale: Array | float, zero_point: int, fmt: NumberFormat, axis: int | None = None
    ) -> QParams:
        """Return parameters with one zero point for all scales."""
        scales = np.asarray(scale, np.float32)
        zeros = np.full(scales.shape, zero_point, fmt.dtype)
        return cls(scales, zeros, fmt, axis if scales.ndim else None)

    @classmethod
    def from_range(
        cls, low: float, high: float, fmt: NumberFormat = UINT8, symmetric: bool = False
    ) -> QParams:
        """Return the parameters whose codes cover [low, high] and zero."""
        found = Range.around(low, high)
        if symmetric:
            scale = max(-found.low, found.high) / fmt.limit
            return cls.of(min(scale, _LARGEST), fmt.middle, fmt)
        scale = float(np.float32(min((found.high - found.low) / fmt.steps, _LARGEST)))
        zero_point = int(np.rint(fmt.low - found.low / scale))
        return cls.of(scale, min(max(zero_point, fmt.low), fmt.high), fmt)

    @property
    def key(self) -> tuple[object, ...]:
        """Identify the parameters by value."""
        return self.format.name, self.axis, self.scale.tobytes(), self.zero_point.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QParams) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def low(self) -> float:
        """The lowest value of a tensor with one scale."""
        return (self.format.low - int(self.zero_point)) * float(self.scale)

    @property
    def high(self) -> float:
        """The highest value of a tensor with one scale."""
        return (self.format.high - int(self.zero_point)) * float(self.scale)

    def quantize(self, values: Array) -> Array:
        """Return the codes of `values`, as QuantizeLinear computes them."""
        scale, zero_point = self.laid_along(values.ndim)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.rint(values.astype(self._floats) / scale)
        return self.format.encode(np.nan_to_num(steps) + zero_point)

    def dequantize(self, codes: Array) -> Array:
        """Return the float32 values of `codes`, as DequantizeLinear computes them."""
        scale, zero_point = self.laid_along(codes.ndim)
        return ((codes.astype(self._floats) - zero_point) * scale).astype(np.float32, copy=False)

    def rows(self, rows: slice) -> QParams:
        """Return the parameters of some rows of a tensor."""
        if self.axis != 0:
            return self
        return QParams(self.scale[rows], self.zero_point[rows], self.format, 0)

    def laid_along(self, rank: int) -> tuple[Array, Array]:
        """Return scale and zero point in shapes that broadcast against a tensor of this rank."""
        zeros = self.zero_point.astype(self._floats)
        if self.axis is None:
            return self.scale, zeros
        shape = [-1 if i == self.axis else 1 for i in range(rank)]
        return self.scale.reshape(shape), zeros.reshape(shape)

    @property
    def _floats(self) -> Any:
        return np.float32 if self.format.bits <= _EXACT_BITS else np.float64


@dataclass(frozen=True, slots=True, eq=False)
class QTensor:
    """Codes with their parameters; slicing dequantizes rows."""

    codes: Array
    params: QParams

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype(self) -> np.dtype[np.float32]:
        return np.dtype(np.float32)

    def __getitem__(self, rows: slice) -> Array:
        return self.params.rows(rows).dequantize(self.codes[rows])

    def transposed(self) -> QTensor:
        """Return the transpose of a matrix."""
        axis = None if self.params.axis is None else 1 - self.params.axis
        codes = np.ascontiguousarray(np.transpose(self.codes))
        return QTensor(codes, replace(self.params, axis=axis))
