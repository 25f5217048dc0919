"""Groups of layers that were quantized the same way: each has to pay, on this machine.

A group is timed alone, in turns with the floats. One that does not pay goes back to floats, unless
a smaller model is what is asked for. Static layers have to be faster: than the floats, or, where
others are quantized too, than the model without them, whose time they are a larger part of. A few
dynamic ones hardly show in a large model's time, and they and tables are there for their size too:
they must not cost time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from passes.quantize.search.candidate_eval import Trials
from passes.quantize.search.layer_sensitivity import only
from toolkit.pass_manager.result import ModelStats
from toolkit.quantization.plan import Entry, Plan
from toolkit.runtime.latency import Effort, Timing

_EFFORT = Effort(seconds=3.0, least=5, most=100, against=1.0)
_CAREFUL = Effort(seconds=6.0, least=15, most=100, against=1.0)
"""Once more, before a busy machine makes a model three times as large again."""
_PAYS, _EVEN, _FREE = 0.95, 1.005, 1.03
"""Of the time of the floats: what static layers, dynamic layers and tables must stay below. Static
ones cost the accuracy: a voice-activity model lost 0.6 points of its decisions for 3 % of time."""
_SURE_TO_SHRINK = 1 << 22
"""Bytes of a model from which on its weights are what counts."""


@dataclass(frozen=True, slots=True)
class Group:
    """Entries of one kind, and the most of the floats' time that the model may take with them."""

    name: str
    entries: tuple[Entry, ...]
    limit: float

    def pays(self, timing: Timing) -> bool:
        """What has to pay must be seen to; what makes the model smaller must not be seen to cost:
        noise of a few percent does not make it three times as large again."""
        seen = timing.ratio if self.limit < 1 else timing.low
        return seen < self.limit


def groups_of(plan: Plan) -> list[Group]:
    """The groups that a plan has."""
    dynamic = [e for e in plan.of_scheme("dynamic") if e.op != "Gather"]
    tables = [e for e in plan.of_scheme("dynamic") if e.op == "Gather"]
    found = (
        Group("static layers", plan.of_scheme("static"), _PAYS),
        Group("dynamic layers", tuple(dynamic), _EVEN),
        Group("tables", tuple(tables), _FREE),
    )
    return [group for group in found if group.entries]


def keep_what_pays(trials: Trials, plan: Plan) -> Plan:
    """The plan without the groups that do not pay; notes say what was measured."""
    groups = groups_of(plan)
    if not groups or not trials.timed:
        return plan
    trials.ctx.progress("timing groups of layers", 0.0)
    contenders = {group.name: only(plan, group.entries) for group in groups}
    if len(groups) > 1:
        contenders["all"] = plan
        static = [entry for group in groups if group.limit < 1 for entry in group.entries]
        if static:
            contenders["rest"] = plan.turned(static)
    timings = trials.times(contenders, _EFFORT)
    for group in groups:
        timing = timings.get(group.name)
        if timing is None:
            plan = plan.turned(group.entries, reason="the runtime refuses it in int8")
            continue
        if group.limit >= 1 and not group.pays(timing) and trials.ctx.settings.prefer == "speed":
            timing = trials.times({group.name: contenders[group.name]}, _CAREFUL)[group.name]
        said = f"{group.name}: {1 / timing.ratio:.2f}x the speed of floats"
        company = _in_company(timings) if group.limit < 1 else timing.ratio
        if company < timing.ratio:
            said += f", {1 / company:.2f}x beside the others"
        if group.pays(timing) or company < group.limit or trials.ctx.settings.prefer == "size":
            smaller = ", and smaller" if timing.ratio >= 1 else ""
            trials.ctx.note(f"{said}{smaller} ({_threads(trials)})")
            continue
        why = "they do not pay" if group.limit < 1 else "they are slower"
        plan = plan.turned(group.entries, reason=f"{1 / timing.ratio:.2f}x the speed of floats")
        trials.ctx.note(f"{said}: {why} and stay float; --prefer size keeps them in int8")
    return plan


def keep_what_shrinks(trials: Trials, plan: Plan) -> Plan:
    """The plan without the groups that make the file larger: of few weights int8 saves less than
    scales, zero points and the nodes around take."""
    before = ModelStats.of(trials.model).bytes
    if before > _SURE_TO_SHRINK:
        return plan
    for group in groups_of(plan):
        after = ModelStats.of(trials.draft(only(plan, group.entries))).bytes
        if after >= before:
            plan = plan.turned(group.entries, reason="larger in int8")
            trials.ctx.note(f"{group.name} stay float: in int8 {after - before} bytes are added")
    return plan


def _in_company(timings: Mapping[str, Timing]) -> float:
    """The time with static layers, of that without them but with all the others."""
    whole, rest = timings.get("all"), timings.get("rest")
    return math.inf if whole is None or rest is None else whole.ratio / rest.ratio


def _threads(trials: Trials) -> str:
    return f"{trials.threads} thread{'s' if trials.threads != 1 else ''}"
