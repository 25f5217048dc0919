"""The plan for a model: the fastest one that keeps the budget.

1. Candidates come from the table of costs: the best regions, with dearer and cheaper conversions, a
   float prefix, and single layers that read int8 and give floats. Beside them are everything, and
   everything behind the first few layers: in a network kernels take longer than alone, the float
   ones above all. They are timed in turns with the floats, or else compared by the table. Of those
   that are about as fast as the fastest, the one with the least noise is taken.
2. Where the judge does not let it pass, nor with corrected biases, layers go back to floats. Of
   regions: the model's beginning, in steps. Of regions and single layers: what is harmful for what
   it saves. Each layer's noise is measured with that layer alone in int8, and the lowest price of
   noise is looked for with which the budget holds. What costs next to no time is taken back on top
   of that; where much of the budget is left, parts of what went back are put into int8 again.
   Regions that are far from the budget are given up where single layers hold.
3. Of what holds, the fastest one is the plan. If nothing does, nothing is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from passes.quantize.search.candidate_eval import Trials
from passes.quantize.search.layer_sensitivity import harms
from passes.quantize.search.problem import Survey
from toolkit.quantization.plan import Entry, Plan
from toolkit.runtime.latency import Effort

_AS_FAST = 1.01
_NEXT_TO_NONE = 1.02
_REFUSED = float("inf")
_EFFORT = Effort(seconds=4.0, least=3, most=60)
_CUTS, _MOST_CUT = (1, 2, 3, 4, 6, 9, 13, 19), 0.4
"""Products behind which all may be int8, and the share of all products that stay float at most."""
_PREFIXES = (0.15, 0.3, 0.45, 0.6, 0.75)
_LEAST_PRICE, _STEP, _STEPS = 1 / 64, 2**0.25, 112
"""Of noise, in the time of all for the noise of all; the factor by which it is raised, and how
often at most. Whole regions turn at once: larger steps would miss what is in between."""
_LEAST_HARM, _NEXT = 2.0**-20, 1e-6
"""Of what shows none on a few samples: a share of all harm, and the difference to the next."""
_PUT_BACK, _MUCH_LEFT, _ROOM = 10, 0.6, 0.9
"""How many parts are put back into int8 to see; the share of the budget in use below which that is
done, and up to which."""
_CORRECTABLE, _FAR = 1.5, 4.0
"""How many times the budget a plan may use that corrected biases can bring back; and one of which
the harmful layers can be returned without losing what makes it fast."""
_MUCH = 2.0
"""Regions that save so many times as much as single layers are looked into however far they are
from the budget: a part of them may still be faster."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan; what was returned to floats for the sake of the budget, and each one's noise.

    Where nothing holds, the plan has no int8, and `tried` is what it was before.
    """

    plan: Plan
    returned: tuple[Entry, ...] = ()
    harm: Mapping[Entry, float] | None = None
    tried: Plan | None = None

    @property
    def holds(self) -> bool:
        return self.tried is None


def search(
    trials: Trials, survey: Survey, corrected: bool = False, single: Survey | None = None
) -> Found:
    """The fastest plan that keeps the budget; one without int8 when none does.

    `corrected`: biases will be corrected, and what holds by that holds. `single`: the same model
    with single layers in int8 in place of regions.
    """
    if trials.ctx.target != "ort-cpu" or trials.ctx.prefer != "speed":
        return kept(trials, survey, survey.plan, corrected)
    regions = _fastest(trials, candidates(survey), survey)
    if single is None:
        return kept(trials, survey, regions, corrected)
    both = [(survey, regions), (single, single.best())]
    saved = _savings(trials, both)
    first = regions if saved[0] >= saved[1] else both[1][1]
    if _holds(trials, first, corrected):
        return Found(first)
    found = [kept(trials, *both[1], corrected)]
    if not found[0].holds or saved[0] > _MUCH * saved[1] or trials.holds(regions, _FAR):
        found.append(kept(trials, *both[0], corrected))
    held = [each for each in found if each.holds]
    if len(held) < 2:
        return held[0] if held else found[-1]
    saved = _savings(trials, [(single, held[0].plan), (survey, held[1].plan)])
    return held[0] if saved[0] >= saved[1] else held[1]


def likely(trials: Trials, survey: Survey, single: Survey | None) -> Plan:
    """The plan to try ranges on: the best regions, or single layers where those are far off."""
    regions = survey.best()
    return regions if single is None or trials.holds(regions, _FAR) else single.best()


def _savings(trials: Trials, plans: Sequence[tuple[Survey, Plan]]) -> list[float]:
    """What each saves: measured, as a share of the floats' time, or by its survey."""
    if not trials.timed:
        return [survey.saving(plan) for survey, plan in plans]
    trials.ctx.tell("timing plans", 0.0)
    timings = trials.times({str(at): plan for at, (_, plan) in enumerate(plans)}, _EFFORT)
    return [
        1 - timings[str(at)].ratio if str(at) in timings else -_REFUSED for at in range(len(plans))
    ]


def kept(trials: Trials, survey: Survey, plan: Plan, corrected: bool = False) -> Found:
    """The plan if it keeps the budget, or what is left of it when it does."""
    return Found(plan) if _holds(trials, plan, corrected) else _affordable(trials, survey, plan)


def _holds(trials: Trials, plan: Plan, corrected: bool) -> bool:
    if not plan.quantized() or (trials.holds(plan) and trials.is_proven(plan)):
        return True
    if not corrected or not trials.holds(plan, _CORRECTABLE):
        return False
    trials.ctx.tell("correcting biases", 0.0)
    return trials.holds_corrected(plan)


def candidates(survey: Survey) -> dict[str, Plan]:
    """Plans that may be the fastest, by what they are; each once."""
    plans = {"best": survey.best()}
    if survey.entries:
        plans["cheap"] = survey.best(crossing=0.5)
        plans["dear"] = survey.best(crossing=2.0)
        plans["all"] = survey.plan
        starts = survey.starts()
        plans["prefix"] = survey.best(prefix=_after(starts, 0.08))
        for cut in _CUTS:
            if cut < _MOST_CUT * len(starts):
                plans[f"from {cut}"] = survey.all_behind(starts[cut])
    seen: dict[frozenset[str], str] = {}
    for name, plan in plans.items():
        seen.setdefault(frozenset(entry.key for entry in plan.quantized()), name)
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
    if not trials.timed or not survey.in_time:
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
    chosen = _without_harmful(trials, survey, _in_order(harm))
    if chosen is not None:
        held["harmless"] = chosen
    if not held:
        nothing = start.turned(start.quantized(), reason="the budget does not hold with it")
        return Found(nothing, start.quantized(), harm, tried=start)
    times = _times(trials, held, survey) if len(held) > 1 else dict.fromkeys(held, 0.0)
    plan = held[min(times, key=lambda name: times[name])]
    kept = {entry.key for entry in plan.quantized()}
    returned = [entry for entry in start.quantized() if entry.key not in kept]
    return Found(plan, tuple(returned), harm)


def _prefixed(trials: Trials, survey: Survey) -> Plan | None:
    """The plan with the shortest float prefix with which the budget holds."""
    starts = survey.starts()
    if not starts:
        return None
    plans = [survey.best(prefix=_after(starts, share)) for share in _PREFIXES]
    first = _bisected(trials, "moving the first int8 layer", len(plans), plans.__getitem__)
    return _first_that_holds(trials, plans[first:])


def _without_harmful(trials: Trials, survey: Survey, harm: Mapping[Entry, float]) -> Plan | None:
    """The plan at about the lowest price of noise with which the budget holds."""
    prices = _prices(survey, harm)
    last = len(prices) - 1

    @cache
    def at(step: int) -> Plan:
        return survey.best(harm, prices[step])

    first = _bisected(trials, "returning what harms to floats", last, at)
    most = survey.time(at(first)) * _NEXT_TO_NONE
    free = first
    while survey.in_time and free < last and at(free + 1).quantized():
        if survey.time(at(free + 1)) > most:
            break
        free += 1
    plan = _first_that_holds(trials, map(at, _climbed(free, first, last)))
    if plan is None or trials.used(plan) > _MUCH_LEFT:
        return plan
    return _put_back(trials, survey, plan, harm)


def _in_order(harm: Mapping[Entry, float]) -> dict[Entry, float]:
    """The harm of each; what did none alone is the last to go back, one after the other."""
    least = _LEAST_HARM * sum(harm.values()) or 1.0
    return {e: max(each, least * (1 + at * _NEXT)) for at, (e, each) in enumerate(harm.items())}


def _prices(survey: Survey, harm: Mapping[Entry, float]) -> list[float]:
    """Rising prices of noise, at each of which more goes back, in the end everything."""
    if not survey.entries:  # nothing but loose ones, which go back one after the other
        return survey.loose_prices(harm)
    in_floats = survey.time(survey.plan.turned(survey.plan.quantized()))
    unit = (survey.time(survey.plan) or in_floats) / sum(harm.values()) * _LEAST_PRICE
    return [unit * _STEP**step for step in range(_STEPS + 1)]


def _put_back(trials: Trials, survey: Survey, plan: Plan, harm: Mapping[Entry, float]) -> Plan:
    """A plan that leaves much of the budget, with what else may be int8.

    A layer may harm more in company than alone, and others have gone back in its place: parts of
    what went back are tried, the least harmful first, and those that do not hold in halves.
    """
    kept = {entry.key for entry in plan.quantized()}
    allowed = {entry for entry in harm if entry.key in kept}
    found = [plan]
    parts = [sorted((e for e in harm if e not in allowed), key=lambda entry: harm[entry])]
    tries = _PUT_BACK
    while parts and tries:
        part = parts.pop()
        tried = survey.best(dict.fromkeys(allowed.union(part), 0.0))
        if survey.time(tried) >= survey.time(found[-1]) / _NEXT_TO_NONE:
            continue
        trials.ctx.tell("putting layers back into int8", 1 - tries / _PUT_BACK)
        tries -= 1
        if trials.seems_to_hold(tried):
            allowed.update(part)
            found.append(tried)
        elif len(part) > 1:
            middle = len(part) // 2
            parts += [part[middle:], part[:middle]]
    while len(found) > 1 and (trials.used(found[-1]) > _ROOM or not trials.is_proven(found[-1])):
        found.pop()
    return found[-1]


def _bisected(trials: Trials, doing: str, count: int, at: Callable[[int], Plan]) -> int:
    """The first of so many plans that seems to hold, each with less noise than the one before."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        trials.ctx.tell(doing, 1 - (high - low) / (count + 1))
        plan = at(middle)
        if not plan.quantized() or trials.seems_to_hold(plan):
            high = middle
        else:
            low = middle
    return high


def _first_that_holds(trials: Trials, plans: Iterable[Plan]) -> Plan | None:
    """The first that holds on all samples, and as written; None where that has nothing in int8."""
    for plan in plans:
        if not plan.quantized():
            return None
        if trials.holds(plan) and trials.is_proven(plan):
            return plan
    return None


def _climbed(free: int, high: int, end: int) -> Iterator[int]:
    """What costs nothing first, then the price at which it seems to hold, and dearer ones, in steps
    that double: each is asked for on all samples."""
    yield free
    stride = 1
    while high < end:
        yield high
        high, stride = high + stride, 2 * stride
    yield end


def _after(starts: list[int], share: float) -> int:
    """The item at which the part behind this share of the products begins."""
    return starts[min(len(starts) - 1, round(share * len(starts)))] if starts else 0
