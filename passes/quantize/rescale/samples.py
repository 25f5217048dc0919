"""Calibration statistics of a layer's input: channel extremes and sample rows.

The rows with the least hash values are kept. The choice does not depend on order or sharding of the
data, and equal rows (padding) count once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from toolkit.calibrate.statistics import (
    Array,
    ChannelExtremes,
    is_float,
)

ROWS = 128
"""Sample rows to keep."""


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
        # Sorted by hash: the same array in any order of arrival.
        chosen = np.empty((first.size, rows.shape[1]), np.float32)
        chosen[kept] = own[first[kept]]
        chosen[~kept] = rows[first[~kept] - len(self._order)]
        self.rows, self._order = chosen, order[first]


def _hashes(rows: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return a hash of each row."""
    if not rows.size:
        return np.zeros(len(rows), np.uint64)
    bits = np.ascontiguousarray(rows + np.float32(0)).view(np.uint32)  # + 0: one zero, not two
    found = np.full(len(rows), 14695981039346656037, np.uint64)
    odd = np.random.default_rng(0).integers(0, 1 << 63, rows.shape[1], np.uint64) * np.uint64(2)
    weights = odd + np.uint64(1)
    step = max(1, (1 << 20) // rows.shape[1])
    for at in range(0, len(rows), step):
        part = slice(at, at + step)
        mixed = (bits[part] * weights).sum(axis=1, dtype=np.uint64)
        found[part] ^= mixed ^ (mixed >> np.uint64(29))
    return found * np.uint64(0xBF58476D1CE4E5B9)
