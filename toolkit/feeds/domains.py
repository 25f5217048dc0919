"""Domains: the values that an input may take, and how to draw from them.

The settings of one feed are a `FeedVariant`. Its `variation` numbers the feeds of a model: they
alternate between padding on the right and on the left, and between the branches of a switch. A
`calm` variant avoids values that a model might reject: no padding, the first choice, id 0.
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
_UNKNOWN_ROWS = 2
"""The assumed number of rows of a table of unknown size."""


@dataclass(frozen=True, slots=True)
class FeedVariant:
    """The random generator, sizes and variation of one feed."""

    random: np.random.Generator
    sizes: Mapping[str, int]
    variation: int = 0
    calm: bool = False

    def size(self, dim: Dim | None, default: int) -> int:
        """Return the size of a dimension in this feed, or `default` if it is unknown."""
        if isinstance(dim, Expr):
            try:
                dim = evaluate(dim, self.sizes)
            except KeyError:
                return default
        return default if dim is None else dim


class Domain(Protocol):
    """The set of values that an input may take."""

    def draw(self, shape: tuple[int, ...], dtype: Dtype, variant: FeedVariant) -> Array:
        """Draw a tensor of this shape and element type."""
        ...


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value of the element type: normal floats, bytes, small positive integers, words."""

    def draw(self, shape: tuple[int, ...], dtype: Dtype, variant: FeedVariant) -> Array:
        random = variant.random
        if dtype.kind == "O":
            return np.asarray(random.choice(_WORDS, shape), dtype=object)
        if dtype.kind == "b":
            return np.asarray(random.integers(0, 2, shape, dtype=np.int8) == 1)
        if dtype.kind == "c":
            parts = random.standard_normal((2, *shape))
            return np.asarray(parts[0] + 1j * parts[1], dtype=dtype)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            # positive, since a zero might become a divisor
            low, high = (limits.min, limits.max) if dtype.itemsize == 1 else (1, 9)
            return random.integers(low, high, shape, dtype=dtype, endpoint=True)
        if "int" in dtype.name:  # int4 and smaller
            return np.asarray(random.integers(0, 2, shape)).astype(dtype)
        return np.asarray(random.standard_normal(shape)).astype(dtype)


@dataclass(frozen=True, slots=True)
class Positive:
    """Numbers in an interval above 0, for roots, logarithms and divisors."""

    low: float = 0.1
    high: float = 1.0

    def draw(self, shape: tuple[int, ...], dtype: Dtype, variant: FeedVariant) -> Array:
        drawn = np.asarray(variant.random.uniform(self.low, self.high, shape))
        return np.ceil(drawn).astype(dtype) if dtype.kind in "iu" else drawn.astype(dtype)


@dataclass(frozen=True, slots=True)
class Ids:
    """Row numbers of a table; `padding` is the id of padding, if the graph compares with one."""

    rows: Dim | None
    offset: int = 0
    """The number that the graph adds before the lookup."""
    padding: int | None = None

    def draw(self, shape: tuple[int, ...], dtype: Dtype, variant: FeedVariant) -> Array:
        rows = max(variant.size(self.rows, _UNKNOWN_ROWS), 1)
        if variant.calm:
            ids = np.zeros(shape, dtype=np.int64)
        else:
            ids = variant.random.integers(0, rows, shape, dtype=np.int64)
            if self.padding is not None and len(shape) > 1:
                ids = np.where(_mask(shape, variant), ids, self.padding + self.offset)
        return (ids - self.offset).astype(dtype)


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few values that the graph distinguishes; each feed uses the next one."""

    values: tuple[int | float | bool, ...]

    def draw(self, shape: tuple[int, ...], dtype: Dtype, variant: FeedVariant) -> Array:
        first = 0 if variant.calm else variant.variation
        count = int(np.prod(shape))
        picked = [self.values[(first + i) % len(self.values)] for i in range(count)]
        return np.array(picked, dtype=dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class Mask:
    """A padding mask along the last axis, with at least one 1 in each row."""

    def draw(self, shape: tuple[int, ...], dtype: Dtype, variant: FeedVariant) -> Array:
        if variant.calm or not shape:
            return np.ones(shape, dtype=dtype)
        return _mask(shape, variant).astype(dtype)


@dataclass(frozen=True, slots=True)
class Length:
    """Lengths from 1 to the size of another tensor; the first row has the full length."""

    bound: Dim | None

    def draw(self, shape: tuple[int, ...], dtype: Dtype, variant: FeedVariant) -> Array:
        shortest = min((s for s in variant.sizes.values() if s > 3), default=4)
        bound = max(1, variant.size(self.bound, shortest))
        lengths = np.full(int(np.prod(shape)), bound)
        if not variant.calm:
            lengths[1:] = variant.random.integers(1, bound, lengths[1:].shape, endpoint=True)
        return lengths.reshape(shape).astype(dtype)


Pattern = Literal["zeros", "ones", "twos", "small", "axes", "reshape", "size"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an operator: axes, a shape, a count."""

    pattern: Pattern

    def draw(self, shape: tuple[int, ...], dtype: Dtype, variant: FeedVariant) -> Array:
        ones = np.ones(shape)
        constants = {"zeros": 0, "ones": 1, "twos": 1 if variant.calm else 2, "size": 8}
        if self.pattern == "axes":
            drawn = np.arange(ones.size).reshape(shape)
        elif self.pattern == "reshape":  # one column: fits any number of elements
            drawn = ones
            drawn[..., :1] = -1
        elif self.pattern == "small" and not variant.calm:
            drawn = np.asarray(variant.random.integers(1, 3, shape, endpoint=True))
        else:
            drawn = constants.get(self.pattern, 1) * ones
        return drawn.astype(dtype)


def _mask(shape: tuple[int, ...], variant: FeedVariant) -> Array:
    """Return a mask of rows of different lengths, the first of several rows without padding.

    Feeds pad on the right and on the left in turn.
    """
    width = shape[-1]
    rows = int(np.prod(shape[:-1]))
    valid = variant.random.integers(1, max(width, 2), rows)
    if rows > 1:
        valid[0] = width
    mask = np.arange(width) < valid[:, None]
    if variant.variation % 2:
        mask = mask[:, ::-1]
    return mask.reshape(shape)
