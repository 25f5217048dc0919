"""What goes into a MatMul or Gemm: scales and shifts around it, its bias, transposes, each other.

Runs behind the fusion of norms and activations: the scale and shift that end a norm spelled out, or
the half of a GELU, look like any other and would be taken away from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from passes.fuse.arithmetic import flattened_matmul as flattened
from passes.fuse.arithmetic import one_hot as onehot
from passes.fuse.linear import consecutive, dense, gemm
from toolkit.ir.model import Model
from toolkit.rewriting.rule import apply_rules
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

RULES = (*onehot.RULES, *consecutive.RULES, *dense.RULES, *flattened.RULES, *gemm.RULES)


@dataclass(frozen=True, slots=True)
class FuseLinear:
    """Take biases, scales and transposes into MatMul and Gemm, and linear maps into each other."""

    name: ClassVar[str] = "fuse-linear"
    tolerance: ClassVar[Tolerance] = FLOAT

    def run(self, model: Model, ctx: Context) -> None:
        apply_rules(model, RULES, ctx)
