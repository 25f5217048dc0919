"""Measures of two outputs, gathered sample by sample: reference and actual as rows of channels.

    top1       1 - the share of rows whose greatest channel is the same
    decisions  1 - the share of elements on the same side of one half
    cosine     1 - the mean cosine of the rows
    sqnr       noise power / signal power
    variance   noise power / power of the signal around each channel's mean: constants are no signal
    agreement  1 - the share of equal elements
    error      max |a - b| / max |a|

Each is a loss: 0 when nothing changed.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from toolkit.accuracy.budgets import DECIDED, LEAST_VARYING

Array: TypeAlias = NDArray[Any]
Doubles: TypeAlias = NDArray[np.float64]

_TINY = 1e-30
_LEAST_PROBABILITY = 1e-9
_SPREAD_ROWS = 1024
"""Rows of a sample that tell how far channels spread."""


class Tally(Protocol):
    """What was measured so far."""

    @property
    def count(self) -> int:
        """Rows, or elements, that were compared."""
        ...

    def add(self, reference: Array, actual: Array) -> None:
        """Two matrices of the same shape, rows of channels."""
        ...

    def miss(self) -> None:
        """A sample of which nothing can be compared: all of it is lost."""
        ...

    def loss(self) -> float: ...


class Flips:
    """Changed answers; `weighed` counts those less that were a close call in the reference.

    A margin is measured by how far the channels of a row spread, on the mean of all rows.
    """

    def __init__(self, weighed: bool) -> None:
        self.count = 0
        self.weighed = weighed
        self._flips = 0
        self._spread = 0.0
        self._margins: list[Doubles] = []

    def add(self, reference: Array, actual: Array) -> None:
        flipped = _answers(reference) != _answers(actual)
        self.count += flipped.size
        self._flips += int(np.count_nonzero(flipped))
        if not self.weighed or not flipped.size:
            return
        shares = bool(reference.min() >= 0 and reference.max() <= 1)
        some = _margins_in(reference[:: math.ceil(flipped.size / _SPREAD_ROWS)], shares)
        self._spread += float(_spreads(some).mean()) * flipped.size
        two = np.partition(_margins_in(reference[flipped], shares), -2, axis=1)[:, -2:]
        differ = two[:, 1] != two[:, 0]  # two infinities are no margin
        self._margins.append(np.subtract(two[:, 1], two[:, 0], np.zeros(len(two)), where=differ))

    def miss(self) -> None:
        self.count += 1
        self._flips += 1
        self._margins.append(np.full(1, np.inf))

    def plain(self) -> float:
        """The share of changed answers, whatever the margin was."""
        return self._flips / self.count if self.count else 0.0

    def loss(self) -> float:
        if not self._flips or not self.weighed:
            return self.plain()
        sure = max(DECIDED * self._spread / self.count, _TINY)
        margins = np.concatenate(self._margins)
        return float(np.minimum(margins / sure, 1).sum()) / self.count


def _answers(rows: Array) -> Array:
    """The greatest channel of each row; a single one is a decision at one half."""
    return rows[:, 0] >= 0.5 if rows.shape[1] == 1 else rows.argmax(axis=1)


def _margins_in(rows: Array, shares: bool) -> Doubles:
    """Numbers whose differences are margins: a single channel beside all else, shares as logits."""
    doubles = np.asarray(rows, np.float64)
    if doubles.shape[1] == 1:
        doubles = np.hstack([doubles, 1 - doubles])
    return np.log(np.maximum(doubles, _LEAST_PROBABILITY)) if shares else doubles


def _spreads(rows: Doubles) -> Doubles:
    """How far the channels of each row spread, but for infinite ones, as of masked answers."""
    known = np.isfinite(rows)
    if known.all():
        return rows.std(axis=1)
    return np.ma.masked_array(rows, ~known).std(axis=1).filled(0.0)


def are_shares(rows: Array) -> bool:
    """Whether each row is of shares of one whole."""
    sums = rows.sum(axis=1, dtype=np.float64)
    return bool(rows.min(initial=0) >= 0 and np.allclose(sums, 1, atol=1e-3))


def as_shares(logits: Array) -> Doubles:
    """What logits, or logarithms of shares, stand for."""
    doubles = np.asarray(logits, np.float64)
    powers = np.exp(doubles - doubles.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _power(rows: Doubles) -> float:
    """The sum of squares; not by BLAS, whose threads wait for each other many times as long as the
    sum takes where other programs have the processors."""
    return float(np.einsum("ij,ij->", rows, rows))


def _known(a: Doubles, b: Doubles) -> tuple[Doubles, Doubles]:
    """Both without infinities of the first, as of masked scores: they are no signal."""
    known = np.isfinite(a)
    return (a, b) if known.all() else (np.where(known, a, 0), np.where(known, b, 0))


class Angles:
    """1 - cosine of rows."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0

    def add(self, reference: Array, actual: Array) -> None:
        a, b = _known(np.asarray(reference, np.float64), np.asarray(actual, np.float64))
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        products = np.einsum("ij,ij->i", a, b)
        # Two zero vectors are the same; one of them is not.
        same = np.all(a == b, axis=1)
        cosines = np.where(same, 1.0, products / np.maximum(lengths, _TINY))
        self._sum += float((1 - cosines).sum())
        self.count += cosines.size

    def miss(self) -> None:
        self.count += 1
        self._sum += 1

    def loss(self) -> float:
        return max(self._sum / self.count, 0.0) if self.count else 0.0


class Noise:
    """Noise power in signal power."""

    def __init__(self) -> None:
        self.count = 0
        self._noise = self._power = 0.0
        self._channels: dict[int, tuple[float, Doubles]] = {}
        self._missed = 0

    def add(self, reference: Array, actual: Array, weights: Array | None = None) -> None:
        """Rows, and how much each of them counts."""
        a, b = _known(np.asarray(reference, np.float64), np.asarray(actual, np.float64))
        off = a - b
        total = float(a.shape[0] if weights is None else weights.sum())
        sums = a.sum(axis=0) if weights is None else np.einsum("i,ij->j", weights, a)
        if weights is not None:
            roots = np.sqrt(np.asarray(weights, np.float64)).reshape(-1, 1)
            a, off = roots * a, roots * off
        self._noise += _power(off)
        self._power += _power(a)
        # rows of another length have other channels, as answers that are positions in a text
        before = self._channels.get(a.shape[1])
        so_far = (total, sums) if before is None else (before[0] + total, before[1] + sums)
        self._channels[a.shape[1]] = so_far
        self.count += a.shape[0]

    def miss(self) -> None:
        self._missed += 1

    def loss(self) -> float:
        return self._in(self._power)

    def around_mean(self) -> float:
        """In the signal's power around each channel's mean: a constant is no signal."""
        varying = self._power
        for total, sums in self._channels.values():
            varying -= float(np.square(sums).sum()) / max(total, _TINY)
        if varying < LEAST_VARYING * self._power and not self._missed:
            return 0.0
        return self._in(varying)

    def _in(self, power: float) -> float:
        if self._missed:
            return 1.0
        if not self._noise:
            return 0.0
        loss = self._noise / power if power > 0 else math.inf
        return loss if math.isfinite(loss) else math.inf


class Variance:
    """Noise around the mean, by what a Noise gathers of the same rows."""

    def __init__(self, noise: Noise) -> None:
        self.noise = noise

    @property
    def count(self) -> int:
        return self.noise.count

    def add(self, reference: Array, actual: Array) -> None:
        """The noise does."""

    def miss(self) -> None:
        """The noise does."""

    def loss(self) -> float:
        return self.noise.around_mean()


class Inequality:
    """Elements that differ."""

    def __init__(self) -> None:
        self.count = 0
        self._different = 0

    def add(self, reference: Array, actual: Array) -> None:
        self._different += int(np.count_nonzero(np.asarray(reference != actual)))
        self.count += reference.size

    def miss(self) -> None:
        self.count += 1
        self._different += 1

    def loss(self) -> float:
        return self._different / self.count if self.count else 0.0


class Gap:
    """The largest difference in the largest magnitude of the reference."""

    def __init__(self) -> None:
        self.count = 0
        self._gap = self._scale = 0.0

    def add(self, reference: Array, actual: Array) -> None:
        a, b = np.asarray(reference, np.float64), np.asarray(actual, np.float64)
        known = np.isfinite(a)
        self._gap = max(self._gap, float(np.abs(a - b)[known].max(initial=0)))
        self._scale = max(self._scale, float(np.abs(a)[known].max(initial=0)))
        self.count += a.shape[0]

    def miss(self) -> None:
        self._gap = math.inf

    def loss(self) -> float:
        return self._gap / max(self._scale, _TINY) if self._gap else 0.0
