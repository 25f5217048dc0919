"""Groups of layers that are quantized the same way: each has to be faster on this machine.

A group is timed alone, in turns with the float model. One that is slower falls back to float,
unless the user prefers size. Static layers cost accuracy, so they must be clearly faster: than the
float model, or, where other groups are quantized too, than the model without them, of whose time
they are a larger part. Dynamic layers and tables also save bytes, and a few of them hardly show in
the time of a large model, so they must only not be slower.
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

_EFFORT = Effort(seconds=1.5, least=5, most=20, against=1.0)
_CAREFUL = Effort(seconds=6.0, least=21, most=100, against=1.0)
"""A second timing, before noise of a busy machine makes the model three times as large again."""
_PAYS, _EVEN, _FREE = 0.95, 1.005, 1.03
"""Upper limits of the time relative to float for static layers, dynamic layers and tables. At 3 %
less time, the static layers of a voice-activity model changed 0.6 % of its decisions."""
_WEIGHTS_DOMINATE = 1 << 22
"""Above this size in bytes, weights dominate the file, and int8 makes it smaller."""


@dataclass(frozen=True, slots=True)
class TimedGroup:
    """Entries of one kind, and the upper limit of the model's time with them, relative to float."""

    name: str
    entries: tuple[Entry, ...]
    limit: float

    def pays(self, timing: Timing) -> bool:
        """Return whether the time is below the limit, beyond noise if the group saves no bytes."""
        return (timing.ratio if self.limit < 1 else timing.low) < self.limit


def groups_of(plan: Plan) -> list[TimedGroup]:
    """Return the groups of a plan that have entries."""
    dynamic = plan.of_scheme("dynamic")
    found = (
        TimedGroup("static layers", plan.of_scheme("static"), _PAYS),
        TimedGroup("dynamic layers", tuple(e for e in dynamic if e.op != "Gather"), _EVEN),
        TimedGroup("tables", tuple(e for e in dynamic if e.op == "Gather"), _FREE),
    )
    return [group for group in found if group.entries]


def keep_what_pays(trials: Trials, plan: Plan) -> Plan:
    """Return the plan without groups that are not faster, and note the measurements."""
    groups = groups_of(plan)
    if not groups or not trials.timed:
        return plan
    trials.ctx.progress("timing groups of layers", 0.0)
    candidates = {group.name: only(plan, group.entries) for group in groups}
    if len(groups) > 1:
        candidates["all"] = plan
        static = plan.of_scheme("static")
        if static:
            candidates["rest"] = plan.turned(static)
    timings = trials.times(candidates, _EFFORT)
    prefer = trials.ctx.settings.prefer
    for group in groups:
        timing = timings.get(group.name)
        if timing is None:
            plan = plan.turned(group.entries, reason="the runtime refuses it in int8")
            continue
        if group.limit >= 1 and not group.pays(timing) and prefer == "speed":
            timing = trials.times({group.name: candidates[group.name]}, _CAREFUL)[group.name]
        speed = f"{1 / timing.ratio:.2f}x the speed of floats"
        said = f"{group.name}: {speed}"
        beside = _beside_others(timings) if group.limit < 1 else timing.ratio
        if beside < timing.ratio:
            said += f", {1 / beside:.2f}x beside the others"
        if group.pays(timing) or beside < group.limit or prefer == "size":
            smaller = ", and smaller" if timing.ratio >= 1 else ""
            threads = f"{trials.threads} thread{'s' if trials.threads != 1 else ''}"
            trials.ctx.note(f"{said}{smaller} ({threads})")
            continue
        why = "they do not pay" if group.limit < 1 else "they are slower"
        plan = plan.turned(group.entries, reason=speed)
        trials.ctx.note(f"{said}: {why} and stay float; --prefer size keeps them in int8")
    return plan


def keep_what_shrinks(trials: Trials, plan: Plan) -> Plan:
    """Return the plan without groups that make the file larger.

    With few weights, int8 saves fewer bytes than scales, zero points and added nodes take.
    """
    before = ModelStats.of(trials.model).bytes
    if before > _WEIGHTS_DOMINATE:
        return plan
    for group in groups_of(plan):
        after = ModelStats.of(trials.draft(only(plan, group.entries))).bytes
        if after >= before:
            plan = plan.turned(group.entries, reason="larger in int8")
            trials.ctx.note(f"{group.name} stay float: in int8 {after - before} bytes are added")
    return plan


def _beside_others(timings: Mapping[str, Timing]) -> float:
    """Return the time of the whole plan relative to the plan without static layers."""
    whole, rest = timings.get("all"), timings.get("rest")
    return math.inf if whole is None or rest is None else whole.ratio / rest.ratio
