"""Measures of the loss between two outputs, accumulated sample by sample.

An output is a matrix with a row per position and a column per channel.

    top1       1 - the fraction of rows with the same largest channel; `answers` is the same without
               weights
    decisions  1 - the fraction of elements on the same side of 0.5
    cosine     1 - the mean cosine of the rows
    sqnr       noise power / signal power
    variance   noise power / power of the signal around each channel's mean
    agreement  1 - the fraction of equal elements
    error      max |a - b| / max |a|

Each is a loss: 0 if nothing changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from toolkit.accuracy.budgets import DECIDED, MIN_VARYING

Array: TypeAlias = NDArray[Any]
Doubles: TypeAlias = NDArray[np.float64]

_TINY = 1e-30
_MIN_PROBABILITY = 1e-9
_SPREAD_ROWS = 1024
"""The spread of channels is estimated from this many rows per sample."""


class MeanLoss:
    """The mean of a loss over all rows or elements."""

    def __init__(self, losses: Callable[[Array, Array], Array]) -> None:
        self.count = 0
        self._losses = losses
        self._sum = 0.0

    def add(self, reference: Array, actual: Array) -> None:
        """Add two matrices of the same shape, of rows of channels."""
        losses = self._losses(reference, actual)
        self._sum += float(losses.sum())
        self.count += losses.size

    def add_incomparable(self) -> None:
        """Add a sample whose outputs cannot be compared, as a total loss."""
        self.count += 1
        self._sum += 1

    def loss(self) -> float:
        return max(self._sum / self.count, 0.0) if self.count else 0.0


def flips(reference: Array, actual: Array) -> Array:
    """Return for each row whether its prediction changed."""
    return _predictions(reference) != _predictions(actual)


def inequality(reference: Array, actual: Array) -> Array:
    """Return for each element whether it differs."""
    return np.asarray(reference != actual)


def cosine_losses(reference: Array, actual: Array) -> Array:
    """Return 1 - cosine of each row; two zero vectors are equal."""
    a, b = _without_infinities(reference, actual)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    products = np.einsum("ij,ij->i", a, b)
    equal = np.all(a == b, axis=1)
    return 1 - np.where(equal, 1.0, products / np.maximum(lengths, _TINY))


class WeightedFlips:
    """Changed predictions, weighted by their margins in the reference.

    Margins are relative to the spread of a row's channels, averaged over all rows.
    """

    def __init__(self) -> None:
        self.count = 0
        self._flips = 0
        self._spread = 0.0
        self._margins: list[Doubles] = []

    def add(self, reference: Array, actual: Array) -> None:
        flipped = flips(reference, actual)
        self.count += flipped.size
        self._flips += int(np.count_nonzero(flipped))
        if not flipped.size:
            return
        probabilities = bool(reference.min() >= 0 and reference.max() <= 1)
        some = _logits(reference[:: math.ceil(flipped.size / _SPREAD_ROWS)], probabilities)
        self._spread += float(_spreads(some).mean()) * flipped.size
        two = np.partition(_logits(reference[flipped], probabilities), -2, axis=1)[:, -2:]
        differ = two[:, 1] != two[:, 0]  # the margin of two infinities is NaN
        self._margins.append(np.subtract(two[:, 1], two[:, 0], np.zeros(len(two)), where=differ))

    def add_incomparable(self) -> None:
        self.count += 1
        self._flips += 1
        self._margins.append(np.full(1, np.inf))

    def unweighted(self) -> float:
        """Return the fraction of changed predictions, whatever their margins."""
        return self._flips / self.count if self.count else 0.0

    def loss(self) -> float:
        if not self._flips:
            return 0.0
        decided = max(DECIDED * self._spread / self.count, _TINY)
        margins = np.concatenate(self._margins)
        return float(np.minimum(margins / decided, 1).sum()) / self.count


def _predictions(rows: Array) -> Array:
    """Return the largest channel of each row; a single channel is a decision at 0.5."""
    return rows[:, 0] >= 0.5 if rows.shape[1] == 1 else rows.argmax(axis=1)


def _logits(rows: Array, probabilities: bool) -> Doubles:
    """Return logits, whose differences are margins; a single channel gets its complement."""
    doubles = np.asarray(rows, np.float64)
    if doubles.shape[1] == 1:
        doubles = np.hstack([doubles, 1 - doubles])
    return np.log(np.maximum(doubles, _MIN_PROBABILITY)) if probabilities else doubles


def _spreads(rows: Doubles) -> Doubles:
    """Return the standard deviation of each row, without infinite channels (masked logits)."""
    known = np.isfinite(rows)
    if known.all():
        return rows.std(axis=1)
    return np.ma.masked_array(rows, ~known).std(axis=1).filled(0.0)


def are_probabilities(rows: Array) -> bool:
    """Return whether each row is a probability distribution."""
    sums = rows.sum(axis=1, dtype=np.float64)
    return bool(rows.min(initial=0) >= 0 and np.allclose(sums, 1, atol=1e-3))


def softmax(logits: Array) -> Doubles:
    """Return the probabilities of logits, or of log-probabilities."""
    doubles = np.asarray(logits, np.float64)
    powers = np.exp(doubles - doubles.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _power(rows: Doubles) -> float:
    """Return the sum of squares, without BLAS threads, which are slow on a busy machine."""
    return float(np.einsum("ij,ij->", rows, rows))


def _without_infinities(reference: Array, actual: Array) -> tuple[Doubles, Doubles]:
    """Return both as doubles, zeroed where the reference is infinite (masked scores)."""
    a, b = np.asarray(reference, np.float64), np.asarray(actual, np.float64)
    known = np.isfinite(a)
    return (a, b) if known.all() else (np.where(known, a, 0), np.where(known, b, 0))


class Noise:
    """Noise power relative to signal power."""

    def __init__(self) -> None:
        self.count = 0
        self._noise = self._power = 0.0
        self._channels: dict[int, tuple[float, Doubles]] = {}
        self._incomparable = 0

    def add(self, reference: Array, actual: Array, weights: Array | None = None) -> None:
        """Add rows, weighted if `weights` are given."""
        a, b = _without_infinities(reference, actual)
        off = a - b
        total = float(a.shape[0] if weights is None else weights.sum())
        sums = a.sum(axis=0) if weights is None else np.einsum("i,ij->j", weights, a)
        if weights is not None:
            roots = np.sqrt(np.asarray(weights, np.float64)).reshape(-1, 1)
            a, off = roots * a, roots * off
        self._noise += _power(off)
        self._power += _power(a)
        # the number of channels may vary, as with positions in a text
        before = self._channels.get(a.shape[1])
        so_far = (total, sums) if before is None else (before[0] + total, before[1] + sums)
        self._channels[a.shape[1]] = so_far
        self.count += a.shape[0]

    def add_incomparable(self) -> None:
        self._incomparable += 1

    def loss(self) -> float:
        return self._relative_to(self._power)

    def around_mean(self) -> float:
        """Return the noise relative to the signal's power around each channel's mean."""
        varying = self._power
        for total, sums in self._channels.values():
            varying -= float(np.square(sums).sum()) / max(total, _TINY)
        if varying < MIN_VARYING * self._power and not self._incomparable:
            return 0.0
        return self._relative_to(varying)

    def _relative_to(self, power: float) -> float:
        if self._incomparable:
            return 1.0
        if not self._noise:
            return 0.0
        loss = self._noise / power if power > 0 else math.inf
        return loss if math.isfinite(loss) else math.inf


class LargestError:
    """The largest difference relative to the largest magnitude of the reference."""

    def __init__(self) -> None:
        self.count = 0
        self._difference = self._scale = 0.0

    def add(self, reference: Array, actual: Array) -> None:
        a, b = np.asarray(reference, np.float64), np.asarray(actual, np.float64)
        known = np.isfinite(a)
        self._difference = max(self._difference, float(np.abs(a - b)[known].max(initial=0)))
        self._scale = max(self._scale, float(np.abs(a)[known].max(initial=0)))
        self.count += a.shape[0]

    def add_incomparable(self) -> None:
        self._difference = math.inf

    def loss(self) -> float:
        return self._difference / max(self._scale, _TINY) if self._difference else 0.0


Accumulator: TypeAlias = MeanLoss | WeightedFlips | LargestError
"""A loss accumulated over samples; `count` is the number of rows or elements compared."""
