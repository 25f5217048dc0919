"""Einsums of two operands that are products of matrices.

    bind,bjnd->bnij    =    MatMul(Transpose(a: b n i d), Transpose(b: b n d j))

A label of both operands and of the result counts a batch of matrices, one of both operands alone is
summed over, the others are rows and columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from onnx import NodeProto

from passes.operands import broadcast, transpose
from toolkit.graph import Graph
from toolkit.pattern import op, var
from toolkit.rules import Miss, rewrite
from toolkit.types import TensorType

_TWO_OPERANDS = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)")


@rewrite(op.Einsum(var("a"), var("b"), equation=var("equation")), opset=12)
def einsum_of_matrices(g: Graph, a: str, b: str, equation: str, node: NodeProto) -> str:
    """An Einsum with one label for the rows, one for the columns, and one that is summed over"""
    found = _TWO_OPERANDS.fullmatch(equation.replace(" ", ""))
    if found is None:
        raise Miss(f"'{equation}' does not name all axes of two operands and a result")
    left, right, result = found.groups()
    if any(len(set(labels)) != len(labels) for labels in (left, right, result)):
        raise Miss(f"'{equation}' has a label twice in one place")
    batch = [label for label in result if label in left and label in right]
    summed = [label for label in left if label in right and label not in result]
    rows = [label for label in left if label not in right]
    columns = [label for label in right if label not in left]
    if not len(summed) == len(rows) == len(columns) == 1 or set(rows + columns) - set(result):
        raise Miss(f"'{equation}' is no product of matrices")
    if not _is_same_size(g, a, left.index(summed[0]), b, right.index(summed[0])):
        raise Miss(f"'{summed[0]}' may be 1 in one of the operands, and repeated")
    first = _ordered(g, a, left, [*batch, *rows, *summed], node)
    second = _ordered(g, b, right, [*batch, *summed, *columns], node)
    product = g.op("MatMul", first, second, at=node)
    left_shape, right_shape = g.shape(first), g.shape(second)
    if left_shape is not None and right_shape is not None:
        sizes = broadcast(left_shape[:-2], right_shape[:-2])
        if sizes is not None:
            whole = (*sizes, left_shape[-2], right_shape[-1])
            g.learn_type(product, TensorType(g.dtype(a), whole))
    return _ordered(g, product, [*batch, *rows, *columns], list(result), node)


def _is_same_size(g: Graph, a: str, axis: int, b: str, other: int) -> bool:
    first, second = g.shape(a), g.shape(b)
    return first is not None and second is not None and first[axis] == second[other]


def _ordered(
    g: Graph, value: str, labels: Sequence[str], wanted: Sequence[str], node: NodeProto
) -> str:
    perm = [list(labels).index(label) for label in wanted]
    if perm == sorted(perm):
        return value
    moved, shape = transpose(g, value, perm, at=node), g.shape(value)
    if shape is not None:
        g.learn_type(moved, TensorType(g.dtype(value), tuple(shape[axis] for axis in perm)))
    return moved


RULES = (einsum_of_matrices,)
