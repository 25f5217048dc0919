"""A histogram that widens by powers of two, so that shards merge to exactly what the whole gives.

Bin k of a histogram with exponent e counts the values in [k 2^e, (k + 1) 2^e). Since
floor(floor(x / w) / 2) = floor(x / 2w), adding up pairs of bins gives exactly the counts that the
wider bins would have taken. The exponent is the least one at which zero, the least and the greatest
value seen fit into BINS bins: it follows from the values alone, whatever their order and however
they were cut into batches and shards. So do the counts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from toolkit.calibrate.statistics import (
    Array,
    Doubles,
    Extremes,
    State,
    finite_bounds,
    pieces,
    require_same_key,
)

BINS = 4096
"""At most; more than half of them lie between the extremes (and zero)."""

_LEAST_EXPONENT = -160
"""What is smaller than that counts as zero or as a bin beside it: float32 ends at 2^-149."""


class Histogram:
    """Counts of values in bins, with the exact extremes and the number of exact zeros."""

    def __init__(self, tensor: str) -> None:
        self.tensor = tensor
        self.exponent = _LEAST_EXPONENT
        self.first = 0
        """The number k of the first bin of `counts`."""
        self.counts: NDArray[np.int64] = np.zeros(1, np.int64)
        self.zeros = 0
        self._extremes = Extremes(tensor)

    @property
    def key(self) -> str:
        return f"histogram:{BINS}"

    @property
    def seen(self) -> bool:
        return self._extremes.seen

    @property
    def low(self) -> float:
        """The least value, or zero if that is less."""
        return min(self._extremes.low, 0.0)

    @property
    def high(self) -> float:
        """The greatest value, or zero if that is greater."""
        return max(self._extremes.high, 0.0)

    @property
    def width(self) -> float:
        """The width of a bin."""
        return math.ldexp(1.0, self.exponent)

    def total(self) -> int:
        return int(self.counts.sum())

    def edges(self) -> Doubles:
        """The borders of the bins of `counts`: one more than there are bins."""
        numbers = np.arange(self.first, self.first + self.counts.size + 1, dtype=np.float64)
        with np.errstate(over="ignore"):  # the last border of the largest doubles
            edges = np.ldexp(numbers, self.exponent)
        most = sys.float_info.max
        return np.clip(edges, -most, most)

    def update(self, values: Array) -> None:
        bounds = finite_bounds(values, self.tensor)
        if bounds is None:
            return
        self._extremes.low = min(self._extremes.low, bounds[0])
        self._extremes.high = max(self._extremes.high, bounds[1])
        self._fit()
        for piece in pieces(values):
            bins = np.floor(np.ldexp(piece, -self.exponent))
            if values.dtype.itemsize > 4:  # a double may vanish when it is scaled, sign and all
                bins[(bins == 0) & (piece < 0)] = -1
            numbers = bins.astype(np.int64) - self.first
            self.counts += np.bincount(numbers, minlength=self.counts.size)
            self.zeros += int(np.count_nonzero(piece == 0))

    def merge(self, other: Histogram) -> None:
        require_same_key(self, other)
        if not other.seen:
            return
        self._extremes.merge(other._extremes)
        self.zeros += other.zeros
        self._fit()
        counts, first = _coarsened(other.counts, other.first, self.exponent - other.exponent)
        at = first - self.first
        self.counts[at : at + counts.size] += counts

    def state(self) -> State:
        numbers = [self.exponent, self.first, self.zeros]
        return {**self._extremes.state(), "numbers": np.array(numbers), "counts": self.counts}

    def restore(self, state: Mapping[str, Array]) -> None:
        self._extremes.restore(state)
        self.exponent, self.first, self.zeros = map(int, state["numbers"])
        self.counts = np.array(state["counts"], np.int64)

    def _fit(self) -> None:
        """Bins that cover the extremes and zero, as narrow as they can be."""
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
    """The least exponent at which the bins of `low` and `high` are at most BINS bins apart."""
    # A few steps too low for sure: the wider side alone takes 2 BINS bins or more.
    spread = max(high, -low)
    guess = math.frexp(spread)[1] - BINS.bit_length() - 1 if spread else _LEAST_EXPONENT
    exponent = max(guess, _LEAST_EXPONENT)
    while _bin_of(high, exponent) - _bin_of(low, exponent) >= BINS:
        exponent += 1
    return exponent


def _coarsened(counts: NDArray[np.int64], first: int, steps: int) -> tuple[NDArray[np.int64], int]:
    """The counts of bins that are 2^steps times as wide, and the number of the first of them."""
    if not steps:
        return counts, first
    last = first + counts.size - 1
    start, stop = first >> steps, (last >> steps) + 1
    used = np.flatnonzero(counts)
    wider = np.zeros(stop - start, np.int64)
    # A machine word shifts by at most 63 places, after which nothing changes any more.
    numbers = (used + first) >> min(steps, 63)
    np.add.at(wider, numbers - start, counts[used])
    return wider, start
