"""The Gram matrix X^T X of a layer's inputs, summed over the calibration data, for GPTQ.

For a wide layer it is larger than the weights, so it is mapped to a file and updated by blocks of
rows.
"""

from __future__ import annotations

import numpy as np

from passes.quantize.layers.row_blocks import blocks
from toolkit.calibrate.statistics import (
    Array,
    Mismatch,
    Statistic,
    finite_bounds,
)
from toolkit.storage.spill import allocate

_ROWS = 4096
"""Rows converted to float32 at a time; bounds the memory that a large batch takes."""


class Gram(Statistic):
    """The sum of x^T x over all rows x, [inputs, inputs] in float32."""

    fields = ("total", "rows")

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor, "gram")
        self.total: Array = np.empty((0, 0), np.float32)
        self.rows = 0

    @property
    def seen(self) -> bool:
        return self.rows > 0

    def update(self, values: Array) -> None:
        if not values.ndim or finite_bounds(values, self.tensor) is None:
            return
        rows = values.reshape(-1, values.shape[-1])
        self._widen(rows.shape[-1])
        for start in range(0, len(rows), _ROWS):
            some = rows[start : start + _ROWS].astype(np.float32)
            for at, _ in blocks(self.total):
                self.total[at] += np.matmul(np.transpose(some[:, at]), some)
        self.rows += len(rows)

    def _merge(self, other: Gram) -> None:
        self._widen(len(other.total))
        for at, _ in blocks(self.total):
            self.total[at] += other.total[at]
        self.rows += other.rows

    def _widen(self, channels: int) -> None:
        """Allocate the matrix, or raise Mismatch if the number of channels changed."""
        if not self.rows:
            self.total = allocate((channels, channels), np.float32)
            self.total[:] = 0
        elif channels != len(self.total):
            raise Mismatch(
                f"tensor '{self.tensor}' has {channels} channels, and had {len(self.total)} before"
            )
