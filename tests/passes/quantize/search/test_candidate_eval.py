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
from toolkit.runtime.latency import Effort, Timing
from toolkit.targets.target import Target

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


def test_verdicts_on_a_plan_are_cached() -> None:
    bench = Bench(0.9)
    trials, plan = tried(bench)
    for _ in range(2):
        assert trials.holds(plan)
        assert trials.is_proven(plan)
        assert trials.used(plan) == 0.9
    assert [how.get("deployed", False) for how in bench.asked] == [True, False]


def test_plan_far_within_the_budget_needs_no_proof() -> None:
    bench = Bench(0.5)
    trials, plan = tried(bench)
    assert trials.holds(plan)
    assert trials.is_proven(plan)
    assert len(bench.asked) == 1


def test_screening_of_a_slow_model_takes_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    trials, plan = tried(bench)
    monkeypatch.setattr(Trials, "affordable", lambda self, seconds: FEW)
    for _ in range(2):
        assert trials.seems_to_hold(plan)
    assert [how["samples"] for how in bench.asked] == [FEW]
    assert trials.holds(plan), "on all samples"
    assert [how["samples"] for how in bench.asked] == [FEW, None]


def test_screening_on_all_samples_counts_as_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    trials, plan = tried(bench)
    monkeypatch.setattr(Trials, "affordable", lambda self, seconds: 1000)
    assert trials.seems_to_hold(plan)
    assert trials.holds(plan)
    assert trials.noise(plan, 100) == 0.5
    assert len(bench.asked) == 1
    assert trials.noise(plan, FEW) == 0.5, "on other samples"
    assert len(bench.asked) == 2


def test_failing_screening_stops_early() -> None:
    bench = Bench(1.2)
    trials, plan = tried(bench)
    assert not trials.seems_to_hold(plan)
    assert bench.asked[0]["stop_above"] < subject.STOP_ABOVE


def test_fast_model_affords_more_samples() -> None:
    trials, plan = tried(Bench())
    assert trials.affordable(1.0) == FEW, "before anything ran"
    trials.holds(plan)
    assert trials.affordable(1.0) > FEW


def test_user_metric_is_evaluated_on_all_samples() -> None:
    """Screening would not ask for it, and anything would pass."""
    bench = Bench(0.5, Requirement(metric=Score("own", lambda outputs: 1.0)))
    trials, plan = tried(bench)
    assert trials.seems_to_hold(plan)
    assert [how.get("samples") for how in bench.asked] == [None]


def test_drafts_are_freed_during_a_pass() -> None:
    """Automatic garbage collection is off while a pass runs."""
    trials, plan = tried(Bench())
    alive: list[weakref.ref[Model]] = []
    gc.disable()
    try:
        for _ in range(5):
            alive.append(weakref.ref(trials.draft(plan)))
    finally:
        gc.enable()
    assert sum(found() is not None for found in alive) <= 1


def test_plan_is_timed_again_only_for_more_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def latency(_: Target, models: dict[str, Model], *__: Any) -> dict[str, Timing]:
        timed.append(len(models))
        return dict.fromkeys(models, Timing(1.0, 0.5, 0.5, 0.5, 9))

    monkeypatch.setattr(Target, "latency", latency)
    trials, plan = tried(Bench())
    for least in (5, 9):
        found = trials.times({"a": plan, "b": plan}, Effort(least=least))
        assert {name: timing.ratio for name, timing in found.items()} == {"a": 0.5, "b": 0.5}
    assert timed == [2]
    trials.times({"a": plan}, Effort(least=10))
    assert timed == [2, 2]
