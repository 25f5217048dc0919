"""Fuse normalizations into standard operators, including their scale and bias.

The statistics (means, squares, inverse roots) become one operator with a scale of ones; then the
operators that follow are folded into scale and bias. So no pattern depends on where an exporter
puts the weights, and norms without weights are found as well.
"""

from __future__ import annotations

from typing import ClassVar

from passes.fuse import contrib
from passes.fuse.norm import instance_group, layer_rms, scale_bias
from passes.simplify.canonicalize.casts import cast_of_cast
from toolkit.rewriting.anchors import Anchors
from toolkit.rewriting.rule import RulePass

RULES = (
    *contrib.NORMS,
    *layer_rms.RULES,
    *scale_bias.RULES,
    *instance_group.RULES,
    cast_of_cast,  # Casts may remain between a norm and its scale
)


class FuseNorms(RulePass):
    """Fuse normalizations into single operators: LayerNormalization, RMSNormalization etc."""

    name = "fuse-norms"
    rules = RULES
    onnx_rules = instance_group.ONNX_RULES
    anchors: ClassVar[Anchors] = {
        "layer-norm": ("ReduceMean > Sqrt", "GlobalAveragePool > Sqrt"),
        "rms-norm": ("ReduceMean > Sqrt",),
    }
