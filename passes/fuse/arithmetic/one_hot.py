"""Rewrite products with a one-hot matrix, which select columns or rows, as Gather.

    x P  =  Gather(x, i, axis=-1)     where column j of P has its only 1 in row i[j]
    P x  =  Gather(x, i, axis=-2)     where row j of P has its only 1 in column i[j]

Consecutive columns become a Slice, and all columns in order x itself.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import int_vector
from toolkit.ir.graph import Array, Graph
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

_MIN_SIZE = 8
"""Fewest columns to select from for which a Gather is faster than a product."""

one_hot = const("p", rank=2)


@rewrite(op.MatMul(var("x"), one_hot), opset=13)
def one_hot_columns(g: Graph, x: str, p: str, node: NodeProto) -> str:
    """x P = Gather(x, i, axis=-1)"""
    return _select(g, x, p, -1, node)


@rewrite(op.MatMul(one_hot, var("x")), opset=13)
def one_hot_rows(g: Graph, x: str, p: str, node: NodeProto) -> str:
    """P x = Gather(x, i, axis=-2)"""
    return _select(g, x, p, -2, node)


def _select(g: Graph, x: str, p: str, axis: int, node: NodeProto) -> str:
    matrix, rank = g.const(p), g.rank(x)
    if matrix is None or rank is None or rank < 2:
        raise MatchFailure("the rank of its operand is not known, or less than 2")
    matrix = matrix if axis == -1 else np.transpose(matrix)
    if matrix.shape[0] < _MIN_SIZE or not matrix.shape[1]:
        raise MatchFailure("it is too small for a Gather to be faster")
    chosen = _ones(matrix)
    first, count = int(chosen[0]), len(chosen)
    if not np.array_equal(chosen, np.arange(first, first + count)):
        return g.op("Gather", x, int_vector(g, chosen.tolist(), "picks"), at=node, axis=rank + axis)
    if count == matrix.shape[0]:
        return x
    bounds = (([first], "start"), ([first + count], "end"), ([rank + axis], "axis"))
    return g.op("Slice", x, *(int_vector(g, value, name) for value, name in bounds), at=node)


def _ones(matrix: Array) -> Array:
    """Return the row of the 1 in each column; raise MatchFailure if a column is not one-hot."""
    # The first column rules out most large weights without reading all of them.
    if np.count_nonzero(matrix[:, 0]) != 1 or np.count_nonzero(matrix) != matrix.shape[1]:
        raise MatchFailure("it is not one-hot")
    chosen = np.argmax(matrix != 0, axis=0)
    if not (matrix[chosen, np.arange(matrix.shape[1])] == 1).all():
        raise MatchFailure("it is not one-hot")
    return chosen


RULES = (one_hot_columns, one_hot_rows)
