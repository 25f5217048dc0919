"""Axes that are merged before a Transpose and split again behind it, split from the start.

    Reshape(Transpose(Reshape(x, [l, 8 b, d])), [b, 8, l, d]) = Transpose(Reshape(x, [l, b, 8, d]))

`nn.MultiheadAttention` separates its heads like this. It is a Reshape less, and mostly one that has
to be told sizes that only the run knows.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import permutation, reshape, reshape_target, transpose
from passes.fuse.linear.affine import only_reader
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import Shape
from toolkit.pattern import const, op, var
from toolkit.rewriting.match_failure import Miss
from toolkit.rewriting.rule import rewrite


@rewrite(
    op.Reshape(op.Transpose(op.Reshape(var("x"), ...).named("first")).named("turn"), ...), opset=5
)
def split_behind_transpose(
    g: Graph, x: str, first: NodeProto, turn: NodeProto, node: NodeProto
) -> str:
    """Reshape(Transpose(Reshape(x))) = Transpose(Reshape(x)) where the last one splits an axis"""
    perm, shape, result = permutation(g, turn), g.shape(first.output[0]), g.shape(node.output[0])
    if perm is None or shape is None or result is None:
        raise Miss("the shapes on the way are not known")
    place = _split_axis(tuple(shape[axis] for axis in perm), result)
    extra = len(result) - len(shape)
    split = perm[place]
    parts = result[place : place + extra + 1]
    target = reshape_target(g.shape(x), (*shape[:split], *parts, *shape[split + 1 :]))
    if target is None:
        raise Miss("a Reshape cannot be told the sizes")
    order: list[int] = []
    for axis in perm:
        start = axis if axis <= split else axis + extra
        order.extend(range(start, start + extra + 1) if axis == split else (start,))
    return transpose(g, reshape(g, x, target, at=node), order, at=node)


def _split_axis(shape: Shape, result: Shape) -> int:
    """The only axis of `shape` that `result` has in parts; all others are the same."""
    if len(result) <= len(shape):
        raise Miss("no axis is split")
    place = 0
    while place < len(shape) - 1 and shape[place] == result[place]:
        place += 1
    behind = len(shape) - place - 1
    if behind and shape[-behind:] != result[-behind:]:
        raise Miss("more than one axis changes")
    return place


_FACTOR = const("c", where=lambda array: array.size == 1)
_MOVES = ("Transpose", "GatherElements", "Gather", "Reshape", "Slice")
_LONGEST_WAY = 4


@rewrite(op.Mul(var("x"), _FACTOR), op.Div(var("x"), _FACTOR), opset=13)
def factor_before_moves(g: Graph, x: str, c: str, node: NodeProto) -> str:
    """moved(x W) * c = moved(x (W c)), and / c likewise"""
    factor, value = g.const(c), x
    if factor is None or factor.dtype.kind != "f" or factor.ndim > (g.rank(x) or 0):
        raise Miss("the factor is no number, or makes axes")
    for _ in range(_LONGEST_WAY):
        maker = g.producer(value) if only_reader(g, value) is not None else None
        if maker is None or not nd.is_op(maker, *_MOVES):
            break
        value = maker.input[0]
    else:
        maker = None
    weight = g.const(maker.input[1]) if maker is not None and nd.is_op(maker, "MatMul") else None
    if maker is None or weight is None or g.use_count(maker.input[1]) != 1:
        raise Miss("it is no product with a weight of its own that is moved")
    number = float(factor.reshape(-1)[0])
    if not number:
        raise Miss("a factor of 0 says nothing of the weight")
    wide = weight.astype(np.float64) * (1 / number if nd.is_op(node, "Div") else number)
    with np.errstate(over="ignore"):
        scaled = wide.astype(weight.dtype)
    if not np.isfinite(scaled).all():
        raise Miss("its element type cannot hold the scaled weight")
    g.set_input(maker, 1, g.constant(g.model.weights.keep(scaled), maker.input[1]))
    return x
