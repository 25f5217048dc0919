"""Ablation: variants of a model in which a pass quantizes a single layer.

A pass with the option `plan` gets its own plan with all other layers in float, without a second
calibration. For any other pass, all rewrites but one are vetoed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from toolkit.accuracy.sensitivity import Variant
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.quantization.plan import Entry, Plan

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import AnyPass, Context


@dataclasses.dataclass(frozen=True, slots=True)
class Quantized:
    """The model with all layers quantized, and the variants with one layer each."""

    whole: Model
    variants: list[Variant]


def quantize_by(item: AnyPass, float_model: Model, context: Callable[[], Context]) -> Quantized:
    """Run the pass on a copy of the model; raises UsageError if it quantizes nothing."""
    whole = float_model.copy()
    ctx = context()
    item.run(whole, ctx)
    if not len(whole.journal):
        why = f": {ctx.notes[0]}" if ctx.notes else ""
        raise UsageError(f"{item.name} finds nothing to quantize{why}")
    options = {field.name for field in dataclasses.fields(cast("Any", item))}
    if ctx.report.plans and "plan" in options:
        variants = _by_plan(item, float_model, context, ctx.report.plans[0])
    else:
        variants = _by_veto(item, float_model, context, whole)
    return Quantized(whole, variants)


def _by_plan(
    item: AnyPass, float_model: Model, context: Callable[[], Context], plan: Plan
) -> list[Variant]:
    entries = plan.quantized()

    def make(kept: Entry) -> Model:
        model = float_model.copy()
        alone = plan.turned([entry for entry in entries if entry is not kept])
        followed: Any = dataclasses.replace(cast("Any", item), plan=alone)
        followed.run(model, context())
        return model

    return [
        (f"{entry.op} {entry.node or entry.output}", lambda kept=entry: make(kept))
        for entry in entries
    ]


def _by_veto(
    item: AnyPass, float_model: Model, context: Callable[[], Context], whole: Model
) -> list[Variant]:
    rewrites = [rewrite for rewrite in whole.journal.rewrites if not rewrite.implicit]

    def make(kept: int) -> Model:
        model = float_model.copy()
        for index, rewrite in enumerate(rewrites):
            if index != kept:
                model.journal.veto(rewrite)
        item.run(model, context())
        return model

    return [
        (f"{rewrite.rule} {rewrite.site}", lambda kept=index: make(kept))
        for index, rewrite in enumerate(rewrites)
    ]
