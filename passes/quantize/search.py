"""The plan for a model: the fastest one that keeps the budget.

1. Candidates come from the table of costs: the best regions, with dearer and cheaper conversions, a
   float prefix, and everything. They are timed in turns with the floats, or else compared by the
   table. Of those that are about as fast as the fastest, the one with the least noise is taken.
2. Where the judge does not let it pass, nor with corrected biases, the model's beginning goes back
   to floats, in steps, and then, apart from that, what is harmful for what it saves: each layer's
   noise is measured with that layer alone in int8, and the price of noise is raised until the
   budget holds, then lowered as far as it still does. What costs next to no time is taken back on
   top of that.
3. Of what holds, the faster one is the plan. If nothing does, nothing is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.quantize.harm import harms
from passes.quantize.plan import Entry, Plan
from passes.quantize.survey import Survey
from passes.quantize.trials import Trials
from toolkit.bench import Effort

_AS_FAST = 1.01
_NEXT_TO_NONE = 1.02
_REFUSED = float("inf")
_EFFORT = Effort(seconds=4.0, least=5, most=60)
_PREFIXES = (0.15, 0.3, 0.45, 0.6, 0.75)
_RAISES, _LOWERS = 14, 5
"""How often the price of noise is raised fourfold, and how often halved in between at most."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan; what was returned to floats for the sake of the budget, and each one's noise."""

    plan: Plan
    returned: tuple[Entry, ...] = ()
    harm: Mapping[Entry, float] | None = None
    holds: bool = True


def search(trials: Trials, survey: Survey, corrected: bool = False) -> Found:
    """The fastest plan that keeps the budget; one without int8 when none does.

    `corrected`: biases will be corrected, and what holds by that holds.
    """
    by_speed = trials.ctx.target == "ort-cpu" and trials.ctx.prefer == "speed"
    plan = _fastest(trials, candidates(survey), survey) if by_speed else survey.plan
    if not plan.quantized() or trials.holds(plan):
        return Found(plan)
    trials.ctx.tell("correcting biases", 0.0)
    if corrected and trials.holds_corrected(plan):
        return Found(plan)
    return _affordable(trials, survey, plan)


def candidates(survey: Survey) -> dict[str, Plan]:
    """Plans that may be the fastest, by what they are; each once."""
    plans = {"best": survey.best()}
    if survey.entries:
        plans["cheap"] = survey.best(crossing=0.5)
        plans["dear"] = survey.best(crossing=2.0)
        plans["all"] = survey.plan
        starts = survey.starts()
        plans["prefix"] = survey.best(prefix=_after(starts, 0.08))
    seen: dict[frozenset[str], str] = {}
    for name, plan in plans.items():
        seen.setdefault(frozenset(e.output or e.node for e in plan.quantized()), name)
    return {name: plans[name] for name in seen.values()}


def _fastest(trials: Trials, plans: Mapping[str, Plan], survey: Survey) -> Plan:
    """The fastest; of those that are about as fast, the one with the least noise."""
    if len(plans) == 1:
        return next(iter(plans.values()))
    times = _times(trials, plans, survey)
    least = min(times.values())
    near = [plans[name] for name, time in times.items() if time <= least * _AS_FAST]
    if len(near) == 1:
        return near[0]
    return min(near, key=trials.noise)


def _times(trials: Trials, plans: Mapping[str, Plan], survey: Survey) -> dict[str, float]:
    """How long plans take beside each other: measured, or by the table."""
    if not trials.timed:
        return {name: survey.time(plan) for name, plan in plans.items()}
    trials.ctx.tell("timing plans", 0.0)
    timings = trials.times(plans, _EFFORT)
    return {name: timings[name].ratio if name in timings else _REFUSED for name in plans}


def _affordable(trials: Trials, survey: Survey, start: Plan) -> Found:
    """The fastest plan that holds, of those with a float prefix and those without the harmful."""
    held: dict[str, Plan] = {}
    prefix = _prefixed(trials, survey)
    if prefix is not None:
        held["prefix"] = prefix
    harm = harms(trials, start)
    chosen = _without_harmful(trials, survey, harm)
    if chosen is not None:
        held["harmless"] = chosen
    if not held:
        nothing = start.turned(start.quantized(), reason="the budget does not hold with int8")
        return Found(nothing, start.quantized(), harm, holds=False)
    times = _times(trials, held, survey) if len(held) > 1 else dict.fromkeys(held, 0.0)
    plan = held[min(times, key=lambda name: times[name])]
    kept = {entry.output or entry.node for entry in plan.quantized()}
    returned = [e for e in start.quantized() if (e.output or e.node) not in kept]
    return Found(plan, tuple(returned), harm)


def _prefixed(trials: Trials, survey: Survey) -> Plan | None:
    """The shortest float prefix with which the budget holds."""
    starts = survey.starts()
    if not starts:
        return None
    for share in _PREFIXES:
        plan = survey.best(prefix=_after(starts, share))
        if not plan.quantized():
            return None
        trials.ctx.tell("moving the first int8 layer", share)
        if trials.holds(plan):
            return plan
    return None


def _without_harmful(trials: Trials, survey: Survey, harm: Mapping[Entry, float]) -> Plan | None:
    """The plan at about the lowest price of noise with which the budget holds."""
    total = sum(harm.values())
    if not total:
        return None
    price = survey.time(survey.plan) / total / 64
    low, held = 0.0, None
    for step in range(_RAISES):
        plan = survey.best(harm, price)
        trials.ctx.tell("returning what harms to floats", step / _RAISES)
        if not plan.quantized():
            return None
        if trials.holds(plan):
            held = plan
            break
        low, price = price, price * 4
    if held is None:
        return None
    for step in range(_LOWERS):
        middle = (low * price) ** 0.5 if low else price / 4
        plan = survey.best(harm, middle)
        trials.ctx.tell("returning what harms to floats", step / _LOWERS)
        if trials.holds(plan):
            held, price = plan, middle
        else:
            low = middle
    most = survey.time(held) * _NEXT_TO_NONE
    for step in range(1, _RAISES):
        plan = survey.best(harm, price * 2**step)
        if survey.time(plan) > most or not plan.quantized():
            break
        held = plan if trials.holds(plan) else held
    return held


def _after(starts: list[int], share: float) -> int:
    """The item at which the part behind this share of the products begins."""
    return starts[min(len(starts) - 1, round(share * len(starts)))] if starts else 0
