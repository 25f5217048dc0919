"""Split an axis before a Transpose instead of merging it before and splitting it after.

    Reshape(Transpose(Reshape(x, [l, 8 b, d])), [b, 8, l, d]) = Transpose(Reshape(x, [l, b, 8, d]))

`nn.MultiheadAttention` splits its heads like this. It saves a Reshape, usually one with computed
sizes. Factors after such data movement are folded into the weight before it.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import permutation, reshape, reshape_target, transpose
from passes.fuse.linear.affine import rounded, use_count
from toolkit.ir import Graph, Shape, node as nd
from toolkit.ir.op_traits import MOVEMENT
from toolkit.pattern import const, op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import rewrite


@rewrite(
    op.Reshape(op.Transpose(op.Reshape(var("x"), ...).named("first")).named("moved"), ...), opset=5
)
def split_after_transpose(
    g: Graph, x: str, first: NodeProto, moved: NodeProto, node: NodeProto
) -> str:
    """Reshape(Transpose(Reshape(x))) = Transpose(Reshape(x)), if the outer one splits an axis"""
    perm, shape, result = permutation(g, moved), g.shape(first.output[0]), g.shape(node.output[0])
    if perm is None or shape is None or result is None:
        raise MatchFailure("a shape is not known")
    found = _split_axis(tuple(shape[axis] for axis in perm), result)
    extra = len(result) - len(shape)
    split = perm[found]
    parts = result[found : found + extra + 1]
    target = reshape_target(g.shape(x), (*shape[:split], *parts, *shape[split + 1 :]))
    if target is None:
        raise MatchFailure("no constant target of a Reshape expresses these sizes")
    order: list[int] = []
    for axis in perm:
        start = axis if axis <= split else axis + extra
        order.extend(range(start, start + extra + 1) if axis == split else (start,))
    return transpose(g, reshape(g, x, target, at=node), order, at=node)


def _split_axis(shape: Shape, result: Shape) -> int:
    """Return the only axis of `shape` that `result` splits; all others must be equal."""
    if len(result) <= len(shape):
        raise MatchFailure("no axis is split")
    axis = 0
    while axis < len(shape) - 1 and shape[axis] == result[axis]:
        axis += 1
    following = len(shape) - axis - 1
    if following and shape[-following:] != result[-following:]:
        raise MatchFailure("more than one axis changes")
    return axis


_FACTOR = const("c", where=lambda array: array.size == 1)
_MOVES = MOVEMENT - {"Split"}
"""Data movement with one result: the other parts of a Split would lack the factor."""
_MAX_CHAIN = 4


@rewrite(op.Mul(var("x"), _FACTOR), op.Div(var("x"), _FACTOR), opset=13)
def factor_before_moves(g: Graph, x: str, c: str, node: NodeProto) -> str:
    """move(x W) * c = move(x (W c)), and / c likewise"""
    factor, value = g.const(c), x
    if factor is None or factor.dtype.kind != "f" or factor.ndim > (g.rank(x) or 0):
        raise MatchFailure("the factor is not a float, or has a larger rank")
    for _ in range(_MAX_CHAIN):
        producer = g.producer(value) if g.sole_user(value) is not None else None
        if producer is None or not nd.is_op(producer, *_MOVES):
            break
        value = producer.input[0]
    else:
        producer = None
    if producer is None or not nd.is_op(producer, "MatMul") or use_count(g, producer.input[1]) != 1:
        raise MatchFailure("its operand is not a MatMul, or the weight has other users")
    number = float(factor.reshape(-1)[0])
    if not number:
        raise MatchFailure("a factor of 0 would remove the weight")
    weight, number = g.const(producer.input[1]), 1 / number if nd.is_op(node, "Div") else number
    scaled = None if weight is None else rounded(weight.astype(np.float64) * number, weight)
    if scaled is None:
        raise MatchFailure("the weight is not constant, or its type cannot hold the scaled one")
    g.set_input(producer, 1, g.constant(g.model.weights.keep(scaled), producer.input[1]))
    return x
