"""Scales and shifts around a BatchNormalization that no Conv takes go into its own constants.

    s2 norm(s1 x + t1) + t2  =  f x + h  =  norm'(x)

with f and h by channel: norm' has the old variance, a mean of 0, f sqrt(variance + epsilon) as its
scale and h as its bias. One BatchNormalization is left, which costs as much as a Mul and an Add.
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
    read_from,
    rounded,
    source_of,
)
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import Miss, rewrite

norm = op.BatchNormalization(var("x"), *(const(n, rank=1) for n in ("s", "b", "m", "v")))


@rewrite(norm)
def affine_around_batch_norm(g: Graph, x: str, s: str, m: str, v: str, node: NodeProto) -> str:
    """s2 norm(s1 x + t1) + t2 = norm'(x)"""
    scale, mean, variance, rank = g.const(s), g.const(m), g.const(v), g.rank(x)
    if scale is None or mean is None or variance is None or rank is None:
        raise Miss("its rank is not known")
    where = Channels(rank, 1, len(scale))
    own = batch_normalization(g, node, where)
    before = chain_before(g, x, where)
    after = chain_after(g, node.output[0], where)
    if own is None or not (before or after):
        raise Miss("no constant by channel is applied before or behind it")
    first = before[-1][0] if before else IDENTITY
    last = after[-1][0] if after else IDENTITY
    total = first.then(own).then(last)
    deviation = np.sqrt(variance.astype(np.float64) + nd.attr(node, "epsilon", 1e-5))
    factors = rounded(np.broadcast_to(total.scale, scale.shape) * deviation, scale)
    shift = rounded(np.broadcast_to(total.shift, scale.shape), scale)
    if factors is None or shift is None:
        raise Miss("its element type cannot hold the constants")
    zeros = np.zeros_like(mean)
    constants = [g.constant(a, n) for a, n in ((factors, s), (shift, "bias"), (zeros, "mean"))]
    g.set_inputs(node, [node.input[0], *constants, v])
    if before:
        read_from(g, node, source_of(g, before[-1][1]))
    return bypass(g, node, after[-1][1]) if after else node.output[0]


RULES = (affine_around_batch_norm,)
