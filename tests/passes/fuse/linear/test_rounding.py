"""Changed weights, rounded to their element type."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from passes.fuse.linear.affine import rounded

TYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_representable_numbers_are_rounded(kind: type, scale: float) -> None:
    exact = np.random.default_rng(0).standard_normal((4, 8)) * scale
    exact[0, 0] = 0.0
    exact[0, 1] = scale * 1e-30  # negligible next to the others
    result = rounded(exact, np.zeros(1, kind))
    assert result is not None
    assert result.dtype == kind
    np.testing.assert_array_equal(result, exact.astype(kind))


@pytest.mark.parametrize("kind", TYPES[:3])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e40, -1e40])
def test_overflowing_numbers_are_rejected(kind: type, bad: float) -> None:
    assert rounded(np.array([1.0, bad]), np.zeros(1, kind)) is None


@pytest.mark.parametrize(("kind", "tiny"), [(np.float16, 1e-8), (np.float32, 1e-46)])
def test_numbers_that_all_underflow_are_rejected(kind: type, tiny: float) -> None:
    assert rounded(np.array([tiny, 3.3 * tiny]), np.zeros(1, kind)) is None
    assert rounded(np.zeros(3), np.zeros(1, kind)) is not None


def test_an_empty_array_stays_empty() -> None:
    assert rounded(np.zeros((0, 4)), np.zeros(1, np.float32)) is not None
