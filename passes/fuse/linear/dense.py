"""Fold scales and shifts around a MatMul or Gemm into its constant matrix (see `weights`).

A Gemm has a bias. A MatMul has none: one Add stays after it, so only longer chains are folded.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.fuse.linear.affine import Affine, chain_after
from passes.fuse.linear.weights import LinearWeights, absorb_after, absorb_before
from toolkit.ir import FLOATS, Graph, node as nd
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

weight = const("w", rank=2, dtype=tuple(FLOATS))
matmul = op.MatMul(var("x"), weight)
gemm = op.Gemm(var("x"), weight, ...)


@rewrite(gemm, opset=7)
def affine_after_gemm(g: Graph, node: NodeProto) -> str:
    """s (x W + b) + t = x (W s) + (s b + t)"""
    return absorb_after(g, LinearWeights.of(g, node))


@rewrite(gemm, opset=7)
def affine_before_gemm(g: Graph, node: NodeProto) -> str:
    """(s x + t) W + b = x (s W) + (t W + b)"""
    if nd.attr(node, "transA", 0):
        raise MatchFailure("the channels of its input come first")
    return absorb_before(g, LinearWeights.of(g, node))


@rewrite(matmul)
def affine_after_matmul(g: Graph, node: NodeProto) -> str:
    """s (x W) + t = x (W s) + t, where that saves nodes"""

    def obstacle(total: Affine, length: int) -> str:
        is_add = length == 1 and not total.scales
        return "the only per-channel constant applied to its result is a bias" if is_add else ""

    return absorb_after(g, LinearWeights.of(g, node), obstacle)


@rewrite(matmul)
def affine_before_matmul(g: Graph, node: NodeProto) -> str:
    """(s x + t) W = x (s W) + t W, where an Add after it absorbs the shift"""
    weights = LinearWeights.of(g, node)
    if weights.rank < 2:
        raise MatchFailure("its input may be a vector")
    adds = bool(chain_after(g, node.output[0], weights.outputs))

    def obstacle(total: Affine, length: int) -> str:
        lacks_bias = total.shifts and length + adds < 2
        return "no bias follows that could absorb the shift" if lacks_bias else ""

    return absorb_before(g, weights, obstacle)


RULES = (affine_after_gemm, affine_after_matmul, affine_before_gemm, affine_before_matmul)
