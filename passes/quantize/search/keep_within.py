"""A plan that keeps the budget, written: for passes that quantize in one way what they are told."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.ir.model import Model
from toolkit.quantization.plan import Plan, Scheme, as_applied

if TYPE_CHECKING:
    from passes.quantize.search.candidate_eval import Write
    from toolkit.pass_manager.protocol import Context


def write_within_budget(
    model: Model, plan: Plan, scheme: Scheme, ctx: Context, write: Write, start: int
) -> None:
    """Write what keeps the budget of a plan's entries of this scheme, by `write`.

    Where nothing does, the model is as it was at this position of its journal.
    """
    # The choice is between all kinds of plans, and so it imports those who call this.
    from passes.quantize.search.candidate_eval import Trials
    from passes.quantize.search.enforce_budget import keep_budget

    own = tuple(entry for entry in plan.entries if entry.scheme in (scheme, "float"))
    others = len(plan.entries) - len(own)
    if others:
        ctx.note(f"not for this pass: {others} of the plan's nodes are not {scheme}")
    plan = keep_budget(Trials(model, ctx, write), replace(plan, entries=own))
    write(model, plan, ctx)
    done = as_applied(model, plan)
    ctx.plans.append(done)
    if not done.quantized():
        model.journal.undo_to(start)  # lifted and renamed for nothing
