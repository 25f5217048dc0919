"""Activations under their own names.

What an exporter wrote out of Mul, Add, Exp, Erf and the like becomes the standard operator of its
meaning, and so do the contrib operators of other tools. Some operators are slower on onnxruntime's
CPU kernels than what they are made of: those are only written for the target `onnx`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from passes.fuse.activation import contrib as activation_contrib
from passes.fuse.activation import gelu as activation_gelu
from passes.fuse.activation import relu_clip as activation_limits
from passes.fuse.activation import sigmoid_softplus as activation_gates
from toolkit.ir.model import Model
from toolkit.rewriting.anchors import Cores
from toolkit.rewriting.rule import apply_rules
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

RULES = (
    *activation_contrib.RULES,
    *activation_limits.RULES,
    *activation_gelu.RULES,
    *activation_gates.RULES,
)

ONNX_RULES = (*RULES, *activation_gates.ONNX_RULES)


@dataclass(frozen=True, slots=True)
class FuseActivations:
    """Write activations as single operators: Gelu, HardSwish, Mish, LeakyRelu and others."""

    name: ClassVar[str] = "fuse-activations"
    tolerance: ClassVar[Tolerance] = FLOAT
    idempotent: ClassVar[bool] = True
    cores: ClassVar[Cores] = {"gelu": ("Erf", "0.044715 > Tanh")}

    def run(self, model: Model, ctx: Context) -> None:
        apply_rules(model, ONNX_RULES if ctx.target == "onnx" else RULES, ctx)
