"""Normalizations under their own names, with their scale and bias inside.

The core of each (means, squares, inverse roots) becomes one operator with a scale of ones; then
what follows goes into scale and bias. So no pattern has to know where an exporter put the weights,
and norms without any are found as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from passes.fuse.norm import contrib as norm_contrib
from passes.fuse.norm import instance_group as norm_channels
from passes.fuse.norm import layer_rms as norm_core
from passes.fuse.norm import scale_bias as norm_affine
from passes.simplify.canonicalize.casts import cast_of_cast
from toolkit.ir.model import Model
from toolkit.rewriting.anchors import Cores
from toolkit.rewriting.rule import apply_rules
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

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
