"""Half-quadratic quantization: fit the scale and zero point of a block without calibration data.

The squared error overweights the rare large errors e = w - s (q - z). A norm below 1 does not:

    minimize  sum |e|^p,  p < 1     over s, z and q

Half-quadratic splitting alternates two steps. e shrinks towards its sparse part,

    e <- sign(r) max(0, |r| - (p / beta) |r|^(p - 1)),     r = w - s (q - z)

and s, z become the least-squares fit of w - e to the codes q, with z rounded. Each block keeps its
best state. After Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning
Models" (2023), which has fractional zero points and fixed scales.
"""

from __future__ import annotations

import numpy as np

from passes.quantize.schemes.weight_only.blocks import Fit, Grid, fit_nearest, refit
from toolkit.ir.graph import Array

_POWER = 0.7
"""The exponent p."""
_ROUNDS = 10
_BETA, _BETA_GROWTH = 10.0, 1.01
"""The initial weight of the coupling between e and the residual, and its growth per round."""


def fit_half_quadratic(weights: Array, grid: Grid) -> Fit:
    """Return the scales and zero points of float32 blocks [blocks, size]."""
    start = fit_nearest(weights, grid)
    # In units of the initial scale one `beta` suits all blocks.
    unit = weights / start.scale
    best = fit = Fit(np.ones_like(start.scale), start.zero)
    codes = fit.codes(unit, grid)
    residual = unit - fit.values(codes)
    least = _cost(residual)
    beta = _BETA
    for _ in range(_ROUNDS):
        fit = _fitted(unit - _sparse_part(residual, beta), codes, fit, grid)
        codes = fit.codes(unit, grid)
        residual = unit - fit.values(codes)
        cost = _cost(residual)
        better = cost < least
        best, least = best.chosen(better, fit), np.where(better, cost, least)
        beta *= _BETA_GROWTH
    return Fit((best.scale * start.scale).astype(np.float32), best.zero)


def _sparse_part(residual: Array, beta: float) -> Array:
    size = np.abs(residual)
    floor = np.maximum(size, np.float32(1e-3))
    pull: Array = np.power(floor, np.float32(_POWER - 1)) * np.float32(_POWER / beta)
    kept = np.subtract(size, pull)
    return np.sign(residual) * np.maximum(kept, 0)


def _cost(residual: Array) -> Array:
    return (np.abs(residual) ** np.float32(_POWER)).sum(axis=1)


def _fitted(target: Array, codes: Array, fit: Fit, grid: Grid) -> Fit:
    if grid.symmetric:
        return refit(target, codes, fit, grid)
    # target ~ s q + c, then z = -c / s
    count = np.float32(codes.shape[1])
    mean_q, mean_t = (a.mean(axis=1, keepdims=True) for a in (codes, target))
    spread = np.einsum("ij,ij->i", codes, codes)[:, None] - count * mean_q**2
    both = np.einsum("ij,ij->i", codes, target)[:, None] - count * mean_q * mean_t
    slope = np.divide(both, spread, out=np.array(fit.scale), where=spread > 0)
    usable = slope > 0
    scale = np.where(usable, slope, fit.scale)
    zero = np.clip(np.rint(mean_q - mean_t / scale), 0, grid.format.high)
    moved = Fit(scale, np.where(usable, zero, fit.zero).astype(np.float32))
    return refit(target, codes, moved, grid)
