"""Lowering: replace operators by the equivalent candidate that the target's kernels run fastest.

The rules define the candidates and when they are equivalent. A cost table decides which one is
fastest: a shipped one for the runtime and processor (`data`, measured by
`benchmarks/kernel_forms.py`) or this machine's own, measured by `toolkit tune`. A candidate that
the runtime rewrites at load time is never chosen.

No candidate was faster on any measured processor for Gelu (its contrib operators run the same
kernel), SiLU (the runtime fuses x * sigmoid(x) to QuickGelu itself), RMSNormalization,
RotaryEmbedding, HardSwish, Attention without a mask (MultiHeadAttention takes up to twice as long)
and Conv with an activation (the runtime fuses it itself), so they have no rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from passes.lower import (
    activations,
    bias_gelu,
    gather_to_slice,
    mask_floor,
    mask_trials,
    powers,
    residual,
    softcap_attention,
)
from passes.lower.cost_query import SHIPPED, CostQuery, query_for
from passes.motion import sink_expand
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.rewriting.rule import Rule, apply_rules
from toolkit.runtime.cost_table import Costs, Progress, costs_in_use
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context


def rules_for(costs: CostQuery) -> tuple[Rule, ...]:
    """Return the rules that replace operators where this is faster according to `costs`."""
    return (
        *residual.rules(costs),
        *bias_gelu.rules(costs),
        *activations.rules(costs),
        *powers.rules(costs),
        *gather_to_slice.rules(costs),
        *softcap_attention.rules(costs),
        *sink_expand.RULES,
    )


def _lower_masks(model: Model, ctx: Context, costs: CostQuery) -> None:
    """Give masks a floor where it is faster and keeps the outputs of trial runs."""
    if ctx.holds is None:
        if mask_trials.candidates(model, costs):
            ctx.note(f"{_FASTER}; check it with --validate each, {_UNCHECKED}")
        return
    ctx.progress("trying masks with a floor", 0.0)
    trials = mask_trials.MaskTrials(model, costs, ctx.holds)
    apply_rules(model, mask_floor.rules(costs, only=trials.passed()), ctx)
    if trials.unmasked:
        ctx.note(f"{_FASTER}, but the feeds mask no scores: check it with --sample, {_UNCHECKED}")


_FASTER = "attention with masks can be faster here"
_UNCHECKED = "or skip the check with lower:mask=fast"


@dataclass(frozen=True, slots=True)
class Lower:
    """Replace operators by the equivalent candidate that the target runs fastest."""

    name: ClassVar[str] = "lower"
    topic: ClassVar[str] = "costs"
    tolerance: ClassVar[Tolerance] = FLOAT
    idempotent: ClassVar[bool] = True
    threads: int = field(
        default=0, metadata={"help": "Threads that the model will run on; 0: all cores."}
    )
    mask: Literal["auto", "keep", "fast"] = field(
        default="auto",
        metadata={
            "help": "Raise masks to at least the row's maximum - 50. auto: where that is faster "
            "and trial runs confirm it with a margin; fast: everywhere."
        },
    )

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise UsageError(f"lower: threads={self.threads} is not valid: 0 or more")

    def run(self, model: Model, ctx: Context) -> None:
        if not ctx.target.has_costs:
            return
        costs = query_for(self.threads)
        apply_rules(model, rules_for(costs), ctx)
        if self.mask == "fast":
            apply_rules(model, mask_floor.rules(), ctx)
        elif self.mask == "auto":
            _lower_masks(model, ctx, costs)

    def costs_in_use(self) -> tuple[Costs, str]:
        """Return the table in use, and its origin."""
        return costs_in_use(SHIPPED)

    def measure(self, progress: Progress, seconds: float) -> Costs:
        """Measure the candidates on this machine."""
        from passes.lower.measure import measure

        return measure(progress, seconds)
