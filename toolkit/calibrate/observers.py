"""Observers: each names a statistic of a tensor and selects a range from it.

Percentile, entropy and MSE share one histogram, and thus one run. `Range` has the rules that all
ranges obey. A new observer is a class here, its name in `ObserverName` and its row in `OBSERVERS`.

    observer                    statistic            range
    minmax                      extremes             all values seen
    average                     extremes per batch   their moving average, in order
    percentile, entropy, mse    histogram            see `toolkit.calibrate.range_selection`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, cast

from toolkit.calibrate import range_selection
from toolkit.calibrate.histogram import Histogram
from toolkit.calibrate.statistics import Average, Extremes, Range, Statistic
from toolkit.errors import UsageError
from toolkit.messages import suggestion

ObserverName = Literal["minmax", "average", "percentile", "entropy", "mse"]
"""The observers that users can choose."""

MAX_LEVELS = 1024
"""The largest number of quantization levels that a histogram's bins resolve."""


class Observer(Protocol):
    """A rule for finding the range of a tensor."""

    name: ClassVar[str]

    def start(self, tensor: str) -> Statistic:
        """Return an empty statistic for a tensor."""
        ...

    def range(self, statistic: Statistic) -> Range:
        """Select the range from a statistic that `start` returned."""
        ...


@dataclass(frozen=True, slots=True)
class MinMax:
    """The range from the smallest to the largest value."""

    name: ClassVar[str] = "minmax"

    def start(self, tensor: str) -> Statistic:
        return Extremes(tensor)

    def range(self, statistic: Statistic) -> Range:
        found = cast(Extremes, statistic)
        return Range.around(found.low, found.high) if found.seen else Range.around(0, 0)


@dataclass(frozen=True, slots=True)
class MovingAverage:
    """The moving average of each batch's extremes, in which outliers of single batches fade."""

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
class Collect:
    """An observer that collects a statistic without selecting a range."""

    name: ClassVar[str] = "collect"
    statistic: Callable[..., Statistic]
    arguments: tuple[int, ...] = ()

    def start(self, tensor: str) -> Statistic:
        return self.statistic(tensor, *self.arguments)

    def range(self, statistic: Statistic) -> Range:
        raise NotImplementedError(f"{statistic.key} does not select a range")


@dataclass(frozen=True, slots=True)
class Percentile:
    """The central interval that holds `percent` of the values."""

    name: ClassVar[str] = "percentile"
    percent: float = 99.99

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise UsageError(f"percent is {self.percent}; it must be above 0 and at most 100")

    def start(self, tensor: str) -> Statistic:
        return Histogram(tensor)

    def range(self, statistic: Statistic) -> Range:
        histogram = cast(Histogram, statistic)
        return Range.around(*range_selection.percentile(histogram, self.percent))


@dataclass(frozen=True, slots=True)
class _ByLevels:
    """An observer that minimizes the error of quantization to `levels` levels."""

    clip: ClassVar[Callable[[Histogram, int], tuple[float, float]]]
    levels: int = 256

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= MAX_LEVELS:
            raise UsageError(f"levels is {self.levels}; it must be from 2 to {MAX_LEVELS}")

    def start(self, tensor: str) -> Statistic:
        return Histogram(tensor)

    def range(self, statistic: Statistic) -> Range:
        return Range.around(*type(self).clip(cast(Histogram, statistic), self.levels))


@dataclass(frozen=True, slots=True)
class Entropy(_ByLevels):
    """The range with the smallest Kullback-Leibler divergence after quantization."""

    name: ClassVar[str] = "entropy"
    clip = range_selection.least_divergence


@dataclass(frozen=True, slots=True)
class Mse(_ByLevels):
    """The range with the smallest mean squared error after quantization."""

    name: ClassVar[str] = "mse"
    clip = range_selection.least_squares


OBSERVERS: Mapping[str, type[Observer]] = {
    each.name: each for each in (MinMax, MovingAverage, Percentile, Entropy, Mse)
}
"""The observers by name."""


def observer_named(name: str) -> Observer:
    """Return the observer of this name, with its defaults."""
    if name not in OBSERVERS:
        known = list(OBSERVERS)
        hint = suggestion(name, known) or f"; choose one of {', '.join(known)}"
        raise UsageError(f"no observer is called '{name}'{hint}")
    return OBSERVERS[name]()
