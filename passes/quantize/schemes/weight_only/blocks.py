"""Quantize blocks of weights: w ~ s (q - z), with a scale s and a zero point z per block.

Codes q and zero points z are unsigned integers of 4 or 8 bits, so zero is exact. A symmetric block
has z in the middle of the format. Its scale may be negative: then the largest weight gets code 0,
one step farther from z than the highest code.

Rounding to nearest tries a few fractions of the range [min w, max w] for each block, takes the one
with the least squared error, and fits s to the resulting codes by least squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toolkit.ir.graph import Array
from toolkit.quantization.number_format import NumberFormat

_SMALLEST = float(np.finfo(np.float32).tiny)
"""The least normal float32."""
_FRACTIONS: dict[int, tuple[float, ...]] = {
    4: (1.0, 1.08, 0.94, 0.88, 0.82, 0.76, 0.7, 0.64),
    8: (1.0, 0.97),
}
"""Fractions of the range to try by bits, the whole range first."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The unsigned format of a block's codes, and the constraints on its scale and zero point."""

    format: NumberFormat
    symmetric: bool
    """Whether the zero point is the middle of the format."""
    positive: bool = False
    """Whether scales are positive, which DequantizeLinear requires."""


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Scales and zero points of blocks: float32 columns [blocks, 1], or [outputs, blocks]."""

    scale: Array
    zero: Array

    def codes(self, weights: Array, grid: Grid) -> Array:
        """Return the nearest codes of weights [blocks, size], as float32."""
        found = weights / self.scale
        found += self.zero
        np.rint(found, out=found)
        return np.clip(found, 0, grid.format.high, out=found)

    def values(self, codes: Array) -> Array:
        return (codes - self.zero) * self.scale

    def chosen(self, better: Array, other: Fit) -> Fit:
        """Return `other` for the blocks where it is better."""
        pick = better[:, None]
        scale, zero = np.where(pick, other.scale, self.scale), np.where(pick, other.zero, self.zero)
        return Fit(scale, zero)


def fit_range(weights: Array, grid: Grid, fraction: float = 1.0) -> Fit:
    """Return the fit that covers this fraction of the range of each block [blocks, size]."""
    low = np.minimum(weights.min(axis=1, keepdims=True), 0) * np.float32(fraction)
    high = np.maximum(weights.max(axis=1, keepdims=True), 0) * np.float32(fraction)
    if not grid.symmetric:
        scale = _usable((high - low) / np.float32(grid.format.high))
        return Fit(scale, np.clip(np.rint(-low / scale), 0, grid.format.high))
    scale: Array = np.maximum(high, -low) / np.float32(grid.format.middle)
    scale = np.where(high > -low, -scale, scale)
    if grid.positive:
        scale = np.abs(scale) * np.float32(grid.format.middle / grid.format.limit)
    return Fit(_usable(scale), np.full_like(scale, grid.format.middle))


def fit_nearest(weights: Array, grid: Grid, importance: Array | None = None) -> Fit:
    """Return the fit with the least squared rounding error, weighted by `importance`.

    `weights` are float32 blocks [blocks, size].
    """
    whole, *others = _FRACTIONS[grid.format.bits]
    best = fit_range(weights, grid, whole)
    least = _error(weights, best, grid, importance)
    for fraction in others:
        found = fit_range(weights, grid, fraction)
        error = _error(weights, found, grid, importance)
        better = error < least
        best, least = best.chosen(better, found), np.where(better, error, least)
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
    """Replace denormal scales by the least normal float32; the codes of such blocks are zero.

    Kernels subtract the zero point from a sum of products, with an error of the size of the scale.
    """
    return np.where(np.abs(scale) < _SMALLEST, np.float32(_SMALLEST), scale).astype(np.float32)
