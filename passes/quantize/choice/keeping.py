"""Plans that somebody has decided on: speed is not asked for, the budget holds all the same."""

from __future__ import annotations

from dataclasses import replace

from passes.quantize.choice.costs import Kernels
from passes.quantize.choice.search import kept
from passes.quantize.choice.survey import survey
from passes.quantize.choice.telling import note_returned
from passes.quantize.choice.trials import Trials
from passes.quantize.plan import Plan


def keep_budget(trials: Trials, plan: Plan, corrected: bool = False) -> Plan:
    """The plan without what harms most, where the budget does not hold with all of it.

    `corrected`: biases will be corrected, and what holds by that holds.
    """
    judge = trials.ctx.judge
    if judge is None or judge.demand.off or not plan.quantized():
        return plan
    alike = survey(trials.model, plan, {}, Kernels({}))  # what a layer saves is not asked
    untimed = replace(trials, ctx=replace(trials.ctx, prefer="size"))
    found = kept(untimed, alike, plan, corrected)
    note_returned(found, trials, trials.ctx)
    return found.plan
