"""Lowering: replace operators by the equivalent candidate that the target's kernels run fastest.

The rules say which candidates exist and when they are equivalent. A cost table decides which one is
fastest: a shipped one for the runtime and processor (`data`, measured by
`benchmarks/kernel_forms.py`) or this machine's own, measured by `toolkit tune`. A candidate that
the runtime rewrites at load time is never chosen.

No candidate was faster on any measured processor for Gelu (the contributed operators run the same
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
from passes.lower.cost_query import SHIPPED, Choice, choice_for
from passes.motion import sink_expand
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.rewriting.rule import Rule, apply_rules
from toolkit.runtime.cost_table import Costs, Progress, costs_in_use
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context


def rules_for(choice: Choice) -> tuple[Rule, ...]:
    """The rules, asking these costs."""
    return (
        *residual.rules(choice),
        *bias_gelu.rules(choice),
        *activations.rules(choice),
        *powers.rules(choice),
        *gather_to_slice.rules(choice),
        *softcap_attention.rules(choice),
        *sink_expand.RULES,
    )


def _lower_masks(model: Model, ctx: Context, choice: Choice) -> None:
    """Masks with a floor, where that is faster and runs show that it is the same."""
    if ctx.holds is None:
        if mask_trials.candidates(model, choice):
            ctx.note(f"{_FASTER}; --validate each checks that it may be, {_UNCHECKED}")
        return
    ctx.progress("trying masks with a floor", 0.0)
    showing = mask_trials.Showing(model, choice, ctx.holds)
    shown = showing.shown()
    apply_rules(model, mask_floor.rules(choice, only=shown), ctx)
    if showing.idle:
        ctx.note(
            f"{_FASTER}, but no input masks anything to check it by: --sample, or {_UNCHECKED}"
        )


_FASTER = "attention with masks can be faster here"
_UNCHECKED = "lower:mask=fast without a check"


@dataclass(frozen=True, slots=True)
class Lower:
    """Write each operator in the spelling that the target runs fastest."""

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
            "help": "Masks that end 50 below the row's largest. auto: where that is faster, and "
            "shown with room to spare; fast: everywhere."
        },
    )

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise UsageError(f"lower: threads={self.threads} is not valid: 0 or more")

    def run(self, model: Model, ctx: Context) -> None:
        if not ctx.target.has_costs:
            return
        choice = choice_for(self.threads)
        apply_rules(model, rules_for(choice), ctx)
        if self.mask == "fast":
            apply_rules(model, mask_floor.rules(), ctx)
        elif self.mask == "auto":
            _lower_masks(model, ctx, choice)

    def costs_in_use(self) -> tuple[Costs, str]:
        """The table that decides, and where it is from."""
        return costs_in_use(SHIPPED)

    def measure(self, progress: Progress, seconds: float) -> Costs:
        """Measure this machine."""
        from passes.lower.measure import measure

        return measure(progress, seconds)
