"""Plans that somebody has decided on: speed is not asked for, the budget holds all the same."""

from __future__ import annotations

from dataclasses import replace

from passes.quantize.search.candidate_eval import Trials
from passes.quantize.search.costs import Kernels
from passes.quantize.search.notes import note_returned
from passes.quantize.search.problem import survey
from passes.quantize.search.search import kept
from toolkit.quantization.plan import Plan, as_applied


def keep_budget(trials: Trials, plan: Plan, corrected: bool = False) -> Plan:
    """The plan without what harms most, where the budget does not hold with all of it.

    `corrected`: biases will be corrected, and what holds by that holds.
    """
    judge = trials.ctx.judge
    if judge is None or judge.demand.off or not plan.quantized():
        return plan
    can_be = as_applied(trials.draft(plan), plan)
    found = kept(trials, survey(trials.model, can_be, {}, Kernels({})), can_be, corrected)
    note_returned(found, trials, trials.ctx)
    # What cannot be quantized stays in the plan: whoever writes it says why.
    decided = {entry.key for entry in can_be.quantized()}
    chosen = {entry.key: entry for entry in found.plan.entries if entry.key in decided}
    return replace(plan, entries=tuple(chosen.get(e.key, e) for e in plan.entries))
