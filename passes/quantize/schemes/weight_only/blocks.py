"""Quantize blocks of weights: w ~ s (q - z), with a scale s and a zero point z per block.

Codes q and zero points z are integers in 0..2^bits - 1, so zero is exact. Symmetric blocks have z
in the middle; the sign of their scale gives the largest weight the code with the longer side,
-2^(bits - 1), unless scales must be positive.

Round to nearest uses the part of [min w, max w] with the least squared error among a few, block by
block; then s is the least-squares fit to the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from toolkit.ir.graph import Array

Bits: TypeAlias = Literal[4, 8]

_SMALLEST = float(np.finfo(np.float32).tiny)
_PARTS: dict[int, tuple[float, ...]] = {
    4: (1.0, 1.08, 0.94, 0.88, 0.82, 0.76, 0.7, 0.64),
    8: (1.0, 0.97),
}
"""Fractions of the range to try, the whole range first; 8 bits need fewer."""
_POSITIVE_FACTOR = {4: 8 / 7, 8: 128 / 127}
"""The ratio of a positive scale to a signed one, when the largest weight has the shorter side."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The codes of a block: bits and symmetry."""

    bits: Bits
    symmetric: bool
    positive: bool = False
    """Whether scales are positive, which standard operators expect."""

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        return 1 << (self.bits - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Scale and zero point of blocks, as float32 columns [blocks, 1]."""

    scale: Array
    zero: Array

    def codes(self, weights: Array, grid: Grid) -> Array:
        """Return the nearest codes of weights [blocks, size], as float32."""
        found = weights / self.scale
        found += self.zero
        np.rint(found, out=found)
        return np.clip(found, 0, grid.top, out=found)

    def values(self, codes: Array) -> Array:
        return (codes - self.zero) * self.scale

    def chosen(self, better: Array, other: Fit) -> Fit:
        """Return `other` for the blocks where it is better."""
        pick = better[:, None]
        scale, zero = np.where(pick, other.scale, self.scale), np.where(pick, other.zero, self.zero)
        return Fit(scale, zero)


def fit_range(weights: Array, grid: Grid, part: float = 1.0) -> Fit:
    """Return the fit that covers this fraction of the range of each block [blocks, size]."""
    low = np.minimum(weights.min(axis=1, keepdims=True), 0) * np.float32(part)
    high = np.maximum(weights.max(axis=1, keepdims=True), 0) * np.float32(part)
    if not grid.symmetric:
        scale = _usable((high - low) / np.float32(grid.top))
        return Fit(scale, np.clip(np.rint(-low / scale), 0, grid.top))
    scale: Array = np.maximum(high, -low) / np.float32(grid.middle)
    scale = np.where(high > -low, -scale, scale)
    if grid.positive:
        scale = np.abs(scale) * np.float32(_POSITIVE_FACTOR[grid.bits])
    return Fit(_usable(scale), np.full_like(scale, grid.middle))


def fit_nearest(weights: Array, grid: Grid, importance: Array | None = None) -> Fit:
    """Return the fit with the least squared rounding error, weighted by `importance`.

    `weights` are float32 blocks [blocks, size].
    """
    best: Fit | None = None
    least: Array = np.empty(0)
    for part in _PARTS[grid.bits]:
        found = fit_range(weights, grid, part)
        error = _error(weights, found, grid, importance)
        if best is None:
            best, least = found, error
        else:
            better = error < least
            best, least = best.chosen(better, found), np.where(better, error, least)
    assert best is not None
    refined = refit(weights, best.codes(weights, grid), best, grid, importance)
    return best.chosen(_error(weights, refined, grid, importance) < least, refined)


def refit(
    target: Array, codes: Array, fit: Fit, grid: Grid, importance: Array | None = None
) -> Fit:
    """Return the least-squares scales for these codes: s = <q - z, target> / <q - z, q - z>."""
    steps = codes - fit.zero
    weighted = steps if importance is None else steps * importance
    over = np.einsum("ij,ij->i", weighted, target)[:, None]
    under = np.einsum("ij,ij->i", weighted, steps)[:, None]
    scale = np.divide(over, under, out=np.array(fit.scale), where=under > 0)
    kept = np.abs(scale) >= _SMALLEST
    if grid.positive or not grid.symmetric:
        kept &= scale > 0
    return Fit(np.where(kept, scale, fit.scale).astype(np.float32), fit.zero)


def _error(weights: Array, fit: Fit, grid: Grid, importance: Array | None) -> Array:
    """Return the squared error of each block."""
    left = fit.codes(weights, grid)
    left -= fit.zero
    left *= fit.scale
    left -= weights
    if importance is None:
        return np.einsum("ij,ij->i", left, left)
    return np.einsum("ij,ij,ij->i", left, left, np.broadcast_to(importance, left.shape))


def _usable(scale: Array) -> Array:
    """Replace scales near zero by the least normal float32, so that such blocks become zero.

    Kernels subtract the zero point from a sum of products; the rounding error has the scale's size.
    """
    return np.where(np.abs(scale) < _SMALLEST, np.float32(_SMALLEST), scale).astype(np.float32)
