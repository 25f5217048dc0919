"""Range selection: percentile, least squares and least divergence on known distributions."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.calibrate.histogram import Histogram
from toolkit.calibrate.range_selection import least_divergence, least_squares, percentile


def histogram(values):
    found = Histogram("t")
    found.update(np.asarray(values, np.float32))
    return found


UNIFORM = np.linspace(-1, 1, 20_001)
OUTLIER = np.append(np.random.default_rng(0).normal(size=100_000), 1000.0)


def test_percentile_is_the_central_interval():
    low, high = percentile(histogram(UNIFORM), 90)
    assert (low, high) == pytest.approx((-0.9, 0.9), abs=1e-3)
    assert percentile(histogram(UNIFORM), 100) == (-1, 1)
    assert percentile(Histogram("t"), 99) == (0, 0)


def test_a_uniform_distribution_is_not_clipped():
    assert least_squares(histogram(UNIFORM), 256) == pytest.approx((-1, 1), abs=0.02)
    assert least_divergence(histogram(UNIFORM), 256) == pytest.approx((-1, 1), abs=0.02)


def test_an_outlier_is_clipped_where_that_costs_less():
    assert least_squares(histogram(OUTLIER), 16)[1] < 1000
    assert percentile(histogram(OUTLIER), 99.9)[1] < 5
    assert least_divergence(histogram(OUTLIER), 128)[1] < 1000


def test_few_values_are_not_clipped_by_divergence():
    assert least_divergence(histogram([-1.0, 0.5, 7.0]), 256) == (-1, 7)
