"""Einsums of two operands that are products of matrices.

    bind,bjnd->bnij    =    MatMul(Transpose(a: b n i d), Transpose(b: b n d j))
    ibh,hnd->ibnd      =    Reshape(MatMul(a, w))     with w the constant as [h, n d]

A label of both operands and of the result counts a batch of matrices, one of both operands alone is
summed over, the others are rows and columns. Of a linear map, whose matrix is a constant, several
may be summed over, and several be columns.
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
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import FLOATS, TensorType
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

_TWO_OPERANDS = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)")


@dataclass(frozen=True, slots=True)
class Labels:
    """The axes of two operands and their product, a letter each."""

    left: str
    right: str
    result: str

    @classmethod
    def of(cls, equation: str) -> Labels:
        found = _TWO_OPERANDS.fullmatch(equation.replace(" ", ""))
        if found is None:
            raise MatchFailure(f"'{equation}' does not name all axes of two operands and a result")
        if any(len(set(labels)) != len(labels) for labels in found.groups()):
            raise MatchFailure(f"'{equation}' has a label twice in one place")
        return cls(*found.groups())

    @property
    def batch(self) -> list[str]:
        return [label for label in self.result if label in self.left and label in self.right]

    @property
    def summed(self) -> list[str]:
        return [label for label in self.left if label in self.right and label not in self.result]

    @property
    def rows(self) -> list[str]:
        return [label for label in self.left if label not in self.right]

    @property
    def columns(self) -> list[str]:
        return [label for label in self.right if label not in self.left]


@rewrite(op.Einsum(var("a"), const("w", dtype=tuple(FLOATS)), equation=var("equation")), opset=12)
def einsum_with_a_weight(g: Graph, a: str, w: str, equation: str, node: NodeProto) -> str:
    """An Einsum with a constant: the rows first, then what is summed over, or the columns"""
    labels, shape = Labels.of(equation), g.shape(a)
    weight: Array | None = g.const(w)
    rows, summed = labels.rows, labels.summed
    columns = labels.result[len(rows) :]
    if labels.left != "".join(rows + summed) or labels.result[: len(rows)] != "".join(rows):
        raise MatchFailure(f"'{equation}' is no map of the last axes")
    if not summed or not columns or set(columns) != set(labels.columns):
        raise MatchFailure(f"'{equation}' is no map of the last axes")
    if weight is None or shape is None or not weight.size or len(shape) != len(labels.left):
        raise MatchFailure("the shapes of its operands are not known")
    order = [labels.right.index(label) for label in (*summed, *columns)]
    sizes: list[int] = [weight.shape[axis] for axis in order]
    summands, results = prod(sizes[: len(summed)]), prod(sizes[len(summed) :])
    if list(shape[len(rows) :]) != sizes[: len(summed)]:
        raise MatchFailure("an axis of 1 that is summed over may be repeated")
    if not may_copy(g, w):
        raise MatchFailure("its weight has other readers, and is too large to be copied")
    matrix: Array = np.transpose(weight, order).reshape(summands, results)
    x, kept = a, (0,) * len(rows)
    if len(summed) > 1:
        x = reshape(g, a, (*kept, summands), at=node)
        g.learn_type(x, TensorType(g.dtype(a), (*shape[: len(rows)], summands)))
    product = g.op("MatMul", x, g.constant(matrix, w), at=node)
    if len(columns) == 1:
        return product
    g.learn_type(product, TensorType(g.dtype(a), (*shape[: len(rows)], results)))
    return reshape(g, product, (*kept, *sizes[len(summed) :]), at=node)


@rewrite(op.Einsum(var("a"), var("b"), equation=var("equation")), opset=12)
def einsum_of_matrices(g: Graph, a: str, b: str, equation: str, node: NodeProto) -> str:
    """An Einsum with one label for the rows, one for the columns, and one that is summed over"""
    labels = Labels.of(equation)
    left, right, result = labels.left, labels.right, labels.result
    batch, rows, summed, columns = labels.batch, labels.rows, labels.summed, labels.columns
    if not len(summed) == len(rows) == len(columns) == 1 or set(rows + columns) - set(result):
        raise MatchFailure(f"'{equation}' is no product of matrices")
    if not _is_same_size(g, a, left.index(summed[0]), b, right.index(summed[0])):
        raise MatchFailure(f"'{summed[0]}' may be 1 in one of the operands, and repeated")
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


RULES = (einsum_with_a_weight, einsum_of_matrices)
