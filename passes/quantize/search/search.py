"""Search for the fastest plan within the error budget.

1. Candidates: the best regions by the cost table, everything in int8, and independent pointwise
   convolutions. One paired measurement times them against the float model; where nothing is timed,
   the cost table compares them.
2. If the fastest one is within the budget, possibly with corrected biases, it is the plan.
3. Otherwise layers fall back to float. They are ordered by saving over sensitivity, a bisection
   finds how many of them the budget admits, and a run on all samples verifies the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.quantize.search.candidate_eval import Trials
from passes.quantize.search.layer_sensitivity import sensitivities
from passes.quantize.search.problem import Problem
from toolkit.quantization.plan import Entry, Plan
from toolkit.runtime.latency import Effort

_EFFORT = Effort(seconds=1.5, least=5, most=15)
_AS_FAST = 1.01
"""Ratio of times within which two candidates count as equally fast."""
_REFUSED = float("-inf")
"""The saving of a candidate that the runtime refuses."""
_LEAST_PRICE, _STEP, _STEPS = 1 / 64, 2**0.25, 112
"""The prices of noise that rank layers: the first one, in the time of the whole plan per noise of
the whole plan; the factor between two of them; and their number."""
_CORRECTABLE = 1.5
"""Multiple of the error budget up to which bias correction can bring a plan back within it."""
_ROUNDS = 3
"""Bisections at most, each past the layer at which the one before ended."""
_WORTHWHILE = 1.02
"""Ratio of times from which another bisection is worth its runs."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan, the entries that fall back to float for the budget, and the noise of each entry.

    Where no part is within the budget, `plan` quantizes nothing and `tried` is the first attempt.
    """

    plan: Plan
    fallbacks: tuple[Entry, ...] = ()
    sensitivity: Mapping[Entry, float] | None = None
    tried: Plan | None = None

    @property
    def holds(self) -> bool:
        return self.tried is None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A plan, the problem it solves, and the share of the float time that it saves."""

    problem: Problem
    plan: Plan
    saving: float = 0.0

    def saving_of(self, part: Plan) -> float:
        """Estimate the saving of a part of the plan by the cost table."""
        whole = self.problem.saving(self.plan)
        return self.saving * self.problem.saving(part) / whole if whole > 0 else 0.0


def search(
    trials: Trials, problem: Problem, corrected: bool = False, pointwise: Problem | None = None
) -> Found:
    """Return the fastest plan within the budget; one that quantizes nothing when there is none.

    `corrected`: biases will be corrected, and a plan may rely on it. `pointwise`: the same
    model with independent pointwise convolutions instead of int8 regions.
    """
    if not trials.ctx.target.has_costs or trials.ctx.settings.prefer != "speed":
        return within_budget(trials, problem, problem.plan, corrected)
    candidates = _by_saving(trials, problem, pointwise)
    best, most = None, 0.0
    for candidate in candidates:
        if _holds(trials, candidate.plan, corrected):
            best, most = Found(candidate.plan), candidate.saving
            break
    for candidate in candidates:
        if best is not None and candidate.saving <= most:
            break
        found = _with_fallbacks(trials, candidate.problem, candidate.plan)
        saving = candidate.saving_of(found.plan)
        if best is None or not best.holds or (found.holds and saving > most):
            best, most = found, saving if found.holds else most
    assert best is not None
    return best


def likely(trials: Trials, problem: Problem, pointwise: Problem | None) -> Plan:
    """Return the plan to choose ranges with: regions, or pointwise layers if those collapse."""
    regions = problem.best()
    return regions if pointwise is None or trials.holds(regions, 4.0) else pointwise.best()


def within_budget(trials: Trials, problem: Problem, plan: Plan, corrected: bool = False) -> Found:
    """Return the plan if it is within the budget, else the part of it that is."""
    if _holds(trials, plan, corrected):
        return Found(plan)
    return _with_fallbacks(trials, problem, plan)


def _holds(trials: Trials, plan: Plan, corrected: bool) -> bool:
    if not plan.quantized() or (trials.holds(plan) and trials.is_proven(plan)):
        return True
    if not corrected or not trials.holds(plan, _CORRECTABLE):
        return False
    trials.ctx.progress("correcting biases", 0.0)
    return trials.holds_corrected(plan)


# -- candidates


def _by_saving(trials: Trials, problem: Problem, pointwise: Problem | None) -> list[_Candidate]:
    """Return the fastest candidate of each problem, the fastest first."""
    groups = [[problem.best(), problem.plan] if problem.entries else [problem.best()]]
    problems = [problem]
    if pointwise is not None:
        problems.append(pointwise)
        groups.append([pointwise.best()])
    groups = [_distinct(plans) for plans in groups]
    savings = _savings(trials, problems, groups)
    found = [
        _Candidate(each, *_fastest(trials, plans, saved))
        for each, plans, saved in zip(problems, groups, savings, strict=True)
    ]
    return sorted(found, key=lambda candidate: -candidate.saving)


def _distinct(plans: Sequence[Plan]) -> list[Plan]:
    return list({frozenset(e.key for e in p.quantized()): p for p in reversed(plans)}.values())


def _fastest(trials: Trials, plans: Sequence[Plan], savings: Sequence[float]) -> tuple[Plan, float]:
    """Return the fastest plan and its saving; of equally fast plans the one with least noise."""
    if len(plans) == 1:
        return plans[0], savings[0]
    least = 1 - max(savings)
    near = [p for p, s in zip(plans, savings, strict=True) if 1 - s <= least * _AS_FAST]
    plan = near[0] if len(near) == 1 else min(near, key=trials.noise)
    return plan, savings[list(plans).index(plan)]


def _savings(
    trials: Trials, problems: Sequence[Problem], groups: Sequence[Sequence[Plan]]
) -> list[list[float]]:
    """Return the share of the float time that each plan saves: measured, or by the cost table."""
    if sum(map(len, groups)) == 1:
        return [[1.0]]
    if not trials.timed:
        return [
            [each.saving(plan) / (each.time_in_float() or 1.0) for plan in plans]
            for each, plans in zip(problems, groups, strict=True)
        ]
    trials.ctx.progress("timing plans", 0.0)
    named = {f"{at} {i}": p for at, plans in enumerate(groups) for i, p in enumerate(plans)}
    timings = trials.times(named, _EFFORT)
    saved = {n: 1 - timings[n].ratio if n in timings else _REFUSED for n in named}
    return [[saved[f"{at} {i}"] for i in range(len(plans))] for at, plans in enumerate(groups)]


# -- the budget


def _with_fallbacks(trials: Trials, problem: Problem, start: Plan) -> Found:
    """Return the part of a plan that is within the budget, with the other layers in float."""
    sensitivity = sensitivities(trials, start)
    plan = _largest_within_budget(trials, problem, _ordered(problem, sensitivity))
    if plan is None:
        nothing = start.turned(start.quantized(), reason="exceeds the error budget")
        return Found(nothing, start.quantized(), sensitivity, tried=start)
    kept = {entry.key for entry in plan.quantized()}
    fallbacks = tuple(entry for entry in start.quantized() if entry.key not in kept)
    return Found(plan, fallbacks, sensitivity)


def _ordered(problem: Problem, sensitivity: Mapping[Entry, float]) -> list[Entry]:
    """Return the entries by saving over sensitivity, the highest first.

    The saving of a layer within a region depends on its neighbours. So an entry ranks by the
    highest price of noise at which the best plan still has it in int8; regions that turn float at
    one price, by the sensitivity of their entries.
    """
    noise = sum(sensitivity.values()) or 1.0
    unit = (problem.time(problem.plan) or problem.time_in_float()) / noise * _LEAST_PRICE
    rank = dict.fromkeys(sensitivity, -1)

    def at(step: int) -> frozenset[str]:
        if step < 0:
            plan = problem.best(dict.fromkeys(sensitivity, 0.0))
        else:
            plan = problem.best(sensitivity, unit * _STEP**step)
        return frozenset(entry.key for entry in plan.quantized())

    def rank_between(low: int, high: int, kept: frozenset[str], left: frozenset[str]) -> None:
        """Rank what is in int8 at the price of step `low` and in float at that of `high`."""
        turned = kept - left
        if high - low == 1 or not turned:
            rank.update((entry, low) for entry in rank if entry.key in turned)
            return
        middle = (low + high) // 2
        between = at(middle)
        rank_between(low, middle, kept, between)
        rank_between(middle, high, between, left)

    last = at(_STEPS)
    rank_between(-1, _STEPS, at(-1), last)
    rank.update((entry, _STEPS) for entry in rank if entry.key in last)
    return sorted(rank, key=lambda entry: (-rank[entry], sensitivity[entry]))


def _largest_within_budget(trials: Trials, problem: Problem, order: Sequence[Entry]) -> Plan | None:
    """Return the best plan of as many entries of the order as the budget admits, None without any.

    A bisection ends at an entry with which the budget does not hold. That entry may be harmful in
    company only, and late entries harmless: the search goes on behind it while there is time to
    save.
    """
    allowed: list[Entry] = []
    rest = list(order)
    for turn in range(_ROUNDS):
        count = _count_within_budget(trials, problem, allowed, rest, turn)
        allowed += rest[:count]
        rest = rest[count + 1 :]
        now, then = (problem.time(_best_of(problem, part)) for part in (allowed, allowed + rest))
        if not rest or now < then * _WORTHWHILE:
            break
    stride = 1
    while allowed:
        plan = _best_of(problem, allowed)
        if not plan.quantized():
            return None
        if trials.holds(plan) and trials.is_proven(plan):
            return plan
        allowed, stride = allowed[:-stride], 2 * stride
    return None


def _count_within_budget(
    trials: Trials, problem: Problem, allowed: list[Entry], rest: list[Entry], turn: int
) -> int:
    """Return how many entries of `rest` the budget seems to admit besides those allowed."""
    low, high = 0, len(rest) + 1
    while high - low > 1:
        middle = (low + high) // 2
        done = 1 - (high - low) / (len(rest) + 1)
        trials.ctx.progress("choosing layers that fall back to float", (turn + done) / _ROUNDS)
        plan = _best_of(problem, allowed + rest[:middle])
        if not plan.quantized() or trials.seems_to_hold(plan):
            low = middle
        else:
            high = middle
    return low


def _best_of(problem: Problem, entries: Sequence[Entry]) -> Plan:
    return problem.best(dict.fromkeys(entries, 0.0))
