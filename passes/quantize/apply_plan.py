"""Apply a plan, each scheme by its own writer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from passes.quantize.layers.channel_means import ChannelMeans
from passes.quantize.schemes.dynamic.quantize_dynamic import apply_dynamic
from passes.quantize.schemes.static.apply import Format, apply_static
from passes.quantize.schemes.static.pointwise_conv import apply_pointwise
from passes.quantize.schemes.weight_only.nbits import Known, form_on
from passes.quantize.schemes.weight_only.quantize_weights import apply_weight_only
from toolkit.ir.model import Model
from toolkit.quantization.number_format import FORMATS
from toolkit.quantization.plan import Plan

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
    weight_only = plan.of_scheme("weight-only")
    if weight_only:
        bits = max(FORMATS[entry.weight].bits for entry in weight_only)
        apply_weight_only(model, plan, ctx, form_on(ctx.target, bits), known=known)
