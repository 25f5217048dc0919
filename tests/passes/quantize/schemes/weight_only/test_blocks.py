"""Blocks: codes and scales against the formula, packing against what the runtime reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from passes.quantize.layers.int8_weights import Unfit
from passes.quantize.schemes.weight_only import streaming
from passes.quantize.schemes.weight_only.blocks import Grid, fit_nearest, fit_range
from passes.quantize.schemes.weight_only.hqq import fit_half_quadratic
from passes.quantize.schemes.weight_only.packing import NBitsCodes, SignedCodes, pack
from passes.quantize.schemes.weight_only.streaming import (
    Rounding,
    quantize_blocks,
)
from toolkit.quantization.number_format import UINT4, UINT8, NumberFormat

GRIDS = [
    Grid(fmt, symmetric, positive)
    for fmt in (UINT4, UINT8)
    for symmetric, positive in ((True, False), (True, True), (False, False))
]


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def squared_error(weights: Any, fit: Any, grid: Grid) -> Any:
    return ((fit.values(fit.codes(weights, grid)) - weights) ** 2).sum(axis=1)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_whole_range_is_off_by_half_a_step_at_most(grid: Grid) -> None:
    weights = normal(50, 32)
    fit = fit_range(weights, grid)
    codes = fit.codes(weights, grid)
    assert codes.min() >= 0
    assert codes.max() <= grid.format.high
    step = np.abs(fit.scale)
    # A range of odd zero may cut half a step off; a signed scale, one step on the shorter side.
    most = 1.01 if grid.symmetric and not grid.positive else 0.51 if grid.symmetric else 1.01
    assert np.all(np.abs(fit.values(codes) - weights) <= most * step)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_search_is_never_worse_than_the_whole_range(grid: Grid) -> None:
    weights = normal(200, 32, seed=1) ** 3
    whole, best = fit_range(weights, grid), fit_nearest(weights, grid)
    before, after = (squared_error(weights, fit, grid) for fit in (whole, best))
    assert np.all(after <= before)
    if grid.format == UINT4:
        assert after.sum() < 0.95 * before.sum()


@pytest.mark.parametrize("fit", [fit_nearest, fit_half_quadratic])
@pytest.mark.parametrize("grid", GRIDS)
def test_blocks_of_zeros_and_of_one_number(grid: Grid, fit: Any) -> None:
    weights = np.zeros((4, 16), np.float32)
    weights[1], weights[2], weights[3] = 3.5, -0.25, 1e-42
    found = fit(weights, grid)
    values = found.values(found.codes(weights, grid))
    assert np.all(np.isfinite(found.scale))
    assert np.all(found.scale != 0)
    assert not values[0].any()
    assert not values[3].any()
    np.testing.assert_allclose(values[1:3], weights[1:3], rtol=1e-6)


def test_positive_scales_are_positive() -> None:
    weights = normal(100, 16)
    assert fit_nearest(weights, Grid(UINT4, True, positive=True)).scale.min() > 0
    assert fit_nearest(weights, Grid(UINT4, False)).scale.min() > 0
    assert fit_nearest(weights, Grid(UINT4, True)).scale.min() < 0


def test_half_quadratic_lowers_its_cost() -> None:
    weights = np.random.default_rng(0).standard_t(3, (300, 64)).astype(np.float32)
    for grid in GRIDS[:3]:
        costs = [
            (np.abs(fit.values(fit.codes(weights, grid)) - weights) / np.abs(near.scale)) ** 0.7
            for near in [fit_nearest(weights, grid)]
            for fit in (near, fit_half_quadratic(weights, grid))
        ]
        before, after = (cost.sum(axis=1) for cost in costs)
        assert np.all(after <= before * 1.0001)
        assert after.sum() < before.sum()


def test_importance_shifts_the_error_to_unimportant_weights() -> None:
    weights = normal(100, 32)
    importance = np.where(np.arange(32) < 8, 100.0, 1.0).astype(np.float32)
    grid = Grid(UINT4, False)

    def weighted(fit: Any) -> float:
        left = fit.values(fit.codes(weights, grid)) - weights
        return float((left**2 * importance).sum())

    assert weighted(fit_nearest(weights, grid, importance)) < weighted(fit_nearest(weights, grid))


# -- packing


def test_nibbles() -> None:
    codes = np.array([[1, 2, 15], [0, 8, 3]], np.uint8)
    np.testing.assert_array_equal(pack(codes, UINT4), [[0x21, 0x0F], [0x80, 0x03]])
    np.testing.assert_array_equal(pack(codes, UINT8), codes)


AFFINE = Grid(UINT4, False)


def unpack(packed: Any, fmt: NumberFormat) -> Any:
    if fmt == UINT8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


@pytest.mark.parametrize("method", [Rounding(), Rounding(fit_half_quadratic)])
@pytest.mark.parametrize("piece", [1, 700, 1 << 20])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 6), (37, 5), (7, 3), (1, 1)])
def test_pieces_quantize_the_same_as_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    method: Rounding,
    piece: int,
    turned: bool,
    inputs: int,
    outputs: int,
) -> None:
    monkeypatch.setattr(streaming, "_PIECE_BYTES", max(piece, 64))
    weights = normal(inputs, outputs)
    grid, blocks = Grid(UINT4, False), -(-inputs // 16)
    stored = np.ascontiguousarray(weights.T) if turned else weights
    blob, like = (
        NBitsCodes(outputs, blocks, 16, UINT4),
        SignedCodes(stored.shape, turned, 16, UINT4),
    )
    scales = quantize_blocks(stored, turned, 16, grid, method, blob)
    again = quantize_blocks(stored, turned, 16, grid, method, like)
    np.testing.assert_array_equal(scales.scale, again.scale)
    padded = np.zeros((outputs, blocks * 16), np.float32)
    padded[:, :inputs] = weights.T
    rows = padded.reshape(-1, 16)
    fit = method.fit(rows, grid)
    codes = fit.codes(rows, grid).astype(np.uint8)
    np.testing.assert_allclose(scales.scale, fit.scale.reshape(outputs, blocks), rtol=1e-6)
    np.testing.assert_array_equal(unpack(blob.done(), UINT4).reshape(codes.shape), codes)
    signed = codes.reshape(outputs, -1)[:, :inputs].astype(np.int16) - 8
    flat = unpack(like.done(), UINT4)[: inputs * outputs].astype(np.int16)
    found = np.where(flat > 7, flat - 16, flat).reshape(stored.shape)
    np.testing.assert_array_equal(found if turned else found.T, signed)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_weight_without_elements(shape: tuple[int, int]) -> None:
    sink = NBitsCodes(shape[1], -(-shape[0] // 16), 16, UINT4)
    found = quantize_blocks(
        np.empty(shape, np.float32), False, 16, Grid(UINT4, True), Rounding(), sink
    )
    assert found.scale.size == sink.done().size == 0


@pytest.mark.parametrize(
    ("bad", "said"),
    [(np.nan, "NaN"), (np.inf, "infinite"), (3.4e38, "beyond the range")],
)
def test_weights_with_nan_or_infinity_are_unfit(bad: float, said: str) -> None:
    weights = normal(32, 4)
    weights[3, 2], weights[4, 2] = bad, -bad
    with pytest.raises(Unfit, match=said):
        quantize_blocks(weights, False, 32, AFFINE, Rounding(), NBitsCodes(4, 1, 32, UINT4))


def test_outliers_that_leave_nothing_else() -> None:
    weights = normal(256, 4)
    weights[::128] = 1e4
    with pytest.raises(Unfit, match=r"99% would round to zero"):
        quantize_blocks(weights, False, 128, AFFINE, Rounding(), NBitsCodes(4, 2, 128, UINT4))
    # In smaller blocks most have no outlier beside them.
    quantize_blocks(weights, False, 16, AFFINE, Rounding(), NBitsCodes(4, 16, 16, UINT4))
