"""Statistics of a tensor: gathered batch by batch, in constant memory, and merged between shards.

Only floating-point elements count: a tensor of integers, booleans or strings leaves every statistic
as it was, and so does one without elements. A NaN or an infinity raises NotFinite, with the
tensor's name, before anything is counted.

Extremes are exact: two shards merge to what the whole gives, in any order. A moving average depends
on the order by its nature; there, shards merge to the whole when they are merged in their order (up
to the last bits of rounding).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import ToolkitError

Array: TypeAlias = NDArray[Any]
Doubles: TypeAlias = NDArray[np.float64]
State: TypeAlias = dict[str, Array]
"""What is written to a file of a statistic: plain arrays by name."""

_PIECE = 1 << 18
"""Elements that are converted to doubles at once, so that a large tensor does not triple."""

_COUNTED = 1 << 16
"""Values of a batch whose magnitudes are counted."""
_EXPONENTS = (-149, 128)
"""Of 32-bit floats; what is beyond counts as the nearest."""

NARROWEST = 255 * 2.0**-126
"""Ranges below this have no scale that float32 can hold as a normal number."""


class NotFinite(ToolkitError):
    """A tensor holds NaN or infinity: it has no range."""


class Mismatch(ToolkitError):
    """Two statistics, or a statistic and a tensor, that do not belong together."""


@dataclass(frozen=True, slots=True)
class Range:
    """The interval that a quantized tensor represents; zero lies in it.

    The rule for degenerate ranges: when nothing was seen, or nothing but zeros (or a range too
    narrow for a float32 scale), the range is [0, 1]. Zero is exact in it, and no scale is zero.
    """

    low: float
    high: float

    @classmethod
    def around(cls, low: float, high: float) -> Range:
        """The least range with zero in it that covers [low, high]."""
        low, high = min(low, 0.0), max(high, 0.0)
        return cls(low, high) if high - low >= NARROWEST else cls(0.0, 1.0)


_Self = TypeVar("_Self", bound="Statistic")


class Statistic(Protocol):
    """What is known of the values of one tensor so far."""

    tensor: str

    @property
    def key(self) -> str:
        """What is gathered and how: statistics of one key can be merged."""
        ...

    @property
    def seen(self) -> bool:
        """Whether anything was counted."""
        ...

    def update(self, values: Array) -> None:
        """Count one batch."""
        ...

    def merge(self: _Self, other: _Self) -> None:
        """Count what `other` counted; of those that depend on the order, `other` comes after."""
        ...

    def state(self) -> State:
        """Everything, as arrays; `restore` takes it back."""
        ...

    def restore(self, state: Mapping[str, Array]) -> None: ...


class Extremes:
    """The least and the greatest value."""

    def __init__(self, tensor: str) -> None:
        self.tensor = tensor
        self.low, self.high = math.inf, -math.inf

    @property
    def key(self) -> str:
        return "extremes"

    @property
    def seen(self) -> bool:
        return self.low <= self.high

    def update(self, values: Array) -> None:
        bounds = finite_bounds(values, self.tensor)
        if bounds is not None:
            self.low, self.high = min(self.low, bounds[0]), max(self.high, bounds[1])

    def merge(self, other: Extremes) -> None:
        require_same_key(self, other)
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def state(self) -> State:
        return {"bounds": np.array([self.low, self.high])}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.low, self.high = map(float, state["bounds"])


class Magnitudes(Extremes):
    """Extremes, and how many of the values are below which power of two.

    Of a large batch, values at regular distances are counted. Zeros do not count.
    """

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor)
        self.counts = np.zeros(_EXPONENTS[1] - _EXPONENTS[0] + 1, np.int64)

    @property
    def key(self) -> str:
        return "magnitudes"

    def update(self, values: Array) -> None:
        super().update(values)
        if not is_float(values) or not values.size:
            return
        some = values.reshape(-1)[:: -(-values.size // _COUNTED)].astype(np.float64)
        exponents = np.frexp(some[some != 0])[1]
        places = np.clip(exponents, *_EXPONENTS) - _EXPONENTS[0]
        self.counts += np.bincount(places, minlength=self.counts.size)

    def merge(self, other: Extremes) -> None:
        super().merge(other)
        assert isinstance(other, Magnitudes)
        self.counts = self.counts + other.counts

    def state(self) -> State:
        return {**super().state(), "counts": self.counts}

    def restore(self, state: Mapping[str, Array]) -> None:
        super().restore(state)
        self.counts = np.asarray(state["counts"])

    def below(self, percent: float) -> float:
        """The least power of two that so many percent of the values are below; 0 without any."""
        if not self.counts.any():
            return 0.0
        reached = np.cumsum(self.counts) >= percent / 100 * self.counts.sum()
        return 2.0 ** (int(np.argmax(reached)) + _EXPONENTS[0])


class ChannelExtremes:
    """The least and the greatest value of every channel: one for each index along `axis`."""

    def __init__(self, tensor: str, axis: int) -> None:
        self.tensor, self.axis = tensor, axis
        self.low: Doubles = np.empty(0)
        self.high: Doubles = np.empty(0)

    @property
    def key(self) -> str:
        return f"channels:{self.axis}"

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

    def merge(self, other: ChannelExtremes) -> None:
        require_same_key(self, other)
        if other.seen:
            self._widen(other.low, other.high)

    def state(self) -> State:
        return {"low": self.low, "high": self.high}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.low, self.high = np.asarray(state["low"]), np.asarray(state["high"])

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


class Average:
    """The moving average of each batch's extremes.

    s_n = m s_(n-1) + (1 - m) b_n, from s_0 = 0; the average is s_n / (1 - m^n), in which the zero
    at the start weighs nothing. A shard of n' batches that follows merges as s = m^n' s + s'.
    """

    def __init__(self, tensor: str, momentum: float) -> None:
        self.tensor, self.momentum = tensor, momentum
        self.sums: Doubles = np.zeros(2)
        self.batches = 0

    @property
    def key(self) -> str:
        return f"average:{self.momentum!r}"

    @property
    def seen(self) -> bool:
        return self.batches > 0

    def update(self, values: Array) -> None:
        bounds = finite_bounds(values, self.tensor)
        if bounds is not None:
            self.sums = self.momentum * self.sums + (1 - self.momentum) * np.array(bounds)
            self.batches += 1

    def merge(self, other: Average) -> None:
        require_same_key(self, other)
        self.sums = self.momentum**other.batches * self.sums + other.sums
        self.batches += other.batches

    def state(self) -> State:
        return {"sums": self.sums, "batches": np.array(self.batches)}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.sums, self.batches = np.asarray(state["sums"]), int(state["batches"])

    def bounds(self) -> tuple[float, float]:
        """The average least and greatest value; (0, 0) when nothing was seen."""
        if not self.seen:
            return 0.0, 0.0
        low, high = self.sums / (1 - self.momentum**self.batches)
        return float(low), float(high)


# -- shared by all


def is_float(values: Array) -> bool:
    """Whether the elements are floating-point numbers, of numpy's kinds or of ONNX's own."""
    return str(values.dtype).startswith(("float", "bfloat"))


def pieces(values: Array) -> Iterator[Doubles]:
    """All elements as doubles, a bounded number at a time."""
    flat = values.reshape(-1)
    for at in range(0, flat.size, _PIECE):
        yield flat[at : at + _PIECE].astype(np.float64)


def finite_bounds(values: Array, tensor: str) -> tuple[float, float] | None:
    """Least and greatest element; None when there is none, or none that counts."""
    if not values.size or not is_float(values):
        return None
    if values.dtype.isbuiltin == 1:
        low, high = float(values.min()), float(values.max())
    else:  # bfloat16 and the like: numpy's reductions are not sure to know them
        bounds = [(float(piece.min()), float(piece.max())) for piece in pieces(values)]
        both = np.array(bounds)
        low, high = float(both.min()), float(both.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        what = "NaN" if math.isnan(low) or math.isnan(high) else "infinity"
        raise NotFinite(f"tensor '{tensor}' holds {what}: it has no range to calibrate")
    return low, high


def require_same_key(one: Statistic, other: Statistic) -> None:
    if one.key != other.key:
        raise Mismatch(f"tensor '{one.tensor}': {one.key} cannot be merged with {other.key}")
