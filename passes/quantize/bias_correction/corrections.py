"""Corrected biases for the drafts of a model, and then for the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from passes.quantize.bias_correction.correct_bias import CorrectBias, affordable_samples
from toolkit.ir.model import Model
from toolkit.quantization.plan import Plan

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context


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
