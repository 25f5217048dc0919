"""What a user is told of a search, and of one that found nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from passes.quantize.search.candidate_eval import Trials
from passes.quantize.search.notes import note_fallbacks, note_what
from passes.quantize.search.search import Found
from toolkit.accuracy.quality_report import Figure, OutputQuality, Quality
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.plan import Entry, Plan


def entry(name: str) -> Entry:
    return Entry(node=name, output=name, op="Conv", scheme="static")


@dataclass
class FixedQuality:
    """Trials that know what the evaluator says of any plan."""

    said: Quality | None = field(
        default_factory=lambda: Quality(
            (OutputQuality("y", "scores", (Figure("y", "sqnr", 0.1, 0.01),)),), 4
        )
    )

    def quality(self, plan: Plan) -> Quality | None:
        return self.said

    known = quality


def told(found: Found, evaluated: FixedQuality | None = None) -> str:
    ctx = Context()
    note_fallbacks(found, cast("Trials", cast("Any", evaluated or FixedQuality())), ctx)
    return "; ".join(ctx.notes)


def test_fallbacks_are_named_with_their_sqnr_alone() -> None:
    one, two, three = entry("one"), entry("two"), entry("three")
    harm = {one: 0.001, two: 0.01, three: 1e-6}
    said = told(Found(Plan(), (one, two, three), harm))
    assert said.startswith(
        "falls back to float to keep the budget: Conv 'two' (SQNR 20 dB alone), "
        "Conv 'one' (SQNR 30 dB alone) and 1 more: "
    )


def test_ruined_outputs_are_noted_without_figure() -> None:
    one, two, three = entry("one"), entry("two"), entry("three")
    said = told(Found(Plan(), (one, two, three), {one: 1e6, two: 7e5}), FixedQuality(None))
    assert "Conv 'one' (ruins the outputs alone), Conv 'two' (ruins the outputs alone)" in said
    assert "dB" not in said


def test_note_on_collapse_has_figure_and_advice() -> None:
    one = entry("one")
    said = told(Found(Plan(), (one,), {one: 0.05}, tried=Plan((one,))))
    assert said == (
        "nothing is quantized: no part of it keeps the budget (output 'y': SQNR 10.0 dB "
        "(budget 20.0 dB) on 4 samples); most sensitive: Conv 'one' (SQNR 13 dB alone); "
        "--max-drop sets another budget"
    )


def test_nothing_quantized_is_noted_once() -> None:
    plan = Plan((entry("one"),)).turned(["one"], reason="float is faster")
    ctx = Context()
    note_what(plan, plan, ctx)
    assert ctx.notes == [
        "nothing is quantized, for the reasons below",
        "left float: Conv 'one' (float is faster)",
    ]
    ctx.notes[:] = ["nothing is quantized: it went wrong"]
    note_what(plan, plan, ctx)
    assert len(ctx.notes) == 2
    ctx.notes.clear()
    note_what(Plan(), Plan(), ctx)
    assert not ctx.notes, "there is nothing to quantize in it"


def test_plan_within_budget_adds_no_note() -> None:
    assert told(Found(Plan())) == ""
