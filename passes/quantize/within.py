"""The budget, for passes that quantize in one way what they are told to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.model import Model

if TYPE_CHECKING:
    from passes.quantize.choice.trials import Write
    from passes.quantize.plan import Plan
    from toolkit.context import Context


def within_budget(model: Model, plan: Plan, ctx: Context, write: Write) -> Plan:
    """The plan, or what is left of it when the budget holds; `write` applies one to a model."""
    # The choice is between all kinds of plans, and so it imports those who call this.
    from passes.quantize.choice.keeping import keep_budget
    from passes.quantize.choice.trials import Trials

    return keep_budget(Trials(model, ctx, write), plan)
