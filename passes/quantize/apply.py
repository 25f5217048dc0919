"""A plan, written: each scheme by its own, and then the biases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from passes.quantize.correct import CorrectBias, affordable_samples
from passes.quantize.dynamic import apply_dynamic
from passes.quantize.means import ChannelMeans
from passes.quantize.plan import Plan
from passes.quantize.static.apply import Format, apply_static
from passes.quantize.static.islands import raise_islands
from passes.quantize.static.pointwise import apply_pointwise
from passes.quantize.weight_only import apply_weight_only
from toolkit.model import Model

if TYPE_CHECKING:
    from toolkit.context import Context


def apply_all(
    model: Model, plan: Plan, ctx: Context, form: Format = "qdq", means: ChannelMeans | None = None
) -> None:
    """Write a plan: static layers first, since their ranges are known by the names of values."""
    if plan.of_scheme("static"):
        if ctx.target == "ort-cpu":
            raise_islands(model, plan)
        apply_pointwise(model, plan, ctx, means or {})
        apply_static(model, plan, ctx, form, means)
    if plan.of_scheme("dynamic"):
        apply_dynamic(model, plan, ctx)
    if plan.of_scheme("weight-only"):
        apply_weight_only(model, plan, ctx, "nbits" if ctx.target == "ort-cpu" else "qdq")


def is_correctable(plan: Plan, ctx: Context) -> bool:
    """Whether there are static layers, and what their biases are corrected by."""
    known = ctx.calibration is not None and ctx.floats is not None
    return known and bool(plan.of_scheme("static"))


@dataclass(slots=True)
class Corrections:
    """Takes back by the biases what int8 shifts; of one model, on the same samples every time.

    How many it takes is measured once. What a draft was found to be worth, the model is worth then.
    """

    _samples: int | None = None

    def make(self, model: Model, ctx: Context) -> None:
        assert ctx.calibration is not None
        if self._samples is None:
            self._samples = affordable_samples(model, ctx.calibration.feeds, ctx.custom_ops)
        CorrectBias(self._samples).run(model, ctx)
