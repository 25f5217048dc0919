"""Leave layers in float whose int8 form the runtime has no kernels for.

That is a fact about the runtime, and says nothing about accuracy or speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from toolkit.quantization.plan import Entry, Plan
from toolkit.targets.releases import uses_of

if TYPE_CHECKING:
    from passes.quantize.search.candidate_eval import Trials


def leave_unsupported(trials: Trials, plan: Plan) -> Plan:
    """Return the plan without the kinds of layers that do not load, with the reason."""
    if not _missing(trials, plan):
        return plan
    entries = sorted(plan.quantized(), key=_kind)
    for _, group in groupby(entries, key=_kind):
        layers = list(group)
        reasons = _missing(trials, _only(plan, layers))
        if reasons:
            runtime = " and ".join(map(str, trials.ctx.target.releases))
            why = f"{runtime} cannot run it in int8: {'; '.join(reasons)}"
            plan = plan.turned(layers, reason=why)
    return plan


def _kind(entry: Entry) -> tuple[str, str]:
    return entry.scheme, entry.op


def _only(plan: Plan, layers: Iterable[Entry]) -> Plan:
    """Return the plan with all other layers in float."""
    kept = set(layers)
    return plan.turned([entry for entry in plan.quantized() if entry not in kept])


def _missing(trials: Trials, plan: Plan) -> list[str]:
    """Return why the runtime does not load the operators that a plan adds."""
    known, target = uses_of(trials.model), trials.ctx.target
    added = (use for use in uses_of(trials.draft(plan)) if use not in known)
    return list(dict.fromkeys(filter(None, map(target.obstacle, added))))
