"""Lowering: the spelling of each meaning that the target's kernels run fastest.

The rules say which spellings there are, and when they mean the same. Which one is the fastest is
data: a table of costs for one runtime and processor (those in `data`, measured by
`benchmarks/spellings.py`), or this machine's own, which `toolkit tune` measures. A spelling that
the runtime undoes at load time is never chosen.

Measured and left as they are, because no spelling is faster: Gelu (the contributed ones are the
same kernel), SiLU (the runtime makes QuickGelu of x * sigmoid(x) itself), RMSNormalization (a
kernel of its own), RotaryEmbedding, HardSwish, Conv with an activation (the runtime fuses it and
then changes the layout; a FusedConv that was written beforehand ends up the same).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from passes.lower import activations, bias_gelu, mask_trials, powers, residual
from passes.lower import attention_kernel as attention
from passes.lower import gather_to_slice as ranges
from passes.lower import mask_floor as masks
from passes.lower import softcap_attention as capped
from passes.lower.cost_query import SHIPPED, Choice, choice_for
from passes.motion import sink_expand as repeated
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
        *ranges.rules(choice),
        *attention.rules(choice),
        *capped.rules(choice),
        *repeated.RULES,
    )


def _lower_masks(model: Model, ctx: Context, choice: Choice) -> None:
    """Masks with a floor, where that is faster and runs show that it is the same."""
    if ctx.holds is None:
        if mask_trials.candidates(model, choice):
            ctx.note(f"{_FASTER}; --validate each checks that it may be, {_UNCHECKED}")
        return
    ctx.tell("trying masks with a floor", 0.0)
    showing = mask_trials.Showing(model, choice, ctx.holds)
    shown = showing.shown()
    apply_rules(model, masks.rules(choice, only=shown), ctx)
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
        if ctx.target != "ort-cpu":
            return
        choice = choice_for(self.threads)
        apply_rules(model, rules_for(choice), ctx)
        if self.mask == "fast":
            apply_rules(model, masks.rules(), ctx)
        elif self.mask == "auto":
            _lower_masks(model, ctx, choice)

    def costs_in_use(self) -> tuple[Costs, str]:
        """The table that decides, and where it is from."""
        return costs_in_use(SHIPPED)

    def measure(self, progress: Progress, seconds: float) -> Costs:
        """Measure this machine."""
        from passes.lower.measure import measure

        return measure(progress, seconds)
