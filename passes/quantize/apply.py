"""A plan, written: each scheme by its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from passes.quantize.dynamic import apply_dynamic
from passes.quantize.means import ChannelMeans
from passes.quantize.plan import Plan
from passes.quantize.static.apply import Format, apply_static
from passes.quantize.static.islands import raise_islands
from passes.quantize.static.pointwise import apply_pointwise
from passes.quantize.weight_only import apply_weight_only
from passes.quantize.weight_only.nbits import Known
from toolkit.model import Model

if TYPE_CHECKING:
    from toolkit.context import Context


def apply_all(
    model: Model,
    plan: Plan,
    ctx: Context,
    form: Format = "qdq",
    means: ChannelMeans | None = None,
    known: Known | None = None,
) -> None:
    """Write a plan: static layers first, since their ranges are known by the names of values.

    `known` are codes of weights that are quantized alone, see `apply_weight_only`.
    """
    if plan.of_scheme("static"):
        if ctx.target == "ort-cpu":
            raise_islands(model, plan)
        apply_pointwise(model, plan, ctx, means or {})
        apply_static(model, plan, ctx, form, means)
    if plan.of_scheme("dynamic"):
        apply_dynamic(model, plan, ctx)
    if plan.of_scheme("weight-only"):
        blocks = "nbits" if ctx.on_runtime else "qdq"
        apply_weight_only(model, plan, ctx, blocks, known=known)
