"""Regions of int8: chains with entry and exit costs, and random graphs against trying them all."""

from __future__ import annotations

from itertools import chain as joined, combinations

import numpy as np
import pytest

from passes.quantize.search.min_cut import FLOAT_END, Item, Value, best_regions, total


def chain(count: int, cross: float) -> list[Value]:
    """Items one after another, between what is fed and what is given back."""
    inner = [Value(i, (i + 1,), cross, cross) for i in range(count - 1)]
    ends = [Value(FLOAT_END, (0,), cross, cross), Value(count - 1, (FLOAT_END,), cross, cross)]
    return [*ends, *inner]


def test_region_must_outweigh_its_conversions() -> None:
    wide = [Item(100, 40)] * 3
    assert best_regions(wide, chain(3, 50)) == {0, 1, 2}
    assert best_regions(wide, chain(3, 100)) == frozenset()
    assert best_regions([], []) == frozenset()


def test_first_layers_stay_float() -> None:
    """Narrow first layers lose; the wide ones behind them win."""
    items = [Item(20, 60), Item(30, 50), Item(100, 30), Item(100, 30)]
    assert best_regions(items, chain(4, 10)) == {2, 3}


def test_a_loss_in_between_is_taken_when_leaving_costs_more() -> None:
    depthwise = Item(10, 18)
    items = [Item(100, 30), depthwise, Item(100, 30)]
    assert best_regions(items, chain(3, 6)) == {0, 1, 2}
    assert best_regions(items, chain(3, 3)) == {0, 2}


def test_a_layer_that_must_stay_float() -> None:
    assert best_regions([Item(100, 10), Item(5), Item(100, 10)], chain(3, 1)) == {0, 2}


def test_one_conversion_serves_all_users() -> None:
    """Three users of one value: each alone would not pay for its entry."""
    items = [Item(20, 10)] * 3
    ends = [Value(i, (FLOAT_END,), 0, 0) for i in range(3)]
    assert best_regions(items, [Value(FLOAT_END, (0, 1, 2), 20, 0), *ends]) == {0, 1, 2}
    apart = [Value(FLOAT_END, (i,), 20, 0) for i in range(3)]
    assert best_regions(items, [*apart, *ends]) == frozenset()


def test_one_exit_serves_all_users() -> None:
    items = [Item(30, 10), Item(5), Item(5)]
    assert best_regions(items, [Value(0, (1, 2), 9, 15)]) == {0}
    assert best_regions(items, [Value(0, (1,), 9, 15), Value(0, (2,), 9, 15)]) == frozenset()


def test_equally_fast_stays_float() -> None:
    assert best_regions([Item(10, 10)], chain(1, 0)) == frozenset()


@pytest.mark.parametrize("seed", range(40))
def test_cut_equals_the_best_of_all_assignments(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 9))
    items = [
        Item(float(random.integers(1, 50)), float(random.integers(1, 50)))
        if random.random() < 0.8
        else Item(float(random.integers(1, 50)))
        for _ in range(count)
    ]
    values: list[Value] = []
    for producer in (FLOAT_END, *range(count)):
        later = [*range(producer + 1, count), FLOAT_END]
        users = random.choice(later, min(len(later), int(random.integers(1, 4))), replace=False)
        enter, leave = random.integers(0, 12, 2)
        values.append(Value(producer, tuple(map(int, users)), float(enter), float(leave)))
    subsets = joined.from_iterable(combinations(range(count), n) for n in range(count + 1))
    least = min(total(items, values, chosen) for chosen in subsets)
    assert total(items, values, best_regions(items, values)) == pytest.approx(least)


def test_a_deep_model_is_quick_and_does_not_recurse() -> None:
    items = [Item(10, 5) if i % 3 else Item(10, 14) for i in range(3000)]
    assert len(best_regions(items, chain(3000, 3))) == 3000 - 1  # all but the first
