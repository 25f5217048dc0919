"""A histogram whose bins double in width: shards merge to exactly the histogram of the whole.

Bin k of a histogram with exponent e counts the values in [k 2^e, (k + 1) 2^e). Since
floor(floor(x / w) / 2) = floor(x / 2w), adding up pairs of bins gives exactly the counts of bins of
twice the width. The exponent is the smallest one at which zero and the extremes fit into BINS bins:
it depends on the values alone, not on their order or their split into batches and shards, and so do
the counts.
"""

from __future__ import annotations

import math
import sys

import numpy as np
from numpy.typing import NDArray

from toolkit.calibrate.statistics import Array, Doubles, Statistic, chunks_of, finite_bounds

BINS = 4096
"""The largest number of bins; more than half of them lie between the extremes and zero."""

_MIN_EXPONENT = -160
"""The exponent of the narrowest bins; float32 ends at 2^-149."""


class Histogram(Statistic):
    """Counts of values in bins, with the exact extremes and the number of exact zeros."""

    fields = ("smallest", "largest", "exponent", "first", "zeros", "counts")

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor, f"histogram:{BINS}")
        self.smallest, self.largest = math.inf, -math.inf
        self.exponent = _MIN_EXPONENT
        self.first = 0
        """The number k of the first bin of `counts`."""
        self.counts: NDArray[np.int64] = np.zeros(1, np.int64)
        self.zeros = 0

    @property
    def seen(self) -> bool:
        return self.smallest <= self.largest

    @property
    def low(self) -> float:
        """The smallest value, or zero if that is smaller."""
        return min(self.smallest, 0.0)

    @property
    def high(self) -> float:
        """The largest value, or zero if that is larger."""
        return max(self.largest, 0.0)

    def total(self) -> int:
        return int(self.counts.sum())

    def edges(self) -> Doubles:
        """Return the edges of the bins of `counts`, one more than there are bins."""
        numbers = np.arange(self.first, self.first + self.counts.size + 1, dtype=np.float64)
        with np.errstate(over="ignore"):  # the last edge may overflow
            edges = np.ldexp(numbers, self.exponent)
        limit = sys.float_info.max
        return np.clip(edges, -limit, limit)

    def update(self, values: Array) -> None:
        bounds = finite_bounds(values, self.tensor)
        if bounds is None:
            return
        self._widen(*bounds)
        for chunk in chunks_of(values):
            bins = np.floor(np.ldexp(chunk, -self.exponent))
            if values.dtype.itemsize > 4:  # scaling may flush a negative double to zero
                bins[(bins == 0) & (chunk < 0)] = -1
            numbers = bins.astype(np.int64) - self.first
            self.counts += np.bincount(numbers, minlength=self.counts.size)
            self.zeros += int(np.count_nonzero(chunk == 0))

    def _merge(self, other: Histogram) -> None:
        self.zeros += other.zeros
        self._widen(other.smallest, other.largest)
        counts, first = _coarsened(other.counts, other.first, self.exponent - other.exponent)
        start = first - self.first
        self.counts[start : start + counts.size] += counts

    def _widen(self, smallest: float, largest: float) -> None:
        """Cover these extremes with bins as narrow as possible."""
        self.smallest, self.largest = min(self.smallest, smallest), max(self.largest, largest)
        exponent = max(self.exponent, _exponent_for(self.low, self.high))
        counts, first = _coarsened(self.counts, self.first, exponent - self.exponent)
        start, stop = _bin_of(self.low, exponent), _bin_of(self.high, exponent) + 1
        if (start, stop) != (first, first + counts.size):
            widened = np.zeros(stop - start, np.int64)
            widened[first - start : first - start + counts.size] = counts
            counts, first = widened, start
        self.exponent, self.counts, self.first = exponent, counts, first


def _bin_of(value: float, exponent: int) -> int:
    scaled = math.floor(math.ldexp(value, -exponent))
    return -1 if value < 0 and scaled == 0 else scaled


def _exponent_for(low: float, high: float) -> int:
    """Return the smallest exponent at which [low, high] spans at most BINS bins."""
    # At lower exponents the wider side alone spans at least 2 BINS bins.
    spread = max(high, -low)
    guess = math.frexp(spread)[1] - BINS.bit_length() - 1 if spread else _MIN_EXPONENT
    exponent = max(guess, _MIN_EXPONENT)
    while _bin_of(high, exponent) - _bin_of(low, exponent) >= BINS:
        exponent += 1
    return exponent


def _coarsened(counts: NDArray[np.int64], first: int, steps: int) -> tuple[NDArray[np.int64], int]:
    """Return the counts of bins 2^steps times as wide, and the number of the first bin."""
    if not steps:
        return counts, first
    last = first + counts.size - 1
    start, stop = first >> steps, (last >> steps) + 1
    used = np.flatnonzero(counts)
    wider = np.zeros(stop - start, np.int64)
    # 64-bit integers shift by at most 63 places; further shifts change nothing.
    numbers = (used + first) >> min(steps, 63)
    np.add.at(wider, numbers - start, counts[used])
    return wider, start
