"""Samples of a layer's input, and the int8 error of the layer on them.

    e = |Q(x / s) Q(s W) - x W|^2 / |x W|^2

Q(x) is affine uint8 over the calibration range; Q(W) is symmetric int8 with a scale per output.
Outputs are independent of each other: a subset suffices.

The rows x with the least hashes are kept, independently of the order and sharding of the data;
equal rows (padding) count once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from passes.quantize.layers.int8_weights import FULL_LIMIT, scale_of
from passes.quantize.rescale.propagate import CompensatingLayer
from toolkit.calibrate.statistics import Array, ChannelExtremes, is_float
from toolkit.ir.graph import Graph
from toolkit.quantization.number_format import INT8
from toolkit.quantization.qparams import QParams

ROWS = 128
"""Sample rows to keep."""
_OUTPUTS = 256
"""The most outputs to compute."""


class Sample(ChannelExtremes):
    """The extremes of every channel, and up to ROWS float32 rows."""

    fields = (*ChannelExtremes.fields, "rows")

    def __init__(self, tensor: str, axis: int) -> None:
        super().__init__(tensor, axis, f"sample:{ROWS}")
        self.rows: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._order: NDArray[np.uint64] = np.zeros(0, np.uint64)

    @property
    def largest(self) -> Array:
        """The maximum |x| of each channel."""
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def update(self, values: Array) -> None:
        super().update(values)
        if is_float(values) and values.size:
            rows = np.moveaxis(values, self.axis, -1)
            self._take(rows.reshape(-1, rows.shape[-1]).astype(np.float32))

    def _merge(self, other: ChannelExtremes) -> None:
        assert isinstance(other, Sample)
        super()._merge(other)
        self._take(other.rows)

    def restore(self, state: Mapping[str, Array]) -> None:
        super().restore(state)
        self._order = _hashes(self.rows)

    def _take(self, rows: NDArray[np.float32]) -> None:
        if not rows.size:
            return
        order = np.concatenate([self._order, _hashes(rows)])
        _, first = np.unique(order, return_index=True)
        first = first[:ROWS]
        kept = first < len(self._order)
        own = self.rows.reshape(-1, rows.shape[1])
        # Sorted by hash, independent of the order of arrival.
        chosen = np.empty((first.size, rows.shape[1]), np.float32)
        chosen[kept] = own[first[kept]]
        chosen[~kept] = rows[first[~kept] - len(self._order)]
        self.rows, self._order = chosen, order[first]


def _hashes(rows: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return a hash of each row."""
    if not rows.size:
        return np.zeros(len(rows), np.uint64)
    bits = np.ascontiguousarray(rows + np.float32(0)).view(np.uint32)  # + 0 maps -0 to 0
    found = np.full(len(rows), 14695981039346656037, np.uint64)
    odd = np.random.default_rng(0).integers(0, 1 << 63, rows.shape[1], np.uint64) * np.uint64(2)
    weights = odd + np.uint64(1)
    step = max(1, (1 << 20) // rows.shape[1])
    for at in range(0, len(rows), step):
        part = slice(at, at + step)
        mixed = (bits[part] * weights).sum(axis=1, dtype=np.uint64)
        found[part] ^= mixed ^ (mixed >> np.uint64(29))
    return found * np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A layer with sample rows of its input and some columns of its weights."""

    sink: CompensatingLayer
    rows: Array
    low: Array
    high: Array
    weights: Array
    wanted: Array

    @classmethod
    def of(cls, g: Graph, sink: CompensatingLayer, sample: Sample) -> Trial:
        kernel = sink.kernel
        stored = kernel.floats(g)
        columns = np.unique(np.linspace(0, kernel.outputs - 1, _OUTPUTS).astype(int))
        taken = np.take(stored, columns, axis=kernel.out_axes[0]).astype(np.float32)
        if kernel.in_axes[0] > kernel.out_axes[0]:
            taken = np.swapaxes(taken, *kernel.in_axes, *kernel.out_axes)
        # The first matrix represents a stack.
        weights = taken.reshape(-1, *taken.shape[-2:])[0]
        return cls(sink, sample.rows, sample.low, sample.high, weights, sample.rows @ weights)

    def error(self, by_channel: Array) -> float:
        """Return the error with these factors, relative to the squared outputs."""
        factors = self.sink.factors(by_channel).astype(np.float32)
        params = QParams.from_range((self.low / factors).min(), (self.high / factors).max())
        x = params.dequantize(params.quantize(self.rows / factors))
        w = self.weights * factors[:, None]
        scale = scale_of(np.abs(w).max(axis=0), FULL_LIMIT)
        by_output = QParams.of(scale, INT8.middle, INT8, axis=1)
        off = x @ by_output.dequantize(by_output.quantize(w)) - self.wanted
        size = float((self.wanted.astype(np.float64) ** 2).sum())
        return float((off.astype(np.float64) ** 2).sum()) / size if size else 0.0
