"""Domains: what values an input may take, and how a feed draws from them.

A feed is drawn on an `Occasion`. Its `variation` numbers the feeds of a model, so that one pads on
the right and the next on the left, one takes the first branch of a switch and the next the other.
A calm occasion avoids everything a model might object to: no padding, the first choice, id 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.symbolic import Dim, Expr, evaluate

Array = NDArray[Any]
Dtype = np.dtype[Any]

_WORDS = ("a", "cat", "sat", "on", "the", "mat", "and", "purred", "softly", "")
_UNBOUNDED_ROWS = 2
"""Row count of a table whose size nothing tells."""


@dataclass(frozen=True, slots=True)
class Occasion:
    """Which feed this is, and the sizes of its dynamic dimensions."""

    random: np.random.Generator
    sizes: Mapping[str, int]
    variation: int = 0
    calm: bool = False

    def size(self, dim: Dim | None, default: int) -> int:
        """The number that a dimension has in this feed; `default` when it cannot be told."""
        if isinstance(dim, Expr):
            try:
                dim = evaluate(dim, self.sizes)
            except KeyError:
                return default
        return default if dim is None else dim


class Domain(Protocol):
    """The set of values that an input may take."""

    def draw(self, shape: tuple[int, ...], dtype: Dtype, occasion: Occasion) -> Array:
        """A tensor of this shape and element type from the domain."""
        ...


@dataclass(frozen=True, slots=True)
class Anything:
    """Whatever the element type suggests: normal floats, bytes, small positive integers, words."""

    def draw(self, shape: tuple[int, ...], dtype: Dtype, occasion: Occasion) -> Array:
        random = occasion.random
        if dtype.kind == "O":
            return np.asarray(random.choice(_WORDS, shape), dtype=object)
        if dtype.kind == "b":
            return np.asarray(random.integers(0, 2, shape, dtype=np.int8) == 1)
        if dtype.kind == "c":
            parts = random.standard_normal((2, *shape))
            return np.asarray(parts[0] + 1j * parts[1], dtype=dtype)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            # Positive where there is room: a zero might end up as a divisor.
            low, high = (limits.min, limits.max) if dtype.itemsize == 1 else (1, 9)
            return random.integers(low, high, shape, dtype=dtype, endpoint=True)
        if "int" in dtype.name:  # int4 and smaller
            return np.asarray(random.integers(0, 2, shape)).astype(dtype)
        return np.asarray(random.standard_normal(shape)).astype(dtype)


@dataclass(frozen=True, slots=True)
class Positive:
    """Numbers in an interval above 0: what roots, logarithms and divisors take."""

    low: float = 0.1
    high: float = 1.0

    def draw(self, shape: tuple[int, ...], dtype: Dtype, occasion: Occasion) -> Array:
        drawn = np.asarray(occasion.random.uniform(self.low, self.high, shape))
        return np.ceil(drawn).astype(dtype) if dtype.kind in "iu" else drawn.astype(dtype)


@dataclass(frozen=True, slots=True)
class Ids:
    """Rows of a table. `padding` is an id that the graph compares with: it fills the row's end."""

    rows: Dim | None
    offset: int = 0
    """The graph adds this before it looks up."""
    padding: int | None = None

    def draw(self, shape: tuple[int, ...], dtype: Dtype, occasion: Occasion) -> Array:
        rows = max(occasion.size(self.rows, _UNBOUNDED_ROWS), 1)
        if occasion.calm:
            ids = np.zeros(shape, dtype=np.int64)
        else:
            ids = occasion.random.integers(0, rows, shape, dtype=np.int64)
            if self.padding is not None and len(shape) > 1:
                ids = np.where(_mask(shape, occasion), ids, self.padding + self.offset)
        return (ids - self.offset).astype(dtype)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few values that the graph distinguishes; each feed takes the next one."""

    values: tuple[int | float | bool, ...]

    def draw(self, shape: tuple[int, ...], dtype: Dtype, occasion: Occasion) -> Array:
        first = 0 if occasion.calm else occasion.variation
        count = int(np.prod(shape))
        picked = [self.values[(first + i) % len(self.values)] for i in range(count)]
        return np.array(picked, dtype=dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class Mask:
    """0 and 1 along the last axis, as padding makes them: at least one 1 in a row."""

    def draw(self, shape: tuple[int, ...], dtype: Dtype, occasion: Occasion) -> Array:
        if occasion.calm or not shape:
            return np.ones(shape, dtype=dtype)
        return _mask(shape, occasion).astype(dtype)


@dataclass(frozen=True, slots=True)
class Length:
    """Lengths from 1 to a size of another tensor; one row has all of it."""

    bound: Dim | None
    most: int = 1 << 30

    def draw(self, shape: tuple[int, ...], dtype: Dtype, occasion: Occasion) -> Array:
        shortest = min((s for s in occasion.sizes.values() if s > 3), default=4)
        bound = max(1, min(occasion.size(self.bound, shortest), self.most))
        lengths = np.full(int(np.prod(shape)), bound)
        if not occasion.calm:
            lengths[1:] = occasion.random.integers(1, bound, lengths[1:].shape, endpoint=True)
        return lengths.reshape(shape).astype(dtype)


Pattern = Literal["zeros", "ones", "twos", "small", "axes", "reshape", "size"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number or short list that steers an operator: axes, a shape, a count."""

    pattern: Pattern

    def draw(self, shape: tuple[int, ...], dtype: Dtype, occasion: Occasion) -> Array:
        ones = np.ones(shape)
        if self.pattern == "zeros":
            drawn = 0 * ones
        elif self.pattern == "ones" or (occasion.calm and self.pattern in ("twos", "small")):
            drawn = ones
        elif self.pattern == "twos":
            drawn = 2 * ones
        elif self.pattern == "size":
            drawn = 8 * ones
        elif self.pattern == "axes":
            drawn = np.arange(ones.size).reshape(shape)
        elif self.pattern == "reshape":  # one column: fits any number of elements
            drawn = ones
            drawn[..., :1] = -1
        else:
            drawn = np.asarray(occasion.random.integers(1, 3, shape, endpoint=True))
        return np.asarray(drawn).astype(dtype)


def _mask(shape: tuple[int, ...], occasion: Occasion) -> Array:
    """True where a row is valid: rows of different lengths, the first one full when there are two.

    Feeds pad on the right and on the left in turn.
    """
    width = shape[-1]
    rows = int(np.prod(shape[:-1]))
    valid = occasion.random.integers(1, max(width, 2), rows)
    if rows > 1:
        valid[0] = width
    mask = np.arange(width) < valid[:, None]
    if occasion.variation % 2:
        mask = mask[:, ::-1]
    return mask.reshape(shape)
