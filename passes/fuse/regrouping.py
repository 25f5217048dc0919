"""Axes that are merged before a Transpose and split again behind it, split from the start.

    Reshape(Transpose(Reshape(x, [l, 8 b, d])), [b, 8, l, d]) = Transpose(Reshape(x, [l, b, 8, d]))

`nn.MultiheadAttention` separates its heads like this. It is a Reshape less, and mostly one that has
to be told sizes that only the run knows.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.operands import permutation, reshape, reshape_target, transpose
from toolkit.graph import Graph
from toolkit.misses import Miss
from toolkit.pattern import op, var
from toolkit.rules import rewrite
from toolkit.types import Shape


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
