"""Statistics of a tensor's values, accumulated batch by batch in constant memory.

Only floating-point elements count: integers, booleans, strings and empty tensors leave a statistic
unchanged. NaN and infinity raise NotFinite, with the tensor's name, before anything is counted.

Statistics of shards of the data merge. The result equals that of the whole data, in any order,
except for the moving average, which depends on the order of the batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ToolkitError

Array: TypeAlias = NDArray[Any]
Doubles: TypeAlias = NDArray[np.float64]
State: TypeAlias = dict[str, Array]
"""The data of a statistic, as plain arrays by name."""

_CHUNK = 1 << 18
"""Elements converted to doubles at once, to bound memory."""

_SAMPLED = 1 << 13
"""The most values of a batch whose magnitudes are counted."""
_EXPONENTS = (-149, 128)
"""The exponents of 32-bit floats; values beyond count as the nearest."""

NARROWEST = 255 * 2.0**-126
"""The width below which a range has no 8-bit scale that is a normal float32."""


class NotFinite(ToolkitError):
    """A tensor holds NaN or infinity and cannot be calibrated."""


class Mismatch(ToolkitError):
    """Two statistics, or a statistic and a tensor, differ in channels or kind."""


@dataclass(frozen=True, slots=True)
class Range:
    """The interval that a quantized tensor represents; it always contains zero.

    An empty range, or one too narrow for a float32 scale, becomes [0, 1]: scales are never zero.
    """

    low: float
    high: float

    @classmethod
    def around(cls, low: float, high: float) -> Range:
        """Return the smallest valid range that covers [low, high]."""
        low, high = min(low, 0.0), max(high, 0.0)
        return cls(low, high) if high - low >= NARROWEST else cls(0.0, 1.0)


class Statistic:
    """A mergeable summary of the values of one tensor; subclasses name their `fields`."""

    fields: ClassVar[tuple[str, ...]]
    """The attributes that hold the data: numbers and arrays."""

    def __init__(self, tensor: str, key: str) -> None:
        self.tensor = tensor
        self.key = key
        """The kind of statistic and its parameters; equal keys can be merged."""
        self.failure = ""
        """Why the tensor cannot be summarized, if it cannot."""

    @property
    def seen(self) -> bool:
        """Whether any value was counted."""
        raise NotImplementedError

    def update(self, values: Array) -> None:
        """Count one batch."""
        raise NotImplementedError

    def merge(self, other: Statistic) -> None:
        """Add the values that `other` has counted, as if they came after those counted here."""
        if self.key != other.key:
            raise Mismatch(f"tensor '{self.tensor}': {self.key} cannot be merged with {other.key}")
        self.failure = self.failure or other.failure
        if other.seen:
            self._merge(other)

    def _merge(self, other: Any) -> None:
        raise NotImplementedError

    def state(self) -> State:
        """Return the data as arrays, for `restore`."""
        return {name: np.asarray(getattr(self, name)) for name in (*self.fields, "failure")}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Replace the data with a `state`."""
        for name in (*self.fields, "failure"):
            found = np.array(state[name])
            setattr(self, name, found if found.ndim else found.item())


class Extremes(Statistic):
    """The smallest and largest value, and the number of values below each power of two.

    Magnitudes are counted without zeros; large batches are subsampled at regular distances.
    """

    fields = ("low", "high", "counts")

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor, "extremes")
        self.low, self.high = math.inf, -math.inf
        self.counts = np.zeros(_EXPONENTS[1] - _EXPONENTS[0] + 1, np.int64)

    @property
    def seen(self) -> bool:
        return self.low <= self.high

    def update(self, values: Array) -> None:
        bounds = finite_bounds(values, self.tensor)
        if bounds is None:
            return
        self.low, self.high = min(self.low, bounds[0]), max(self.high, bounds[1])
        sampled = values.reshape(-1)[:: -(-values.size // _SAMPLED)].astype(np.float64)
        exponents = np.frexp(sampled[sampled != 0])[1]
        bins = np.clip(exponents, *_EXPONENTS) - _EXPONENTS[0]
        self.counts += np.bincount(bins, minlength=self.counts.size)

    def _merge(self, other: Extremes) -> None:
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.counts = self.counts + other.counts

    def below(self, percent: float) -> float:
        """Return the smallest power of two above `percent` of the magnitudes; 0 without values."""
        if not self.counts.any():
            return 0.0
        reached = np.cumsum(self.counts) >= percent / 100 * self.counts.sum()
        return 2.0 ** (int(np.argmax(reached)) + _EXPONENTS[0])


class ChannelExtremes(Statistic):
    """The smallest and largest value of each channel along `axis`."""

    fields = ("low", "high")

    def __init__(self, tensor: str, axis: int, key: str = "channels") -> None:
        super().__init__(tensor, f"{key}:{axis}")
        self.axis = axis
        self.low: Doubles = np.empty(0)
        self.high: Doubles = np.empty(0)

    @property
    def seen(self) -> bool:
        return bool(self.low.size)

    def update(self, values: Array) -> None:
        if not is_float(values):
            return
        if not -values.ndim <= self.axis < values.ndim:
            raise Mismatch(f"tensor '{self.tensor}' has rank {values.ndim}: no axis {self.axis}")
        if finite_bounds(values, self.tensor) is None:
            return
        others = tuple(a for a in range(values.ndim) if a != self.axis % values.ndim)
        low, high = values.min(others), values.max(others)
        self._widen(np.asarray(low, np.float64), np.asarray(high, np.float64))

    def _merge(self, other: ChannelExtremes) -> None:
        self._widen(other.low, other.high)

    def _widen(self, low: Doubles, high: Doubles) -> None:
        if not self.seen:
            self.low, self.high = low.copy(), high.copy()
            return
        if low.shape != self.low.shape:
            raise Mismatch(
                f"tensor '{self.tensor}' has {low.size} channels along axis {self.axis}, "
                f"and had {self.low.size} before"
            )
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)


class Average(Statistic):
    """The moving average of each batch's extremes, corrected for its start at zero.

    s_n = m s_(n-1) + (1 - m) b_n with s_0 = 0; the average is s_n / (1 - m^n). A following shard of
    n' batches merges as s = m^n' s + s'.
    """

    fields = ("sums", "batches")

    def __init__(self, tensor: str, momentum: float) -> None:
        super().__init__(tensor, f"average:{momentum!r}")
        self.momentum = momentum
        self.sums: Doubles = np.zeros(2)
        self.batches = 0

    @property
    def seen(self) -> bool:
        return self.batches > 0

    def update(self, values: Array) -> None:
        bounds = finite_bounds(values, self.tensor)
        if bounds is not None:
            self.sums = self.momentum * self.sums + (1 - self.momentum) * np.array(bounds)
            self.batches += 1

    def _merge(self, other: Average) -> None:
        self.sums = self.momentum**other.batches * self.sums + other.sums
        self.batches += other.batches

    def bounds(self) -> tuple[float, float]:
        """Return the average smallest and largest value, or (0, 0) without batches."""
        if not self.seen:
            return 0.0, 0.0
        low, high = self.sums / (1 - self.momentum**self.batches)
        return float(low), float(high)


def is_float(values: Array) -> bool:
    """Return whether the elements are floating-point numbers, including bfloat16 and fp8."""
    dtype = values.dtype
    return dtype.kind == "f" or (dtype.kind == "V" and str(dtype).startswith(("float", "bfloat")))


def chunks_of(values: Array) -> Iterator[Doubles]:
    """Yield all elements as doubles, in chunks of bounded size."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK].astype(np.float64)


def finite_bounds(values: Array, tensor: str) -> tuple[float, float] | None:
    """Return the smallest and largest element, or None without floats; raises NotFinite."""
    if not values.size or not is_float(values):
        return None
    if values.dtype.isbuiltin == 1:
        low, high = float(values.min()), float(values.max())
    else:  # numpy's reductions may not support bfloat16 and similar types
        bounds = np.array([(chunk.min(), chunk.max()) for chunk in chunks_of(values)])
        low, high = float(bounds.min()), float(bounds.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        what = "NaN" if math.isnan(low) or math.isnan(high) else "infinity"
        raise NotFinite(f"tensor '{tensor}' holds {what} and cannot be calibrated")
    return low, high
