"""Fold scales and shifts into the BatchNormalization between them, if no Conv absorbs it.

    s2 norm(s1 x + t1) + t2  =  f x + h  =  norm'(x)

with f and h per channel: norm' has the old variance, a mean of 0, f sqrt(variance + epsilon) as its
scale and h as its bias. The remaining BatchNormalization costs as much as a Mul and an Add.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.fuse.linear.affine import (
    IDENTITY,
    Channels,
    batch_normalization,
    bypass,
    chain_after,
    chain_before,
    rewire_input,
    rounded,
    variable_operand,
)
from toolkit.ir import Graph, node as nd
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

norm = op.BatchNormalization(var("x"), *(const(n, rank=1) for n in ("s", "b", "m", "v")))


@rewrite(norm)
def affine_around_batch_norm(g: Graph, x: str, s: str, m: str, v: str, node: NodeProto) -> str:
    """s2 norm(s1 x + t1) + t2 = norm'(x)"""
    scale, mean, variance, rank = g.const(s), g.const(m), g.const(v), g.rank(x)
    if scale is None or mean is None or variance is None or rank is None:
        raise MatchFailure("its rank is not known")
    where = Channels(rank, 1, len(scale))
    own = batch_normalization(g, node, where)
    before = chain_before(g, x, where)
    after = chain_after(g, node.output[0], where)
    if own is None or not (before or after):
        raise MatchFailure("no per-channel constant is applied before or after it")
    first = before[-1][0] if before else IDENTITY
    last = after[-1][0] if after else IDENTITY
    total = first.then(own).then(last)
    deviation = np.sqrt(variance.astype(np.float64) + nd.attr(node, "epsilon", 1e-5))
    factors = rounded(np.broadcast_to(total.scale, scale.shape) * deviation, scale)
    shift = rounded(np.broadcast_to(total.shift, scale.shape), scale)
    if factors is None or shift is None:
        raise MatchFailure("its element type cannot hold the constants")
    zeros = np.zeros_like(mean)
    constants = [g.constant(a, n) for a, n in ((factors, s), (shift, "bias"), (zeros, "mean"))]
    g.set_inputs(node, [node.input[0], *constants, v])
    if before:
        rewire_input(g, node, variable_operand(g, before[-1][1]))
    return bypass(g, after[-1][1], node.output[0]) if after else node.output[0]


RULES = (affine_around_batch_norm,)
