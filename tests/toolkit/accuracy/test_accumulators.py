"""Accumulators of channel groups: which measures and limits an output gets."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.accuracy.accumulators import accumulators_of
from toolkit.accuracy.output_kinds import ChannelGroup, OutputKind
from toolkit.accuracy.requirement import Requirement, Score


def group_of(kind, requirement=None, real=True):
    output = OutputKind("y", kind, groups=(ChannelGroup(kind),))
    return accumulators_of({"y": output}, requirement or Requirement(), real)["y"][0]


def measures(*arguments, **options):
    return [limit.measure for limit in group_of(*arguments, **options).limits]


def test_the_budget_of_a_kind_is_the_default():
    assert measures("classes") == ["top1", "answers", "sqnr"]
    assert measures("embedding") == ["cosine", "variance"]
    assert measures("exact") == ["agreement"]


def test_synthetic_inputs_have_fewer_measures():
    assert measures("classes", real=False) == ["top1", "sqnr"]
    assert measures("text", real=False) == ["top1", "sqnr"]


def test_the_users_metric_replaces_the_budget():
    assert measures("regression", Requirement.of(0.1, "cosine")) == ["cosine"]
    assert measures("scores", Requirement.of(0.1, "top1")) == ["decisions"]
    assert measures("exact", Requirement.of(0.1, "cosine")) == ["agreement"]


def test_a_score_limits_nothing_else():
    limits = group_of("classes", Requirement(Score("mine", lambda outputs: 1.0))).limits
    assert all(np.isinf(limit.loss) for limit in limits)


@pytest.mark.parametrize("kind", ["classes", "text", "scores", "embedding", "regression", "exact"])
def test_equal_rows_lose_nothing_and_incomparable_ones_everything(kind):
    rows = np.random.default_rng(0).uniform(0.1, 0.9, (8, 4))
    equal, lost = group_of(kind), group_of(kind)
    equal.add(rows, rows)
    lost.add(rows, None)
    assert all(figure.ok for figure in equal.figures())
    assert not any(figure.ok for figure in lost.figures())
