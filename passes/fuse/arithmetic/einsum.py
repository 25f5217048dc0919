"""Rewrite Einsums of two operands that are matrix products as MatMul.

    bind,bjnd->bnij    =    MatMul(Transpose(a: b n i d), Transpose(b: b n d j))
    ibh,hnd->ibnd      =    Reshape(MatMul(a, w))     with w the constant as [h, n d]

A label in both operands and the result is a batch axis; one in both operands alone is summed over;
the others are rows and columns. With a constant matrix, several axes may be summed over, and
several may be columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import broadcast, reshape, transpose
from passes.fuse.linear.affine import may_copy
from passes.fuse.typed_op import typed_op
from toolkit.ir import FLOATS, Array, Graph, TensorType
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

_EQUATION = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)")


@dataclass(frozen=True, slots=True)
class EinsumLabels:
    """The axes of two operands and their product, as one letter each."""

    left: str
    right: str
    result: str
    batch: list[str]
    summed: list[str]
    rows: list[str]
    columns: list[str]

    @classmethod
    def of(cls, equation: str) -> EinsumLabels:
        found = _EQUATION.fullmatch(equation.replace(" ", ""))
        if found is None:
            raise MatchFailure(f"'{equation}' does not name all axes of two operands and a result")
        left, right, result = found.groups()
        if any(len(set(labels)) != len(labels) for labels in (left, right, result)):
            raise MatchFailure(f"'{equation}' repeats a label within an operand or the result")
        return cls(
            *(left, right, result),
            batch=[label for label in result if label in left and label in right],
            summed=[label for label in left if label in right and label not in result],
            rows=[label for label in left if label not in right],
            columns=[label for label in right if label not in left],
        )


@rewrite(op.Einsum(var("a"), const("w", dtype=tuple(FLOATS)), equation=var("equation")), opset=12)
def einsum_with_a_weight(g: Graph, a: str, w: str, equation: str, node: NodeProto) -> str:
    """rows summed, weight -> rows columns = Reshape(MatMul(Reshape(a), weight as a matrix))"""
    labels, shape = EinsumLabels.of(equation), g.shape(a)
    weight: Array | None = g.const(w)
    rows, summed = labels.rows, labels.summed
    columns = labels.result[len(rows) :]
    rows_first = list(labels.left) == rows + summed and list(labels.result) == [*rows, *columns]
    if not rows_first or not summed or not columns or set(columns) != set(labels.columns):
        raise MatchFailure(f"'{equation}' is not a linear map of the last axes")
    if weight is None or shape is None or not weight.size or len(shape) != len(labels.left):
        raise MatchFailure("the shapes of its operands are not known")
    order = [labels.right.index(label) for label in (*summed, *columns)]
    sizes: list[int] = [weight.shape[axis] for axis in order]
    summands, results = prod(sizes[: len(summed)]), prod(sizes[len(summed) :])
    if list(shape[len(rows) :]) != sizes[: len(summed)]:
        raise MatchFailure("a summed axis may be broadcast")
    if not may_copy(g, w):
        raise MatchFailure("its weight has other users, and is too large to be copied")
    matrix: Array = np.transpose(weight, order).reshape(summands, results)
    leading, kept = shape[: len(rows)], (0,) * len(rows)
    x = reshape(g, a, (*kept, summands), node, (*leading, summands)) if len(summed) > 1 else a
    known = TensorType(g.dtype(a), (*leading, results))
    product = typed_op(g, known, "MatMul", x, g.constant(matrix, w), at=node)
    return (
        product
        if len(columns) == 1
        else reshape(g, product, (*kept, *sizes[len(summed) :]), at=node)
    )


@rewrite(op.Einsum(var("a"), var("b"), equation=var("equation")), opset=12)
def einsum_of_matrices(g: Graph, a: str, b: str, equation: str, node: NodeProto) -> str:
    """batch rows summed, batch summed columns -> batch rows columns = MatMul(a, b)"""
    labels = EinsumLabels.of(equation)
    left, right, result = labels.left, labels.right, labels.result
    batch, rows, summed, columns = labels.batch, labels.rows, labels.summed, labels.columns
    if not len(summed) == len(rows) == len(columns) == 1 or set(rows + columns) - set(result):
        raise MatchFailure(f"'{equation}' is not a matrix product")
    sizes = [
        shape[labels.index(summed[0])]
        for shape, labels in ((g.shape(a), left), (g.shape(b), right))
        if shape
    ]
    if len(sizes) != 2 or sizes[0] != sizes[1]:
        raise MatchFailure(f"axis '{summed[0]}' may be broadcast")
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


def _ordered(
    g: Graph, value: str, labels: Sequence[str], wanted: Sequence[str], node: NodeProto
) -> str:
    """Transpose a value from the axis order `labels` to the order `wanted`."""
    perm = [list(labels).index(label) for label in wanted]
    return value if perm == sorted(perm) else transpose(g, value, perm, at=node)


RULES = (einsum_with_a_weight, einsum_of_matrices)
