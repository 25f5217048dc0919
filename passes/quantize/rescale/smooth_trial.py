"""The int8 error of a linear layer on sample rows of its input.

    e = |Q(x / s) Q(s W) - x W|^2 / |x W|^2

Q(x) is affine uint8 over the calibration range; Q(W) is symmetric int8 with a scale per output.
Outputs are independent of each other, so a subset suffices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from passes.quantize.layers.int8_weights import FULL_LIMIT, scale_of
from passes.quantize.rescale.propagate import CompensatingLayer
from passes.quantize.rescale.samples import Sample
from toolkit.ir.graph import Array, Graph
from toolkit.quantization.number_format import INT8
from toolkit.quantization.qparams import QParams

_OUTPUTS = 256
"""The most outputs to compute."""


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
