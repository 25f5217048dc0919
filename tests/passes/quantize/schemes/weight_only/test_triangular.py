"""Factors and inverses by blocks, against numpy's of the whole."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from passes.quantize.schemes.weight_only import triangular
from passes.quantize.schemes.weight_only.gptq import Gram, Solver
from passes.quantize.schemes.weight_only.triangular import factor, invert
from toolkit.storage.spill import file_range


def definite(size: int) -> Any:
    rows = np.random.default_rng(size).standard_normal((2 * size, size)).astype(np.float32)
    return rows.T @ rows / size


@pytest.mark.parametrize("size", [1, 7, 8, 9, 24, 50])
def test_blocks_compute_the_same_as_numpy(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(triangular, "_BLOCK", 8)
    matrix = definite(size)
    expected = np.linalg.cholesky(matrix.astype(np.float64))
    factor(matrix)
    np.testing.assert_allclose(matrix, expected, atol=1e-4)
    invert(matrix)
    np.testing.assert_allclose(matrix, np.linalg.inv(expected), rtol=1e-3, atol=1e-3)


def test_indefinite_matrix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triangular, "_BLOCK", 4)
    late = definite(10)
    late[9, 9] = -1
    for matrix in (np.zeros((3, 3), np.float32), late, np.full((9, 9), np.nan, np.float32)):
        with pytest.raises(np.linalg.LinAlgError):
            factor(matrix)
    with pytest.raises(np.linalg.LinAlgError):
        invert(np.diag(np.array([1, 1e-45, 1, 1, 1], np.float32)))


def test_neither_sum_nor_solution_is_in_memory() -> None:
    """Of n^2 numbers not even one copy: both are mapped, and worked on in parts."""
    values = np.random.default_rng(0).standard_normal((64, 2048)).astype(np.float32)
    matrix_bytes = 4 * 2048**2
    tracemalloc.start()
    try:
        gram = Gram("x")
        gram.update(values)
        gram.update(values)
        solver = Solver.of(gram.total, True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.75 * matrix_bytes
    assert file_range(gram.total) is not None
    assert solver.upper[0, 0] > 0
    np.testing.assert_allclose(gram.total[:3], 2 * values[:, :3].T @ values, rtol=1e-4, atol=1e-3)
