"""Number formats of quantized tensors: one row per format.

    format   codes          zero point of symmetric tensors
    uint8    0..255         128
    int8     -128..127      0
    uint4    0..15          8
    int4     -8..7          0
    int32    biases and sums of products

To add an integer format, add its row; the scheme that writes it is the only other file to change. A
floating-point format (fp8) is a subclass of `NumberFormat` with its own codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from toolkit.ir.graph import Array


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A format of `bits` bits, named as in plans and in numpy; integers unless overridden."""

    name: str
    bits: int
    signed: bool
    data_type: int
    """The element type in ONNX."""

    @property
    def steps(self) -> int:
        """The distance between the lowest and the highest code."""
        return (1 << self.bits) - 1

    @property
    def low(self) -> int:
        """The lowest code."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def high(self) -> int:
        """The highest code."""
        return self.low + self.steps

    @property
    def middle(self) -> int:
        """The zero point of a symmetric tensor."""
        return self.low + (1 << (self.bits - 1))

    @property
    def limit(self) -> int:
        """The most steps on both sides of `middle`."""
        return self.high - self.middle

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type in numpy."""
        return np.dtype(helper.tensor_dtype_to_np_dtype(self.data_type))

    def encode(self, steps: Array) -> Array:
        """Round to the nearest code, halves to even, and saturate."""
        return np.clip(np.rint(steps), self.low, self.high).astype(self.dtype)


UINT8 = NumberFormat("uint8", 8, False, TensorProto.UINT8)
INT8 = NumberFormat("int8", 8, True, TensorProto.INT8)
UINT4 = NumberFormat("uint4", 4, False, TensorProto.UINT4)
INT4 = NumberFormat("int4", 4, True, TensorProto.INT4)
INT32 = NumberFormat("int32", 32, True, TensorProto.INT32)

FORMATS = {f.name: f for f in (UINT8, INT8, UINT4, INT4, INT32)}
"""Every known format by its name."""
