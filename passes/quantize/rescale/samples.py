"""What calibration tells of a layer's input: its extremes by channel, and some of its rows.

Rows are chosen by a hash of what they hold, those with the least: the same ones in any order of the
data and however they are cut into shards, and equal rows (padding) count once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from toolkit.calibrate.statistics import (
    Array,
    ChannelExtremes,
    Range,
    State,
    Statistic,
    is_float,
    require_same_key,
)

ROWS = 128


class Sample:
    """Extremes of every channel, and up to ROWS rows of all channels in 32-bit floats."""

    def __init__(self, tensor: str, axis: int) -> None:
        self.tensor, self.axis = tensor, axis
        self.extremes = ChannelExtremes(tensor, axis)
        self.rows: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self._order: NDArray[np.uint64] = np.zeros(0, np.uint64)

    @property
    def key(self) -> str:
        return f"sample:{ROWS}:{self.axis}"

    @property
    def seen(self) -> bool:
        return self.extremes.seen

    @property
    def largest(self) -> Array:
        """max |x| of each channel."""
        return np.maximum(np.abs(self.extremes.low), np.abs(self.extremes.high))

    def update(self, values: Array) -> None:
        self.extremes.update(values)
        if is_float(values) and values.size:
            rows = np.moveaxis(values, self.axis, -1)
            self._take(rows.reshape(-1, rows.shape[-1]).astype(np.float32))

    def merge(self, other: Sample) -> None:
        require_same_key(self, other)
        self.extremes.merge(other.extremes)
        self._take(other.rows)

    def state(self) -> State:
        return {**self.extremes.state(), "rows": self.rows}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.extremes.restore(state)
        self.rows = np.asarray(state["rows"], np.float32)
        self._order = _hashes(self.rows)

    def _take(self, rows: NDArray[np.float32]) -> None:
        if not rows.size:
            return
        order = np.concatenate([self._order, _hashes(rows)])
        _, first = np.unique(order, return_index=True)
        first = first[:ROWS]
        kept = first < len(self._order)
        own = self.rows.reshape(-1, rows.shape[1])
        # The hashes come sorted, and so do the rows: the same array whatever came first.
        chosen = np.empty((first.size, rows.shape[1]), np.float32)
        chosen[kept] = own[first[kept]]
        chosen[~kept] = rows[first[~kept] - len(self._order)]
        self.rows, self._order = chosen, order[first]


def _hashes(rows: NDArray[np.float32]) -> NDArray[np.uint64]:
    """A number for each row; equal rows have equal ones."""
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


@dataclass(frozen=True, slots=True)
class Sampling:
    """The observer that gathers a Sample."""

    name: ClassVar[str] = "sampling"
    axis: int = -1

    def start(self, tensor: str) -> Statistic:
        return Sample(tensor, self.axis)

    def range(self, statistic: Statistic) -> Range:
        found = cast(Sample, statistic).extremes
        if not found.seen:
            return Range.around(0, 0)
        return Range.around(float(found.low.min()), float(found.high.max()))
