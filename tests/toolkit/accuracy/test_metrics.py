"""Measures against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from toolkit.accuracy.budgets import chance, decibels
from toolkit.accuracy.metrics import (
    LargestError,
    MeanLoss,
    Noise,
    WeightedFlips,
    are_probabilities,
    cosine_losses,
    flips,
    inequality,
    softmax,
)

RANDOM = np.random.default_rng(0)
A = RANDOM.standard_normal((64, 10))
B = A + 0.1 * RANDOM.standard_normal((64, 10))


ACCUMULATORS = [
    lambda: MeanLoss(cosine_losses),
    lambda: MeanLoss(inequality),
    Noise,
    LargestError,
    WeightedFlips,
]


def of(accumulator, a=A, b=B, pieces=4):
    """Return the loss, accumulated piece by piece."""
    for x, y in zip(np.array_split(a, pieces), np.array_split(b, pieces), strict=True):
        accumulator.add(x, y)
    return accumulator.loss()


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_nothing_is_lost_when_nothing_changed(accumulator):
    assert of(accumulator(), A, A) == pytest.approx(0, abs=1e-12)
    assert accumulator().loss() == 0


def test_noise():
    wanted = np.square(A - B).sum() / np.square(A).sum()
    assert of(Noise()) == pytest.approx(wanted)
    assert decibels(of(Noise())) == pytest.approx(20, abs=1)


def around_mean(a, b):
    noise = Noise()
    of(noise, a, b)
    return noise.around_mean()


def test_rows_are_weighted():
    weights = RANDOM.uniform(0, 1, 64)
    noise = Noise()
    noise.add(A, B, weights)
    w = weights[:, None]
    assert noise.loss() == pytest.approx((w * np.square(A - B)).sum() / (w * np.square(A)).sum())
    mean = (w * A).sum(axis=0) / w.sum()
    varying = (w * np.square(A - mean)).sum()
    assert noise.around_mean() == pytest.approx((w * np.square(A - B)).sum() / varying)


def test_rows_of_two_lengths_have_channels_of_their_own():
    noise = Noise()
    noise.add(A, B)
    noise.add(A[:, :7] + 50, B[:, :7] + 50)
    off = np.square(A - B).sum() + np.square(A - B)[:, :7].sum()
    around = np.square(A - A.mean(axis=0))
    assert noise.around_mean() == pytest.approx(off / (around.sum() + around[:, :7].sum()))


def test_noise_around_the_mean_sees_through_an_offset():
    a, b = A + 50, B + 50
    assert of(Noise(), a, b) < 1e-5
    around = np.square(A - B).sum() / np.square(A - A.mean(axis=0)).sum()
    assert around_mean(a, b) == pytest.approx(around, rel=1e-6)


def test_nearly_constant_signals_have_no_variance_loss():
    a = 100 + 1e-3 * A
    assert around_mean(a, a + 1) == 0
    a = 100 + 0.1 * A
    assert around_mean(a, a + 1) > 1


def test_infinities_of_the_reference_are_no_signal():
    a, b = A.copy(), B.copy()
    a[3, 4] = b[3, 4] = -np.inf
    assert math.isfinite(of(Noise(), a, b))
    a[3, 4] = b[3, 4] = 0
    wanted = of(MeanLoss(cosine_losses), a, b)
    a[3, 4] = b[3, 4] = -np.inf
    assert of(MeanLoss(cosine_losses), a, b) == pytest.approx(wanted)


@pytest.mark.filterwarnings("error")
def test_masked_channels_do_not_count_for_margins():
    """All but a few scores of a vocabulary may be masked by minus infinity."""
    a, b = (np.hstack([each, np.full((len(each), 3), -np.inf)]) for each in (A, B))
    assert of(WeightedFlips(), a, b) == pytest.approx(of(WeightedFlips()))
    ruled_out = np.full((1, 4), -np.inf)
    assert of(WeightedFlips(), ruled_out, ruled_out, 1) == 0
    assert of(WeightedFlips(), ruled_out, np.array([[0.0, 1, 0, 0]]), 1) == 0


def test_cosine():
    wanted = [1 - x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(A, B, strict=True)]
    assert of(MeanLoss(cosine_losses)) == pytest.approx(np.mean(wanted))


def test_two_zero_vectors_point_the_same_way():
    zero, one = np.zeros((2, 4)), np.ones((2, 4))
    assert of(MeanLoss(cosine_losses), zero, zero, 1) == 0
    assert of(MeanLoss(cosine_losses), one, zero, 1) == 1


def test_flips():
    wanted = np.mean(A.argmax(axis=1) != B.argmax(axis=1))
    assert wanted > 0
    assert of(MeanLoss(flips)) == pytest.approx(wanted)


def test_flips_with_small_margins_count_less():
    """Margins of 0.01 and of 4, on numbers that spread by about 1."""
    close, clear = np.array([[1.0, 0.99, -1, 0]]), np.array([[3.0, -1, -1, 0]])
    turned = np.array([[0.99, 1.0, -1, 0]])
    assert of(WeightedFlips(), close, turned, 1) < 0.05
    assert of(WeightedFlips(), clear, turned, 1) == 1
    assert of(MeanLoss(flips), close, turned, 1) == 1


def test_probabilities_are_weighted_by_their_logarithms():
    sure, unsure = np.array([[0.98, 0.01, 0.01]]), np.array([[0.34, 0.335, 0.325]])
    turned = np.array([[0.1, 0.8, 0.1]])
    assert of(WeightedFlips(), sure, turned, 1) == 1
    assert of(WeightedFlips(), unsure, turned, 1) <= 1


def test_probabilities_of_logits():
    found = softmax(A)
    assert are_probabilities(found)
    assert not are_probabilities(A)
    np.testing.assert_allclose(softmax(np.log(found)), found)


def test_one_channel_is_a_decision_at_one_half():
    a, b = np.array([[0.9], [0.1], [0.6]]), np.array([[0.8], [0.2], [0.4]])
    assert of(MeanLoss(flips), a, b, 1) == pytest.approx(1 / 3)


def test_integers():
    a, b = np.array([[1], [2], [3], [4]]), np.array([[1], [2], [3], [5]])
    assert of(MeanLoss(inequality), a, b, 2) == 0.25


def test_the_largest_difference():
    assert of(LargestError()) == pytest.approx(np.abs(A - B).max() / np.abs(A).max())


def test_the_spread_is_estimated_from_some_rows():
    """Compare one large piece, of which some rows are used, with small ones used entirely."""
    a, b = (np.random.default_rng(seed).standard_normal((5000, 3)) for seed in (1, 2))
    found = of(WeightedFlips(), a, b, 1)
    assert found == pytest.approx(of(WeightedFlips(), a, b, 10), rel=0.05)


@pytest.mark.parametrize("accumulator", ACCUMULATORS)
def test_an_incomparable_sample_is_a_full_loss(accumulator):
    made = accumulator()
    made.add_incomparable()
    assert made.loss() >= 1


def test_chance_shrinks_with_samples():
    assert chance(0.02, 4) > chance(0.02, 128) > chance(0.02, 10_000) > 0.02
    # of four predictions none may be wrong, of 64 two
    assert 4 * chance(0.02, 4) < 1
    assert 2 < 64 * chance(0.02, 64) < 4
