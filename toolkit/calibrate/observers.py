"""Observers: which statistic of a tensor is gathered, and the range that is read from it.

An observer is a decision, not a store: `start` makes the statistic that gathers, `range` reads a
statistic. Percentile, entropy and MSE read the same histogram, so a second look costs no second
run. See `Range` for the rules that all ranges keep.

    observer  gathers              range
    minmax    extremes             all that was seen
    average   extremes by batch    their moving average; depends on the order of the samples
    percentile, entropy, mse       histogram; see `toolkit.calibrate.clipping`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

from toolkit.calibrate import range_selection as clipping
from toolkit.calibrate.histogram import Histogram
from toolkit.calibrate.statistics import Average, Extremes, Magnitudes, Range, Statistic
from toolkit.errors import UsageError
from toolkit.messages import suggestion

MOST_LEVELS = 1024
"""Twice the bins that a histogram has at least would tell nothing of more levels than this."""


class Observer(Protocol):
    """How the range of a tensor is found."""

    name: ClassVar[str]

    def start(self, tensor: str) -> Statistic:
        """An empty statistic for a tensor of this name."""
        ...

    def range(self, statistic: Statistic) -> Range:
        """The range that a statistic made by `start` tells."""
        ...


@dataclass(frozen=True, slots=True)
class MinMax:
    """From the least to the greatest value."""

    name: ClassVar[str] = "minmax"

    def start(self, tensor: str) -> Statistic:
        return Magnitudes(tensor)

    def range(self, statistic: Statistic) -> Range:
        found = cast(Extremes, statistic)
        return Range.around(found.low, found.high) if found.seen else Range.around(0, 0)


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """The moving average of each batch's extremes: outliers of single batches fade."""

    name: ClassVar[str] = "average"
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise UsageError(f"momentum is {self.momentum}; it must be from 0 to below 1")

    def start(self, tensor: str) -> Statistic:
        return Average(tensor, self.momentum)

    def range(self, statistic: Statistic) -> Range:
        return Range.around(*cast(Average, statistic).bounds())


@dataclass(frozen=True, slots=True)
class _Clipping:
    """Observers that read where to clip off a histogram."""

    def start(self, tensor: str) -> Statistic:
        return Histogram(tensor)

    def range(self, statistic: Statistic) -> Range:
        return Range.around(*self.clip(cast(Histogram, statistic)))

    def clip(self, histogram: Histogram) -> tuple[float, float]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Percentile(_Clipping):
    """The interval in the middle that holds so many percent of the values."""

    name: ClassVar[str] = "percentile"
    percent: float = 99.99

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise UsageError(f"percent is {self.percent}; it must be above 0 and at most 100")

    def clip(self, histogram: Histogram) -> tuple[float, float]:
        return clipping.percentile(histogram, self.percent)


@dataclass(frozen=True, slots=True)
class _ByLevels(_Clipping):
    """Those that weigh what quantizing to so many levels does."""

    levels: int = 256

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= MOST_LEVELS:
            raise UsageError(f"levels is {self.levels}; it must be from 2 to {MOST_LEVELS}")


@dataclass(frozen=True, slots=True)
class Entropy(_ByLevels):
    """The range with the least Kullback-Leibler divergence after quantization."""

    name: ClassVar[str] = "entropy"

    def clip(self, histogram: Histogram) -> tuple[float, float]:
        return clipping.least_divergence(histogram, self.levels)


@dataclass(frozen=True, slots=True)
class Mse(_ByLevels):
    """The range with the least mean squared error after quantization."""

    name: ClassVar[str] = "mse"

    def clip(self, histogram: Histogram) -> tuple[float, float]:
        return clipping.least_squares(histogram, self.levels)


OBSERVERS: tuple[type[Observer], ...] = (MinMax, MovingAverage, Percentile, Entropy, Mse)
"""Those that a user chooses among; per channel is for who plans the quantization."""


def observer_named(name: str) -> Observer:
    """The observer of this name, as it is by default."""
    known = {observer.name: observer for observer in OBSERVERS}
    if name not in known:
        listed = ", ".join(known)
        hint = suggestion(name, list(known)) or f"; there are {listed}"
        raise UsageError(f"no observer is called '{name}'{hint}")
    return known[name]()
