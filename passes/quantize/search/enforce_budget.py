"""The error budget for plans that are not chosen by speed: a user's plan, or a single scheme."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.ir.model import Model
from toolkit.quantization.plan import Plan, Scheme, as_applied

if TYPE_CHECKING:
    from passes.quantize.search.candidate_eval import Trials, Write
    from toolkit.pass_manager.protocol import Context


def enforce_budget(trials: Trials, plan: Plan, corrected: bool = False) -> Plan:
    """Return the plan without the layers that have to fall back to float for the budget.

    `corrected`: biases will be corrected, and the plan may rely on it.
    """
    # The search evaluates plans of every scheme, and the schemes call this function.
    from passes.quantize.search.costs import Kernels
    from passes.quantize.search.notes import note_fallbacks
    from passes.quantize.search.problem import problem_of
    from passes.quantize.search.search import within_budget

    evaluator = trials.ctx.evaluator
    if evaluator is None or evaluator.requirement.off or not plan.quantized():
        return plan
    can_be = as_applied(trials.draft(plan), plan)
    problem = problem_of(trials.model, can_be, {}, Kernels({}))
    found = within_budget(trials, problem, can_be, corrected)
    note_fallbacks(found, trials, trials.ctx)
    # Entries that cannot be quantized stay in the plan: the writer notes the reason.
    decided = {entry.key for entry in can_be.quantized()}
    chosen = {entry.key: entry for entry in found.plan.entries if entry.key in decided}
    return replace(plan, entries=tuple(chosen.get(e.key, e) for e in plan.entries))


def write_within_budget(
    model: Model, plan: Plan, scheme: Scheme, ctx: Context, write: Write, start: int
) -> None:
    """Write the plan's entries of one scheme as far as the budget admits them.

    Where it admits none, the model returns to the position `start` of its journal.
    """
    from passes.quantize.search.candidate_eval import Trials

    own = tuple(entry for entry in plan.entries if entry.scheme in (scheme, "float"))
    others = len(plan.entries) - len(own)
    if others:
        ctx.note(f"not for this pass: {others} of the plan's nodes are not {scheme}")
    plan = enforce_budget(Trials(model, ctx, write), replace(plan, entries=own))
    write(model, plan, ctx)
    done = as_applied(model, plan)
    ctx.report.plans.append(done)
    if not done.quantized():
        model.journal.undo_to(start)  # drop the opset lift and the renamed nodes
