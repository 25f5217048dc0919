"""Fold scales, shifts, biases, transposes and neighbouring layers into MatMul and Gemm.

Runs after the fusion of norms and activations: otherwise the scale and shift at the end of a norm,
or the half of a GELU, would be folded and the norm or GELU would no longer match.
"""

from __future__ import annotations

from passes.fuse.arithmetic import flattened_matmul, one_hot
from passes.fuse.linear import consecutive, dense, gemm
from toolkit.rewriting.rule import RulePass

RULES = (*one_hot.RULES, *consecutive.RULES, *dense.RULES, *flattened_matmul.RULES, *gemm.RULES)


class FuseLinear(RulePass):
    """Fold biases, scales and transposes into MatMul and Gemm; merge consecutive linear layers."""

    name = "fuse-linear"
    rules = RULES
