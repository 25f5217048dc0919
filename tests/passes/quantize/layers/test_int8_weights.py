"""Weights as integers: exactly what numpy computes from the formula, whatever the block size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from passes.quantize.layers import row_blocks
from passes.quantize.layers.int8_weights import FULL_LIMIT, REDUCED_LIMIT, Unfit, quantize
from toolkit.storage import spill


def by_formula(weights: Any, axis: int | None, limit: int) -> tuple[Any, Any]:
    others = None if axis is None else tuple(i for i in range(weights.ndim) if i != axis)
    scale = np.abs(weights).max(axis=others, keepdims=True).astype(np.float32) / np.float32(limit)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)
    integers = np.clip(np.rint(weights / scale), -limit, limit).astype(np.int8)
    return integers, scale.reshape(() if axis is None else -1)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("limit", [FULL_LIMIT, REDUCED_LIMIT])
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("block", [1, 4 * 7 * 3, 1 << 22])
def test_matrices(
    monkeypatch: pytest.MonkeyPatch, limit: int, axis: int | None, block: int
) -> None:
    monkeypatch.setattr(row_blocks, "_BLOCK_BYTES", block)
    weights = normal(20, 7)
    integers, scale = by_formula(weights, axis, limit)
    found = quantize(weights, axis, limit)
    np.testing.assert_array_equal(found.codes, integers)
    np.testing.assert_array_equal(found.params.scale, scale)
    assert found.codes.dtype == np.int8
    assert found.params.scale.dtype == np.float32
    assert np.abs(found.codes).max() == limit


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_a_turned_matrix(monkeypatch: pytest.MonkeyPatch, axis: int | None) -> None:
    monkeypatch.setattr(row_blocks, "_BLOCK_BYTES", 100)
    weights = normal(9, 6)
    plain, turned = quantize(weights, axis), quantize(weights, axis, transpose=True)
    np.testing.assert_array_equal(turned.codes, plain.codes.T)
    np.testing.assert_array_equal(turned.params.scale, plain.params.scale)
    assert turned.codes.flags.c_contiguous


def test_more_dimensions() -> None:
    weights = normal(2, 8, 3)
    integers, scale = by_formula(weights, 1, FULL_LIMIT)
    found = quantize(weights, 1)
    np.testing.assert_array_equal(found.codes, integers)
    np.testing.assert_array_equal(found.params.scale, scale)
    with pytest.raises(ValueError, match="transposed"):
        quantize(weights, 1, transpose=True)


def test_a_large_result_is_mapped_to_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = normal(64, 32)
    expected = quantize(weights, 1)
    monkeypatch.setattr(spill, "FILE_FROM", 1)
    found = quantize(weights, 1)
    assert spill.file_range(found.codes) is not None
    assert not found.codes.flags.writeable
    np.testing.assert_array_equal(found.codes, expected.codes)


def test_halves_go_to_the_even_neighbour() -> None:
    weights = np.array([[127, 0.5, 1.5, -0.5, -2.5, 126.5, -127]], dtype=np.float32)
    assert quantize(weights, None).codes.tolist() == [[127, 0, 2, 0, -2, 126, -127]]


def test_channels_of_zeros_have_a_scale_that_divides() -> None:
    weights = normal(6, 3)
    weights[:, 1] = 0
    weights[:, 2] *= 1e-44
    found = quantize(weights, 1)
    assert found.params.scale[1] == found.params.scale[2] == 1
    assert not found.codes[:, 1:].any()


def test_all_zeros_and_nothing_at_all() -> None:
    assert not quantize(np.zeros((4, 2), np.float32), 1).codes.any()
    for shape in ((0, 3), (3, 0)):
        found = quantize(np.zeros(shape, np.float32), 1)
        assert found.codes.shape == shape
        np.testing.assert_array_equal(found.params.scale, np.ones(shape[1]))


def test_the_largest_numbers_there_are() -> None:
    largest = np.finfo(np.float32).max
    weights = np.array([[largest, -largest], [largest / 4, 1]], dtype=np.float32)
    found = quantize(weights, 1)
    assert np.isfinite(found.params.scale).all()
    assert found.codes.tolist() == [[127, -127], [32, 0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_numbers_that_are_none_are_unfit(bad: float, axis: int | None) -> None:
    weights = normal(8, 8)
    weights[3, 5] = bad
    with pytest.raises(Unfit, match="NaN" if np.isnan(bad) else "infinite"):
        quantize(weights, axis)


def test_an_outlier_that_leaves_nothing_of_the_others_is_unfit() -> None:
    weights = normal(32, 32)
    weights[0, 0] = 1e4
    with pytest.raises(Unfit, match="would round to zero"):
        quantize(weights, None)
    quantize(weights, 1)  # one channel of 32 is not most of them


def test_other_element_types_are_not_taken() -> None:
    with pytest.raises(ValueError, match="float32"):
        quantize(normal(2, 2).astype(np.float64), 1)


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=3, max_side=6),
        elements=st.floats(-1e6, 1e6, width=32),
    ),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([FULL_LIMIT, REDUCED_LIMIT]),
)
def test_no_weight_moves_by_more_than_half_a_step(
    weights: Any, axis: int | None, limit: int
) -> None:
    try:
        found = quantize(weights, axis, limit)
    except Unfit:
        return
    shape = [-1 if i == axis else 1 for i in range(weights.ndim)]
    scale = found.params.scale.astype(np.float64).reshape(shape if axis is not None else ())
    error = np.abs(found.codes * scale - weights)
    assert np.all(error <= scale * 0.5 * (1 + 1e-4) + np.finfo(np.float32).tiny * 127)
