"""Normalizations under their own names, with their scale and bias inside.

The core of each (means, squares, inverse roots) becomes one operator with a scale of ones; then
what follows goes into scale and bias. So no pattern has to know where an exporter put the weights,
and norms without any are found as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from passes.cleanup.casts import cast_of_cast
from passes.fuse import norm_affine, norm_channels, norm_contrib, norm_core
from toolkit.cores import Cores
from toolkit.model import Model
from toolkit.rules import apply_rules
from toolkit.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.context import Context

RULES = (
    *norm_contrib.RULES,
    *norm_core.RULES,
    *norm_affine.RULES,
    *norm_channels.RULES,
    cast_of_cast,  # what is left of a core in another type stands between it and its scale
)

ONNX_RULES = (*RULES, *norm_channels.ONNX_RULES)


@dataclass(frozen=True, slots=True)
class FuseNorms:
    """Write normalizations as single operators: LayerNormalization, RMSNormalization and others."""

    name: ClassVar[str] = "fuse-norms"
    tolerance: ClassVar[Tolerance] = FLOAT
    idempotent: ClassVar[bool] = True
    cores: ClassVar[Cores] = {
        "layer-norm": ("ReduceMean > Sqrt", "GlobalAveragePool > Sqrt"),
        "rms-norm": ("ReduceMean > Sqrt",),
    }

    def run(self, model: Model, ctx: Context) -> None:
        apply_rules(model, ONNX_RULES if ctx.target == "onnx" else RULES, ctx)
