"""Apply a plan, each scheme by its own writer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from passes.quantize.layers.channel_means import ChannelMeans
from passes.quantize.schemes.dynamic.quantize_dynamic import apply_dynamic
from passes.quantize.schemes.static.apply import Format, apply_static
from passes.quantize.schemes.static.pointwise_conv import apply_pointwise
from passes.quantize.schemes.weight_only.nbits import Known
from passes.quantize.schemes.weight_only.quantize_weights import apply_weight_only
from toolkit.ir.model import Model
from toolkit.quantization.plan import Plan
from toolkit.targets import CONTRIB

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context


def apply_all(
    model: Model,
    plan: Plan,
    ctx: Context,
    form: Format = "qdq",
    means: ChannelMeans | None = None,
    known: Known | None = None,
) -> None:
    """Apply a plan, static layers first, since their ranges refer to the original value names.

    `known` has the codes of weight-only layers, see `apply_weight_only`.
    """
    if plan.of_scheme("static"):
        apply_pointwise(model, plan, ctx, means or {})
        apply_static(model, plan, ctx, form, means)
    if plan.of_scheme("dynamic"):
        apply_dynamic(model, plan, ctx)
    if plan.of_scheme("weight-only"):
        blocks = "nbits" if ctx.target.runs(CONTRIB) else "qdq"
        apply_weight_only(model, plan, ctx, blocks, known=known)
