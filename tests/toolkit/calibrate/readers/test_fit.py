"""Raw feeds are converted to the types of a model's inputs, or refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checks import model
from toolkit.calibrate.readers.fit import Inputs
from toolkit.errors import UsageError

INPUTS = Inputs(
    model("g (float[N] x, int8[N] k) => (float[N] y, int8[N] z) { y = Relu(x) z = Identity(k) }")
)


def fit(x, k):
    return INPUTS.fit({"x": np.asarray(x), "k": np.asarray(k)}, "feed 0")


def test_numbers_are_converted():
    feed = fit(np.array([1.5], np.float64), np.array([-3], np.int64))
    assert (feed["x"].dtype, feed["k"].dtype) == (np.float32, np.int8)
    assert (feed["x"].item(), feed["k"].item()) == (1.5, -3)


@pytest.mark.parametrize(
    ("x", "k", "problem"),
    [
        ([1.0], [200], "'k' is int64 with values that int8 cannot hold"),
        ([2**24 + 1], [1], "'x' is int64 with values that float32 does not hold exactly"),
        ([1.0], [1.0], "'k' is float64; the model takes int8[N]"),
        (["a"], [1], "'x' is <U1; the model takes float32[N]"),
        ([1e300], [1], "'x' does not fit into float32"),
        ([float("nan")], [1], "'x' has NaN or Inf"),
    ],
)
def test_values_that_would_change_are_refused(x, k, problem):
    with pytest.raises(UsageError) as caught:
        fit(x, k)
    assert str(caught.value).startswith(f"feed 0: {problem}")
