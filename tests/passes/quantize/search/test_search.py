"""The search for a plan, with trials that are made up: what is fast, what is noisy, what holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from passes.quantize.search.candidate_eval import Trials
from passes.quantize.search.independent_layers import IndependentGroup
from passes.quantize.search.layer_sensitivity import only, sensitivities
from passes.quantize.search.min_cut import FLOAT_END, Item, Value
from passes.quantize.search.paired_timing import groups_of, keep_what_pays
from passes.quantize.search.problem import Problem
from passes.quantize.search.search import search
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.plan import Entry, Plan
from toolkit.runtime.latency import Effort, Timing
from toolkit.settings import Settings


def names(plan: Plan) -> str:
    return "".join(entry.output for entry in plan.quantized())


@dataclass
class Made:
    """Trials in which each entry makes so much noise, and a plan takes what `ratio` says."""

    noises: Mapping[str, float] = field(default_factory=dict[str, float])
    budget: float = 1.0
    written: float = 1.0
    """The share of the budget that holds for the model as written."""
    seeming: float = 1.0
    """Times the budget that few samples let pass."""
    ratio: Callable[[str], float] | None = None
    ctx: Context = field(default_factory=Context)
    threads: int = 1
    asked: list[str] = field(default_factory=list[str])

    @property
    def timed(self) -> bool:
        return self.ratio is not None

    def noise(self, plan: Plan, samples: int = 8) -> float:
        self.asked.append(names(plan))
        return sum(self.noises.get(entry.output, 0.0) for entry in plan.quantized())

    def holds(self, plan: Plan, times: float = 1.0) -> bool:
        return self.noise(plan) <= self.budget * times

    def used(self, plan: Plan) -> float:
        return self.noise(plan) / self.budget

    def seems_to_hold(self, plan: Plan) -> bool:
        return self.noise(plan) <= self.budget * self.seeming

    def is_proven(self, plan: Plan) -> bool:
        return self.noise(plan) <= self.budget * self.written

    def holds_corrected(self, plan: Plan) -> bool:
        return self.noise(plan) / 2 <= self.budget

    def times(self, plans: Mapping[str, Plan], effort: Effort) -> dict[str, Timing]:
        assert self.ratio is not None
        found = {name: self.ratio(names(plan)) for name, plan in plans.items()}
        return {n: Timing(r, r, r, r, 9) for n, r in found.items() if r < 100}


def trials(made: Made) -> Trials:
    return cast("Trials", cast("Any", made))


def entry(output: str, op: str = "Conv", scheme: Any = "static") -> Entry:
    return Entry(output=output, op=op, scheme=scheme)


def chain(*times: tuple[float, float | None], ops: str = "") -> Problem:
    """Layers a, b, c, ... one after another; conversions take 1."""
    letters = "abcdefgh"[: len(times)]
    kinds = {"+": "Add"}
    entries = [entry(letter, kinds.get(ops[i : i + 1], "Conv")) for i, letter in enumerate(letters)]
    items = tuple(Item(floats, int8) for floats, int8 in times)
    last = len(times) - 1
    values = [Value(FLOAT_END, (0,), 1, 1), Value(last, (FLOAT_END,), 1, 1)]
    values += [Value(i, (i + 1,), 1, 1) for i in range(last)]
    return Problem(Plan(tuple(entries)), items, tuple(values), tuple(enumerate(entries)), ())


WIDE = (10.0, 4.0)
NARROW = (2.0, 5.0)


def loose(*savings: float) -> Problem:
    """Dynamic layers a, b, c, ... that save so much each."""
    letters = "abcdefgh"[: len(savings)]
    entries = tuple(entry(letter, "MatMul", "dynamic") for letter in letters)
    alone = (IndependentGroup((one,), saving) for one, saving in zip(entries, savings, strict=True))
    return Problem(Plan(entries), (), (), (), tuple(alone))


# -- candidates


def test_each_candidate_is_timed_once() -> None:
    seen: list[str] = []
    made = Made(ratio=lambda plan: seen.append(plan) or 0.5)
    search(trials(made), chain(NARROW, WIDE, WIDE), pointwise=pointwise(WIDE, WIDE, WIDE))
    assert sorted(seen) == ["ABC", "abc", "bc"]
    search(trials(made), chain(WIDE, WIDE), pointwise=pointwise(WIDE, WIDE))
    assert sorted(seen[3:]) == ["AB", "ab"]


def test_cost_table_decides_without_timing() -> None:
    made = Made()
    assert names(search(trials(made), chain(NARROW, WIDE, WIDE)).plan) == "bc"


def test_timing_overrides_the_cost_table() -> None:
    made = Made(ratio=lambda plan: {"abc": 0.4}.get(plan, 0.6))
    assert names(search(trials(made), chain(NARROW, WIDE, WIDE)).plan) == "abc"


def test_equally_fast_plans_compete_by_noise() -> None:
    made = Made({"a": 0.5}, ratio=lambda plan: 0.500 if plan == "abc" else 0.503)
    assert names(search(trials(made), chain(NARROW, WIDE, WIDE)).plan) == "bc"


def test_refused_plan_is_not_chosen() -> None:
    made = Made(ratio=lambda plan: 1000.0 if plan == "bc" else 0.9)
    assert names(search(trials(made), chain(NARROW, WIDE, WIDE)).plan) == "abc"


def test_prefer_size_quantizes_everything() -> None:
    made = Made(ctx=Context(Settings(prefer="size")))
    assert names(search(trials(made), chain(NARROW, WIDE)).plan) == "ab"


# -- the budget


def test_most_sensitive_layer_falls_back() -> None:
    made = Made({"c": 5.0, "b": 0.1})
    found = search(trials(made), chain(*[WIDE] * 8))
    assert names(found.plan) == "abdefgh"
    assert [e.output for e in found.fallbacks] == ["c"]
    assert found.sensitivity is not None
    assert found.sensitivity[entry("c")] == 5.0


class InCompany(Made):
    """Of layers of which one does much harm, but not alone."""

    def noise(self, plan: Plan, samples: int = 8) -> float:
        alone = super().noise(plan, samples)
        return alone + 5.0 * ("c" in names(plan) and len(names(plan)) > 1)


def test_layer_harmful_in_combination_falls_back_alone() -> None:
    made = InCompany({**dict.fromkeys("abdef", 0.08), "c": 0.01, **dict.fromkeys("gh", 0.001)})
    found = search(trials(made), chain(*[WIDE] * 8))
    assert names(found.plan) == "abdefgh"
    assert [entry.output for entry in found.fallbacks] == ["c"]


def test_large_saving_justifies_higher_sensitivity() -> None:
    """Noise is paid for by time: of two that harm alike, the one that saves less goes back."""
    made = Made({"b": 0.6, "f": 0.6})
    times = [WIDE] * 8
    times[1] = (100.0, 10.0)
    found = search(trials(made), chain(*times))
    assert "b" in names(found.plan)
    assert "f" not in names(found.plan)


def test_sensitive_first_layers_form_a_float_prefix() -> None:
    made = Made(dict.fromkeys("ab", 3.0))
    assert names(search(trials(made), chain(*[WIDE] * 8)).plan) == "cdefgh"


def test_noisy_layer_without_saving_falls_back() -> None:
    made = Made({"d": 2.0, "a": 0.5})
    times = [(1000.0, 400.0)] * 8
    times[0] = (10.0, 9.0)
    found = search(trials(made), chain(*times))
    assert names(found.plan) == "bcefgh"


def test_small_part_within_budget_is_kept() -> None:
    """Where all of int8 saves next to no time, not all of it goes back."""
    noises = {**dict.fromkeys("abdefg", 0.01), "c": 5.0, "h": 5.0}
    found = search(trials(Made(noises)), chain(*[(1000.0, 995.0)] * 8))
    assert found.holds
    assert "defg" in names(found.plan)


def test_no_part_within_budget_quantizes_nothing() -> None:
    made = Made(dict.fromkeys("abc", 50.0), budget=0.1)
    found = search(trials(made), chain(WIDE, WIDE, WIDE))
    assert not found.holds
    assert names(found.plan) == ""


def test_plan_within_budget_after_bias_correction_is_chosen() -> None:
    made = Made({"c": 1.4})
    survey = chain(*[WIDE] * 8)
    assert names(search(trials(made), survey, corrected=True).plan) == "abcdefgh"
    assert names(search(trials(made), survey).plan) == "abdefgh"


def test_plan_far_above_budget_is_not_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Correcting takes as long as the search: not for what it cannot bring back."""
    monkeypatch.setattr(Made, "holds_corrected", lambda made, plan: True)
    survey = chain(*[WIDE] * 8)
    assert names(search(trials(Made({"c": 1.4})), survey, corrected=True).plan) == "abcdefgh"
    assert names(search(trials(Made({"c": 1.6})), survey, corrected=True).plan) == "abdefgh"


def test_screened_plan_is_verified_on_all_samples() -> None:
    noises = {letter: 2.0**-place for place, letter in enumerate("abcdefgh")}
    survey = chain(*[WIDE] * 8)
    exact = search(trials(Made(noises, budget=0.3)), survey)
    assert names(exact.plan) == "cdefgh"[1:]
    rosy = search(trials(Made(noises, budget=0.3, seeming=4.0)), survey)
    assert rosy.holds
    assert set(names(rosy.plan)) <= set(names(exact.plan))


def test_few_plans_are_evaluated() -> None:
    """A verdict is the model run on many samples."""
    made = Made(dict.fromkeys("abcdefgh", 1.0), budget=0.5)
    search(trials(made), chain(*[WIDE] * 8))
    assert len(set(made.asked)) < 24


def test_chosen_plan_is_within_budget_as_written() -> None:
    noises = {"c": 0.9, "f": 0.05}
    survey = chain(*[WIDE] * 8)
    assert names(search(trials(Made(noises)), survey).plan) == "abcdefgh"
    assert names(search(trials(Made(noises, written=0.5)), survey).plan) == "abdefgh"


def test_bisection_takes_few_evaluations() -> None:
    letters = "abcdefgh"
    made = Made(dict.fromkeys(letters, 0.3))
    search(trials(made), chain(*[WIDE] * 8))
    assert len(made.asked) < 8 + 20


# -- harm


def test_sensitivity_is_measured_layer_by_layer() -> None:
    made = Made({"a": 0.5, "b": 0.25})
    found = sensitivities(trials(made), chain(WIDE, WIDE).plan)
    assert {e.output: noise for e, noise in found.items()} == {"a": 0.5, "b": 0.25}
    assert made.asked == ["", "a", "b"]


def test_sensitivity_excludes_earlier_noise() -> None:
    """Another pass may have quantized something before."""

    class Noisy(Made):
        def noise(self, plan: Plan, samples: int = 8) -> float:
            return 3.0 + super().noise(plan, samples)

    found = sensitivities(trials(Noisy({"a": 0.5})), chain(WIDE, WIDE).plan)
    assert {e.output: noise for e, noise in found.items()} == {"a": 0.5, "b": 0.0}


def test_combining_operators_share_the_noise_of_their_type() -> None:
    made = Made({"a": 0.5, "b": 0.25, "c": 0.75})
    found = sensitivities(trials(made), chain(WIDE, WIDE, WIDE, ops=" ++").plan)
    assert {e.output: noise for e, noise in found.items()} == {"a": 0.5, "b": 0.5, "c": 0.5}


def test_refused_layer_has_the_highest_sensitivity() -> None:
    made = Made({"a": float("inf")})
    (harm,) = sensitivities(trials(made), chain(WIDE).plan).values()
    assert harm == 1e6


def test_only_keeps_the_given_entries() -> None:
    plan = chain(WIDE, WIDE, WIDE).plan
    assert names(only(plan, [plan.entries[1]])) == "b"


# -- groups

MIXED = Plan(
    (
        entry("a"),
        entry("b", "MatMul", "dynamic"),
        entry("c", "Gather", "dynamic"),
        entry("d", "Add", "float"),
    )
)


def test_groups_by_scheme_and_operator() -> None:
    assert {group.name: len(group.entries) for group in groups_of(MIXED)} == {
        "static layers": 1,
        "dynamic layers": 1,
        "tables": 1,
    }
    assert groups_of(Plan()) == []


@pytest.mark.parametrize(
    ("ratios", "kept"),
    [
        ({"a": 0.5, "b": 0.5, "c": 1.0}, "abc"),
        ({"a": 1.2, "b": 0.5, "c": 1.0}, "bc"),
        ({"a": 0.96, "b": 0.99, "c": 1.01}, "bc"),
        ({"a": 0.94, "b": 1.01, "c": 1.01}, "ac"),
        ({"a": 0.5, "b": 0.5, "c": 1.2}, "ab"),
    ],
)
def test_slow_group_falls_back(ratios: dict[str, float], kept: str) -> None:
    made = Made(ratio=lambda plan: ratios.get(plan, 0.5))
    assert names(keep_what_pays(trials(made), MIXED)) == kept
    assert len(made.ctx.notes) == 3
    assert sum("stay float" in note for note in made.ctx.notes) == 3 - len(kept)


@pytest.mark.parametrize(("whole", "kept"), [(0.4, "abc"), (0.48, "bc")])
def test_static_layers_may_pay_beside_other_groups_only(whole: float, kept: str) -> None:
    """A stem takes 2 % of the time in floats, and a tenth where all the rest is int8."""
    ratios = {"a": 0.98, "bc": 0.5, "abc": whole}
    made = Made(ratio=lambda plan: ratios.get(plan, 0.9))
    assert names(keep_what_pays(trials(made), MIXED)) == kept
    assert f"{0.5 / whole:.2f}x beside the others" in made.ctx.notes[0]


def test_timing_noise_keeps_a_group_that_saves_bytes() -> None:
    static, dynamic, tables = groups_of(MIXED)
    noisy, slower = Timing(1.0, 1.05, 0.98, 1.12, 9), Timing(1.0, 1.2, 1.1, 1.3, 9)
    assert dynamic.pays(noisy)
    assert tables.pays(noisy)
    assert not tables.pays(slower)
    assert not static.pays(Timing(1.0, 0.97, 0.9, 1.02, 9))


def test_group_that_saves_bytes_is_timed_again_before_it_falls_back() -> None:
    once = {"c": iter([1.2, 1.0])}
    made = Made(ratio=lambda plan: next(once[plan]) if plan in once else 0.5)
    assert names(keep_what_pays(trials(made), MIXED)) == "abc"
    assert made.ctx.notes[2] == "tables: 1.00x the speed of floats, and smaller (1 thread)"


def test_speed_of_a_group_is_noted() -> None:
    made = Made(ratio=lambda plan: 0.5)
    keep_what_pays(trials(made), Plan(MIXED.entries[:1]))
    assert made.ctx.notes == ["static layers: 2.00x the speed of floats (1 thread)"]


def test_prefer_size_keeps_all_groups() -> None:
    made = Made(ratio=lambda plan: 2.0, ctx=Context(Settings(prefer="size")))
    assert names(keep_what_pays(trials(made), MIXED)) == "abc"
    assert "0.50x the speed" in made.ctx.notes[0]


def test_nothing_is_timed_without_measure() -> None:
    made = Made()
    assert keep_what_pays(trials(made), MIXED) is MIXED
    assert made.ctx.notes == []


def test_refused_group_falls_back() -> None:
    made = Made(ratio=lambda plan: 1000.0 if plan == "a" else 0.5)
    assert names(keep_what_pays(trials(made), MIXED)) == "bc"


# -- single layers in place of regions


def pointwise(*times: tuple[float, float | None]) -> Problem:
    """Layers A, B, ... that read int8 and give floats, each for itself."""
    made = chain(*times)
    entries = tuple(replace(e, output=e.output.upper()) for e in made.plan.entries)
    return replace(made, plan=Plan(entries), entries=tuple(enumerate(entries)))


def by_case(lower: float, upper: float) -> Callable[[str], float]:
    return lambda plan: lower if plan.islower() else upper


def test_faster_regions_within_budget_are_chosen() -> None:
    made = Made(ratio=by_case(0.4, 0.6))
    assert (
        names(search(trials(made), chain(WIDE, WIDE), pointwise=pointwise(WIDE, WIDE)).plan) == "ab"
    )


def test_faster_pointwise_layers_within_budget_are_chosen() -> None:
    made = Made({"a": 0.1}, ratio=by_case(0.6, 0.4))
    found = search(trials(made), chain(WIDE, WIDE), pointwise=pointwise(WIDE, WIDE))
    assert names(found.plan) == "AB"
    assert not found.fallbacks


def test_pointwise_layers_win_if_remaining_regions_save_less() -> None:
    made = Made({"a": 50.0}, ratio=by_case(0.4, 0.6))
    found = search(trials(made), chain(WIDE, WIDE), pointwise=pointwise(WIDE, WIDE))
    assert names(found.plan) == "AB"


def test_much_faster_regions_are_tried_far_above_budget() -> None:
    made = Made({"a": 50.0}, ratio=by_case(0.4, 0.9))
    found = search(trials(made), chain(WIDE, WIDE), pointwise=pointwise(WIDE, WIDE))
    assert names(found.plan) == "b"


def test_regions_are_tried_if_pointwise_layers_exceed_budget() -> None:
    made = Made({"a": 50.0, "A": 50.0, "B": 50.0}, ratio=by_case(0.4, 0.6))
    found = search(trials(made), chain(WIDE, WIDE), pointwise=pointwise(WIDE, WIDE))
    assert names(found.plan) == "b"


def test_nothing_is_quantized_if_neither_is_within_budget() -> None:
    made = Made(dict.fromkeys("abAB", 50.0), ratio=by_case(0.4, 0.6))
    found = search(trials(made), chain(WIDE, WIDE), pointwise=pointwise(WIDE, WIDE))
    assert not found.holds
    assert not found.plan.quantized()


def test_sensitive_pointwise_layers_fall_back_to_float() -> None:
    made = Made({"a": 50.0, "A": 50.0}, ratio=by_case(0.6, 0.4))
    found = search(trials(made), chain(WIDE, WIDE), pointwise=pointwise(WIDE, WIDE))
    assert names(found.plan) == "B"
    assert [e.output for e in found.fallbacks] == ["A"]


def test_estimated_savings_decide_without_timing() -> None:
    slow, fast = (10.0, 8.0), (10.0, 2.0)
    made = Made()
    assert (
        names(search(trials(made), chain(slow, slow), pointwise=pointwise(fast, fast)).plan) == "AB"
    )
    assert (
        names(search(trials(made), chain(fast, fast), pointwise=pointwise(slow, slow)).plan) == "ab"
    )


# -- dynamic layers alone


def test_only_sensitive_dynamic_layers_fall_back() -> None:
    made = Made({"a": 0.1, "b": 5.0, "c": 0.1})
    assert names(search(trials(made), loose(1.0, 1.0, 1.0)).plan) == "ac"


def test_independent_layers_fall_back_one_by_one() -> None:
    """However close to each other they are."""
    made = Made({"a": 0.30, "b": 0.31, "c": 0.32, "d": 0.33})
    assert names(search(trials(made), loose(1.0, 1.0, 1.0, 1.0)).plan) == "abc"


def test_insensitive_layer_remains_if_all_others_fall_back() -> None:
    made = Made({"a": 5.0, "c": 6.0, "d": 7.0})
    assert names(search(trials(made), loose(1.0, 1.0, 1.0, 1.0)).plan) == "b"


def test_of_equal_sensitivity_the_smaller_saving_falls_back() -> None:
    made = Made(dict.fromkeys("abc", 0.4))
    assert names(search(trials(made), loose(3.0, 1.0, 2.0)).plan) == "ac"


def test_grouped_entries_add_their_sensitivities() -> None:
    """What two harm is the sum, and with one of them in floats nothing is saved."""
    both = tuple(entry(letter, "MatMul", "weight-only") for letter in "ab")
    alone = entry("c", "MatMul", "weight-only")
    problem = Problem(
        Plan((*both, alone)),
        (),
        (),
        (),
        (IndependentGroup(both, 1.0), IndependentGroup((alone,), 1.0)),
    )
    made = Made({"a": 0.3, "b": 0.4, "c": 0.6})
    assert names(search(trials(made), problem).plan) == "c"
    assert problem.time(problem.plan.turned([both[0]])) == 1.0
