"""GPTQ: against its own definition, and against rounding, by the error of the outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from passes.quantize.schemes.weight_only.blocks import Grid, fit_nearest
from passes.quantize.schemes.weight_only.gptq import Gram, Solver
from toolkit.calibrate.statistics import Mismatch, NotFinite
from toolkit.quantization.number_format import UINT4, UINT8


def correlated(rows: int, inputs: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    mixed = np.random.default_rng(7).standard_normal((inputs, inputs)) / np.sqrt(inputs)
    sizes = np.geomspace(1, 0.02, inputs)
    return (rng.standard_normal((rows, inputs)) * sizes @ mixed).astype(np.float32)


def dequantized(codes: Any, fit: Any, block: int) -> Any:
    place = np.arange(codes.shape[1]) // block
    return (codes - fit.zero[:, place]) * fit.scale[:, place]


def rounded(weights: Any, grid: Grid, block: int) -> Any:
    rows = weights.reshape(-1, block)
    fit = fit_nearest(rows, grid)
    return fit.values(fit.codes(rows, grid)).reshape(weights.shape)


@pytest.mark.parametrize("by_importance", [False, True])
@pytest.mark.parametrize("block", [16, 64, 256])
@pytest.mark.parametrize("symmetric", [False, True])
def test_outputs_are_closer_than_by_rounding(
    by_importance: bool, block: int, symmetric: bool
) -> None:
    weights = np.random.default_rng(1).standard_normal((40, 256)).astype(np.float32)
    seen, new = correlated(2000, 256), correlated(500, 256, seed=3)
    grid = Grid(UINT4, symmetric)
    codes, fit = Solver.of(seen.T @ seen, by_importance).quantize(weights, grid, block)
    assert codes.max() <= grid.format.high
    found = dequantized(codes, fit, block)

    def error(other: Any) -> float:
        return float((((other - weights) @ new.T) ** 2).sum())

    assert error(found) < 0.6 * error(rounded(weights, grid, block))


def test_inputs_that_know_nothing_of_each_other_are_rounded() -> None:
    weights = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    grid = Grid(UINT4, False)
    for by_importance in (False, True):
        solver = Solver.of(np.eye(64, dtype=np.float32), by_importance)
        codes, fit = solver.quantize(weights, grid, 32)
        np.testing.assert_allclose(
            dequantized(codes, fit, 32), rounded(weights, grid, 32), atol=1e-6
        )


def test_one_step_by_hand() -> None:
    """Two inputs: the second takes on the error of the first."""
    gram = np.array([[2.0, 1.0], [1.0, 2.0]], np.float32)
    solver = Solver.of(gram, False, damping=0.0)
    grid = Grid(UINT8, True)
    weights = np.array([[1.0, 0.3]], np.float32)
    codes, fit = solver.quantize(weights, grid, 16)
    scale = float(fit.scale[0, 0])
    first = (float(codes[0, 0]) - 128) * scale
    moved = 0.3 + (1.0 - first) * 0.5  # the best w_1 given w_0, as H_01 / H_11 = 1/2
    assert float(codes[0, 1]) == np.rint(moved / scale + 128)


@pytest.mark.parametrize("by_importance", [False, True])
def test_grams_without_an_inverse(by_importance: bool) -> None:
    weights = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    few = correlated(2, 40)
    for gram in (np.zeros((40, 40), np.float32), few.T @ few):
        codes, fit = Solver.of(gram, by_importance).quantize(weights, Grid(UINT4, False), 16)
        error = np.abs(dequantized(codes, fit, 16) - weights)
        assert np.all(np.isfinite(error))
        assert codes.shape == (3, 40)
        assert fit.scale.shape == (3, 3)


def test_a_gram_in_batches() -> None:
    x = correlated(30, 8)
    whole, one, other = (Gram("x") for _ in range(3))
    whole.update(x)
    one.update(x[:20].reshape(4, 5, 8))
    other.update(x[20:])
    one.merge(other)
    assert isinstance(whole, Gram)
    assert isinstance(one, Gram)
    assert one.rows == whole.rows == 30
    np.testing.assert_allclose(one.total, whole.total, rtol=1e-4, atol=1e-5)
    restored = Gram("x")
    restored.restore(one.state())
    np.testing.assert_array_equal(restored.total, one.total)


def test_invalid_gram_inputs() -> None:
    gram = Gram("x")
    gram.update(np.empty((0, 4), np.float32))
    gram.update(np.ones((2, 4), np.int64))
    assert not gram.rows
    with pytest.raises(NotFinite, match="'x' holds NaN"):
        gram.update(np.full((2, 4), np.nan, np.float32))
    gram.update(np.ones((2, 4), np.float32))
    with pytest.raises(Mismatch, match="5 channels"):
        gram.update(np.ones((2, 5), np.float32))
