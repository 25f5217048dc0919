"""How far off a linear layer is in int8, tried on rows of its input.

    e = |Q(x / s) Q(s W) - x W|^2 / |x W|^2

Q(x) has one scale and zero point for all, in unsigned bytes, over the range that was seen; Q(W) is
symmetric with a scale for each output. Outputs do not depend on each other: some of them will do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from passes.quantize.rescale.propagate import Sink
from passes.quantize.rescale.samples import Sample
from toolkit.ir.graph import Array, Graph

_OUTPUTS = 256
_LEVELS = 255
_LIMIT = 127


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A layer with rows of its input and some columns of its weights."""

    sink: Sink
    rows: Array
    low: Array
    high: Array
    weights: Array
    wanted: Array

    @classmethod
    def of(cls, g: Graph, sink: Sink, sample: Sample) -> Trial:
        kernel = sink.kernel
        stored = kernel.floats(g)
        columns = np.unique(np.linspace(0, kernel.outputs - 1, _OUTPUTS).astype(int))
        taken = np.take(stored, columns, axis=kernel.out_axes[0]).astype(np.float32)
        if kernel.in_axes[0] > kernel.out_axes[0]:
            taken = np.swapaxes(taken, *kernel.in_axes, *kernel.out_axes)
        # A stack of matrices is tried by its first.
        weights = taken.reshape(-1, *taken.shape[-2:])[0]
        extremes = sample.extremes
        return cls(sink, sample.rows, extremes.low, extremes.high, weights, sample.rows @ weights)

    def error(self, by_channel: Array) -> float:
        """The error with these factors, relative to the size of the outputs."""
        factors = self.sink.factors(by_channel).astype(np.float32)
        low = min(float((self.low / factors).min()), 0.0)
        high = max(float((self.high / factors).max()), 0.0)
        step = (high - low) / _LEVELS or 1.0
        zero = np.rint(-low / step)
        x = np.clip(np.rint(self.rows / factors / step), -zero, _LEVELS - zero) * step
        w = self.weights * factors[:, None]
        scale = np.abs(w).max(axis=0) / _LIMIT
        scale = np.where(scale > 0, scale, 1)
        w = np.rint(w / scale) * scale
        off = x.astype(np.float32) @ w.astype(np.float32) - self.wanted
        size = float((self.wanted.astype(np.float64) ** 2).sum())
        return float((off.astype(np.float64) ** 2).sum()) / size if size else 0.0
