"""A product with a matrix of zeros and single ones picks columns or rows: no arithmetic at all.

    x P  =  Gather(x, i, axis=-1)     where column j of P has its only one in row i[j]
    P x  =  Gather(x, i, axis=-2)     where row j of P has its only one in column i[j]

A run of neighbours is a Slice, and all of them in their order is x itself. Columns without a one,
with several, or with any other number are a near miss.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import int_vector
from toolkit.ir.graph import Array, Graph
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

_LEAST = 8
"""From this many columns to choose from on, copying beats multiplying."""

picks = const("p", rank=2)


@rewrite(op.MatMul(var("x"), picks), opset=13)
def one_hot_columns(g: Graph, x: str, p: str, node: NodeProto) -> str:
    """x P = Gather(x, i, axis=-1)"""
    return _pick(g, x, p, -1, node)


@rewrite(op.MatMul(picks, var("x")), opset=13)
def one_hot_rows(g: Graph, x: str, p: str, node: NodeProto) -> str:
    """P x = Gather(x, i, axis=-2)"""
    return _pick(g, x, p, -2, node)


def _pick(g: Graph, x: str, p: str, axis: int, node: NodeProto) -> str:
    matrix, rank = g.const(p), g.rank(x)
    if matrix is None or rank is None or rank < 2:
        raise MatchFailure("the rank of what it picks from is not known, or less than 2")
    matrix = matrix if axis == -1 else np.transpose(matrix)
    if matrix.shape[0] < _LEAST or not matrix.shape[1]:
        raise MatchFailure("it is too small to gain")
    chosen = _ones(matrix)
    first, count = int(chosen[0]), len(chosen)
    if not np.array_equal(chosen, np.arange(first, first + count)):
        return g.op("Gather", x, int_vector(g, chosen.tolist(), "picks"), at=node, axis=rank + axis)
    if count == matrix.shape[0]:
        return x
    bounds = (([first], "start"), ([first + count], "end"), ([rank + axis], "axis"))
    return g.op("Slice", x, *(int_vector(g, value, name) for value, name in bounds), at=node)


def _ones(matrix: Array) -> Array:
    """The row of the only one in each column; a MatchFailure when there is anything else."""
    # A column of mostly other numbers tells at once, without reading all of a large weight.
    if np.count_nonzero(matrix[:, 0]) != 1 or np.count_nonzero(matrix) != matrix.shape[1]:
        raise MatchFailure("it is not one-hot")
    chosen = np.argmax(matrix != 0, axis=0)
    if not (matrix[chosen, np.arange(matrix.shape[1])] == 1).all():
        raise MatchFailure("it is not one-hot")
    return chosen


RULES = (one_hot_columns, one_hot_rows)
