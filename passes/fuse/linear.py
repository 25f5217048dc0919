"""What goes into a MatMul or Gemm: scales and shifts around it, its bias, transposes, each other.

Runs behind the fusion of norms and activations: the scale and shift that end a norm spelled out, or
the half of a GELU, look like any other and would be taken away from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from passes.fuse import consecutive, dense, flattened, gemm, onehot
from toolkit.model import Model
from toolkit.rules import apply_rules
from toolkit.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.context import Context

RULES = (*onehot.RULES, *consecutive.RULES, *dense.RULES, *flattened.RULES, *gemm.RULES)


@dataclass(frozen=True, slots=True)
class FuseLinear:
    """Take biases, scales and transposes into MatMul and Gemm, and linear maps into each other."""

    name: ClassVar[str] = "fuse-linear"
    tolerance: ClassVar[Tolerance] = FLOAT

    def run(self, model: Model, ctx: Context) -> None:
        apply_rules(model, RULES, ctx)
