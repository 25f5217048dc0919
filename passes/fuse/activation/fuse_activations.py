"""Fuse activation functions into standard operators.

Formulas of Mul, Add, Exp, Erf and so on, and contrib operators of other tools, become standard
operators. Operators whose onnxruntime CPU kernel is slower than their formula are only written for
the target `onnx`.
"""

from __future__ import annotations

from typing import ClassVar

from passes.fuse import contrib
from passes.fuse.activation import gelu, relu_clip, sigmoid_softplus
from toolkit.rewriting.anchors import Anchors
from toolkit.rewriting.rule import RulePass

RULES = (
    *contrib.ACTIVATIONS,
    *relu_clip.RULES,
    *gelu.RULES,
    *sigmoid_softplus.RULES,
)


class FuseActivations(RulePass):
    """Fuse activations into single operators: Gelu, HardSwish, Mish, LeakyRelu and others."""

    name = "fuse-activations"
    rules = RULES
    onnx_rules = sigmoid_softplus.ONNX_RULES
    anchors: ClassVar[Anchors] = {"gelu": ("Erf", "0.044715 > Tanh")}
