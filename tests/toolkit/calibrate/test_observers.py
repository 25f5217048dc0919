"""Observers: exact merging, degenerate tensors, and clipped ranges."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp

from toolkit.calibrate.histogram import BINS, Histogram
from toolkit.calibrate.observers import (
    OBSERVERS,
    Entropy,
    MinMax,
    MovingAverage,
    Mse,
    Percentile,
    observer_named,
)
from toolkit.calibrate.statistics import (
    Average,
    ChannelExtremes,
    Extremes,
    Mismatch,
    NotFinite,
)
from toolkit.errors import UsageError

ALL = [observer() for observer in OBSERVERS.values()]


def observed(observer, *batches):
    statistic = observer.start("t")
    for batch in batches:
        statistic.update(np.asarray(batch))
    return observer.range(statistic)


def same(one, other):
    first, second = one.state(), other.state()
    return first.keys() == second.keys() and all(
        np.array_equal(first[key], second[key]) for key in first
    )


# Merging -----------------------------------------------------------------------------------------

FINITE: dict[str, Any] = {"allow_nan": False, "allow_infinity": False}
KINDS: list[tuple[Any, Any]] = [(np.float32, 32), (np.float16, 16), (np.float64, 64)]
BATCHES = st.sampled_from(KINDS).flatmap(
    lambda kind: st.lists(
        hnp.arrays(kind[0], st.integers(0, 9), elements=st.floats(width=kind[1], **FINITE)),
        min_size=1,
        max_size=6,
    )
)
EXACT = [
    lambda: Extremes("t"),
    lambda: Histogram("t"),
]


@pytest.mark.parametrize("start", EXACT)
@given(batches=BATCHES, cut=st.integers(0, 6), order=st.randoms(use_true_random=False))
def test_shards_merge_to_the_whole_in_any_order(start, batches, cut, order):
    whole, one, other = start(), start(), start()
    whole.update(np.concatenate(batches))
    shuffled = list(batches)
    order.shuffle(shuffled)
    for batch in shuffled[:cut]:
        one.update(batch)
    for batch in shuffled[cut:]:
        other.update(batch)
    swapped, back = start(), start()
    swapped.restore(other.state())
    back.restore(one.state())
    one.merge(other)
    swapped.merge(back)
    assert same(one, whole)
    assert same(swapped, whole)


@given(batches=BATCHES)
def test_the_histogram_counts_what_numpy_counts(batches):
    histogram = Histogram("t")
    for batch in batches:
        histogram.update(batch)
    values = np.concatenate(batches).astype(np.float64)
    assert histogram.total() == values.size
    assert histogram.counts.size <= BINS
    assert histogram.zeros == np.count_nonzero(values == 0)
    below = np.concatenate([[0], np.cumsum(histogram.counts)])
    if 2.0**histogram.exponent >= 1e-40:  # smaller ones are all in the bins next to zero
        # the last edge may exceed the largest double
        for edge, count in zip(histogram.edges()[:-1], below[:-1], strict=True):
            assert np.count_nonzero(values < edge) == count


@given(batches=BATCHES)
def test_bins_are_as_narrow_as_possible(batches):
    histogram = Histogram("t")
    for batch in batches:
        histogram.update(batch)
    if max(-histogram.low, histogram.high) > 1e-40:
        assert histogram.counts.size >= BINS // 2


@given(
    batches=st.lists(
        hnp.arrays(np.float64, (2, 3), elements=st.floats(-1e6, 1e6)),
        min_size=1,
        max_size=6,
    ),
    cut=st.integers(0, 6),
)
def test_channels_merge(batches, cut):
    whole, one, other = (ChannelExtremes("t", 1) for _ in range(3))
    for batch in batches:
        whole.update(batch)
    for batch in batches[:cut]:
        one.update(batch)
    for batch in batches[cut:]:
        other.update(batch)
    other.merge(one)
    assert same(other, whole)
    assert whole.low.tolist() == np.min(batches, (0, 1)).tolist()


def test_a_moving_average_merges_in_order():
    batches = np.random.default_rng(0).normal(size=(9, 4))
    whole, one, other = (Average("t", 0.9) for _ in range(3))
    for index, batch in enumerate(batches):
        whole.update(batch)
        (one if index < 4 else other).update(batch)
    one.merge(other)
    np.testing.assert_allclose(one.bounds(), whole.bounds(), rtol=1e-12)
    assert one.batches == 9


def test_a_moving_average_depends_on_the_order():
    assert observed(MovingAverage(), [0.0, 1.0], [0.0, 9.0]) != observed(
        MovingAverage(), [0.0, 9.0], [0.0, 1.0]
    )


def test_different_statistics_do_not_merge():
    with pytest.raises(Mismatch, match="'t': channels:0 cannot be merged with channels:1"):
        ChannelExtremes("t", 0).merge(ChannelExtremes("t", 1))


def test_memory_does_not_grow_with_samples():
    histogram = Histogram("t")
    for seed in range(50):
        histogram.update(np.random.default_rng(seed).normal(size=1000) * 2.0**seed)
        assert sum(array.nbytes for array in histogram.state().values()) <= 8 * (BINS + 8)


# Degenerate tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("observer", ALL, ids=lambda o: o.name)
@pytest.mark.parametrize(
    "values",
    [
        np.zeros((0, 3), np.float32),
        np.zeros((2, 3), np.float32),
        np.arange(4),
        np.array([True]),
        np.full(3, 1e-44, np.float32),
    ],
    ids=["empty", "zeros", "integers", "booleans", "denormal"],
)
def test_an_empty_range_is_zero_to_one(observer, values):
    found = observed(observer, values)
    assert (found.low, found.high) == (0.0, 1.0)


@pytest.mark.parametrize("observer", ALL, ids=lambda o: o.name)
@pytest.mark.parametrize("constant", [3.0, -0.7, 1e30, 1.7e308])
def test_a_constant_keeps_its_value(observer, constant):
    dtype = np.float64 if constant > 1e38 else np.float32
    value = float(dtype(constant))
    found = observed(observer, np.full((2, 8), constant, dtype))
    np.testing.assert_allclose(
        (found.low, found.high), (min(value, 0), max(value, 0)), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("observer", ALL, ids=lambda o: o.name)
@pytest.mark.parametrize(("bad", "what"), [(np.nan, "NaN"), (np.inf, "inf"), (-np.inf, "inf")])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_tensor_with_nan_is_named(observer, bad, what, dtype):
    statistic = observer.start("conv1_out")
    with pytest.raises(NotFinite, match=f"'conv1_out' holds {what}"):
        statistic.update(np.array([1.0, bad, 2.0]).astype(dtype))
    assert (observer.range(statistic).low, observer.range(statistic).high) == (0.0, 1.0)


@pytest.mark.parametrize("observer", ALL, ids=lambda o: o.name)
def test_other_float_types(observer):
    found = observed(observer, np.linspace(-1, 1, 65).astype(ml_dtypes.bfloat16))
    np.testing.assert_allclose((found.low, found.high), (-1, 1), atol=0.05)


def test_batches_of_different_lengths():
    found = observed(MinMax(), np.ones((1, 3)), -np.ones((2, 7, 2)), 5 * np.ones(()))
    assert (found.low, found.high) == (-1, 5)


def test_channels_that_change():
    statistic = ChannelExtremes("t", 1)
    statistic.update(np.ones((2, 3)))
    with pytest.raises(Mismatch, match="'t' has 4 channels along axis 1, and had 3"):
        statistic.update(np.ones((2, 4)))
    with pytest.raises(Mismatch, match="rank 1: no axis 1"):
        statistic.update(np.ones(2))


# Clipping ----------------------------------------------------------------------------------------


def normal_with_outlier(count=100_000, outlier=100.0):
    return np.append(np.random.default_rng(0).normal(size=count), outlier).astype(np.float32)


def test_percentile_is_near_numpys():
    values = np.random.default_rng(0).normal(size=200_000)
    found = observed(Percentile(99.0), *np.split(values, 20))
    wanted = np.percentile(values, [0.5, 99.5])
    np.testing.assert_allclose((found.low, found.high), wanted, atol=0.01)


def test_percentile_100_is_minmax():
    values = np.random.default_rng(0).normal(size=1000)
    assert observed(Percentile(100), values) == observed(MinMax(), values)


def test_percentile_of_positive_values_starts_at_zero():
    found = observed(Percentile(90.0), np.linspace(5, 10, 1001))
    assert found.low == 0
    assert found.high == pytest.approx(9.75, abs=0.01)


@pytest.mark.parametrize("observer", [Percentile(99.9), Entropy(), Mse(16)], ids=lambda o: o.name)
def test_a_single_outlier_is_clipped(observer):
    found = observed(observer, normal_with_outlier())
    assert 2 < found.high < 60
    assert -6 < found.low < -2


@pytest.mark.parametrize("observer", [Entropy(), Mse()], ids=lambda o: o.name)
def test_zeros_of_a_relu_do_not_narrow_the_range(observer):
    values = np.abs(np.random.default_rng(0).standard_normal(20_000)).astype(np.float32)
    zeros = np.zeros(400_000, np.float32)
    ranges = []
    for parts in ([values], [values, zeros]):
        statistic = observer.start("x")
        for part in parts:
            statistic.update(part)
        ranges.append(observer.range(statistic))
    assert ranges[0] == ranges[1]
    assert ranges[1].high > 2


@pytest.mark.parametrize("observer", [Entropy(), Mse()], ids=lambda o: o.name)
def test_a_uniform_distribution_keeps_its_range(observer):
    found = observed(observer, np.linspace(-1, 2, 50_000))
    assert found.low == pytest.approx(-1, abs=0.03)
    assert found.high == pytest.approx(2, abs=0.03)


@pytest.mark.parametrize("observer", [Entropy(), Mse()], ids=lambda o: o.name)
@pytest.mark.parametrize("most", [1.0, 6.0, 255.0])
def test_saturated_values_keep_their_range(observer, most):
    """The largest value lies on an edge of bins, and many values equal it."""
    random = np.random.default_rng(0)
    pixels = np.clip(random.integers(-50, 320, 20_000), 0, 255) / 255 * most
    assert observed(observer, pixels) == observed(MinMax(), pixels)
    clipped = np.clip(random.standard_normal(20_000) * most, -most, most)
    assert observed(observer, clipped) == observed(MinMax(), clipped)


def test_few_values_are_not_clipped_by_entropy():
    values = np.random.default_rng(8).laplace(size=200)
    assert observed(Entropy(), values) == observed(MinMax(), values)
    often = np.tile(values, 2)
    assert observed(Entropy(), often).high < observed(MinMax(), often).high


def quantization_error(values, found, levels):
    step = (found.high - found.low) / (levels - 1)
    zero = np.round(-found.low / step)
    quantized = (np.clip(np.round(values / step) + zero, 0, levels - 1) - zero) * step
    return float(((values - quantized) ** 2).mean())


@pytest.mark.parametrize("levels", [16, 256])
@pytest.mark.parametrize("kind", ["normal", "laplace", "relu", "outlier"])
def test_mse_is_near_the_best_range(levels, kind):
    random = np.random.default_rng(0)
    values = {
        "normal": random.normal(size=20_000),
        "laplace": random.laplace(size=20_000),
        "relu": np.maximum(random.normal(size=20_000), 0),
        "outlier": normal_with_outlier(20_000, 20.0).astype(np.float64),
    }[kind]
    found = observed(Mse(levels), values)
    whole = observed(MinMax(), values)
    error = quantization_error(values, found, levels)
    shrunk = [
        type(whole)(whole.low * a, whole.high * b)
        for a in np.linspace(0.1, 1, 19)
        for b in np.linspace(0.1, 1, 19)
    ]
    best = min(quantization_error(values, candidate, levels) for candidate in shrunk)
    assert error <= 1.1 * best
    assert error <= 1.02 * quantization_error(values, whole, levels)


# Names and options -------------------------------------------------------------------------------


def test_observers_by_name():
    assert observer_named("percentile") == Percentile()
    with pytest.raises(UsageError, match="did you mean 'minmax'"):
        observer_named("min-max")
    with pytest.raises(UsageError, match="choose one of minmax, average, percentile, entropy, mse"):
        observer_named("xyz")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Percentile(0),
        lambda: Percentile(100.1),
        lambda: MovingAverage(1.0),
        lambda: Entropy(1),
        lambda: Mse(5000),
    ],
)
def test_impossible_options(make):
    with pytest.raises(UsageError, match="it must be"):
        make()
