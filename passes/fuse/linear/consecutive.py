"""Merge consecutive linear layers with constant weights and at most a bias between them.

    (x A + a) B + b  =  x (A B) + (a B + b)             A: [n, k], B: [k, m]

The layers are merged only if A B is no larger than A and B together, n m <= n k + k m, and A has no
other user. B must have no other user either, unless A B is no larger than A.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.fuse.linear.affine import by_channel, rewire_input, rounded, use_count, variable_operand
from passes.fuse.linear.dense import gemm, matmul
from passes.fuse.linear.weights import LinearWeights
from toolkit.ir import Array, Graph, node as nd
from toolkit.rewriting.rule import MatchFailure, rewrite


@rewrite(matmul, gemm, opset=7)
def consecutive_linear(g: Graph, node: NodeProto) -> str:
    """(x A + a) B + b = x (A B) + (a B + b)"""
    second = LinearWeights.of(g, node)
    if g.sole_user(node.input[0]) is None or nd.attr(node, "transA", 0):
        raise MatchFailure("its input has other users, or is transposed")
    first, bias = layer_of(g, node.input[0])
    _require_gain(g, first, second)
    inner, outer = (
        weights.matrix.astype(np.float64) * weights.alpha for weights in (first, second)
    )
    exact: Array = inner @ outer
    product = rounded(np.transpose(exact) if second.is_transposed else exact, second.stored)
    shift = np.broadcast_to(bias, inner.shape[1:]) @ outer
    result = node.output[0]
    if product is None or not second.put(g, product, second.bias + shift):
        raise MatchFailure("its element type cannot hold the product")
    g.del_attr(node, "alpha")
    rewire_input(g, node, first.node.input[0])
    return result


def layer_of(g: Graph, value: str) -> tuple[LinearWeights, Array]:
    """Return the linear layer that computes `value`, and its bias; raise MatchFailure otherwise."""
    added, producer = None, g.producer(value)
    if producer is not None and nd.is_op(producer, "Add"):
        added, value = producer, variable_operand(g, producer)
        producer = g.producer(value) if g.sole_user(value) is not None else None
    if producer is None or not nd.is_op(producer, "MatMul", "Gemm"):
        raise MatchFailure("its input is not a linear layer, or the layer has other users")
    if nd.attr(producer, "transA", 0):
        raise MatchFailure("the input of the linear layer is transposed")
    layer = LinearWeights.of(g, producer)
    if added is None:
        return layer, layer.bias
    other = added.input[1] if added.input[0] == value else added.input[0]
    bias = by_channel(g, other, layer.outputs)
    if bias is None:
        raise MatchFailure("the constant added to it is not one number per channel")
    return layer, layer.bias + bias


def _require_gain(g: Graph, first: LinearWeights, second: LinearWeights) -> None:
    (n, k), m = first.matrix.shape, second.matrix.shape[1]
    if second.matrix.shape[0] != k:
        raise MatchFailure("the shapes of the two weights do not match")
    if n * m > n * k + k * m:
        raise MatchFailure("the merged matrix would be larger than the two")
    if use_count(g, first.node.input[1]) != 1:
        raise MatchFailure("the first weight has other users")
    if use_count(g, second.node.input[1]) != 1 and n * m > n * k:
        raise MatchFailure("the second weight has other users")


RULES = (consecutive_linear,)
