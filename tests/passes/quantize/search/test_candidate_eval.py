"""Trials: how often the evaluator is asked, and on how many samples."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from passes.quantize.apply_plan import apply_all
from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from passes.quantize.search import candidate_eval as subject
from passes.quantize.search.candidate_eval import FEW, Trials
from tests.checks import model
from tests.passes.fuse.constants import floats, typed
from toolkit.accuracy.evaluator import Evaluator
from toolkit.accuracy.quality_report import Figure, OutputQuality, Quality
from toolkit.accuracy.requirement import Requirement, Score
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.plan import Plan

LAYER = typed("g (float[N, 64] x) => (float[N, 8] y)", floats("w", 64, 8), "y = MatMul (x, w)")


@dataclass
class Bench:
    """A evaluator of 32 samples, to whom any model uses so much of its budget."""

    used: float = 0.5
    requirement: Requirement = field(default_factory=Requirement)
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def evaluate(self, made: Model, **how: Any) -> Quality:
        self.asked.append(how)
        seen = min(how.get("samples") or 32, 32)
        figures = (Figure("y", "sqnr", self.used, 1.0),)
        return Quality((OutputQuality("y", "regression", figures),), seen, noise=self.used)


def tried(bench: Bench) -> tuple[Trials, Plan]:
    layer = model(LAYER)
    plan = QuantizeDynamic(min_elements=1).make_plan(layer)
    return Trials(layer, Context(evaluator=cast("Evaluator", bench)), apply_all), plan


def test_a_plan_is_judged_once() -> None:
    bench = Bench(0.9)
    trials, plan = tried(bench)
    for _ in range(2):
        assert trials.holds(plan)
        assert trials.is_proven(plan)
        assert trials.used(plan) == 0.9
    assert [how.get("deployed", False) for how in bench.asked] == [True, False]


def test_what_is_far_from_the_budget_needs_no_proof() -> None:
    bench = Bench(0.5)
    trials, plan = tried(bench)
    assert trials.holds(plan)
    assert trials.is_proven(plan)
    assert len(bench.asked) == 1


def test_a_look_takes_few_samples_of_a_slow_model(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    trials, plan = tried(bench)
    monkeypatch.setattr(Trials, "affordable", lambda self, seconds: FEW)
    for _ in range(2):
        assert trials.seems_to_hold(plan)
    assert [how["samples"] for how in bench.asked] == [FEW]
    assert trials.holds(plan), "on all samples"
    assert [how["samples"] for how in bench.asked] == [FEW, None]


def test_a_look_at_all_samples_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    trials, plan = tried(bench)
    monkeypatch.setattr(Trials, "affordable", lambda self, seconds: 1000)
    assert trials.seems_to_hold(plan)
    assert trials.holds(plan)
    assert trials.noise(plan, 100) == 0.5
    assert len(bench.asked) == 1
    assert trials.noise(plan, FEW) == 0.5, "of other samples nobody knows"
    assert len(bench.asked) == 2


def test_what_does_not_hold_is_not_looked_at_for_long() -> None:
    bench = Bench(1.2)
    trials, plan = tried(bench)
    assert not trials.seems_to_hold(plan)
    assert bench.asked[0]["stop_above"] < subject.STOP_ABOVE


def test_of_a_fast_model_more_samples_are_affordable() -> None:
    trials, plan = tried(Bench())
    assert trials.affordable(1.0) == FEW, "before anything ran"
    trials.holds(plan)
    assert trials.affordable(1.0) > FEW


def test_a_metric_of_a_user_is_asked_on_all_samples() -> None:
    """Screening would not ask for it, and anything would pass."""
    bench = Bench(0.5, Requirement(metric=Score("own", lambda outputs: 1.0)))
    trials, plan = tried(bench)
    assert trials.seems_to_hold(plan)
    assert [how.get("samples") for how in bench.asked] == [None]


def test_drafts_do_not_pile_up() -> None:
    """Also while the collector is at rest, as it is when a pass runs."""
    trials, plan = tried(Bench())
    alive: list[weakref.ref[Model]] = []
    gc.disable()
    try:
        for _ in range(5):
            alive.append(weakref.ref(trials.draft(plan)))
    finally:
        gc.enable()
    assert sum(found() is not None for found in alive) <= 1
