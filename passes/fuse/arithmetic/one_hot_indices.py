"""Rewrite products of one-hot encoded indices and a table as Gather.

one_hot(i) W  =  Gather(W', i)      where W' has a row of zeros for indices out of range
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import ints
from toolkit.ir.graph import Array, Graph
from toolkit.pattern import const, maybe_cast, op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

table = const("table", rank=2)
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
index = var("index", dtype=_INTEGERS)
column = var("column", dtype=_INTEGERS)
_MAX_ROWS = 4096
"""Largest table, in rows, that is copied to add a row of zeros."""


@rewrite(op.MatMul(maybe_cast(op.OneHot(index, const("depth"), const("values"), axis=-1)), table))
def one_hot_product(
    g: Graph, index: str, depth: str, values: str, table: str, node: NodeProto
) -> str:
    """OneHot(i) W: negative indices count from the end; the result is 0 for indices out of range"""
    weights, rows, levels = g.const(table), ints(g, depth), g.const(values)
    if weights is None or rows != [len(weights)] or levels is None or levels.tolist() != [0, 1]:
        raise MatchFailure("the table does not have a row for each index")
    size, padded = len(weights), np.concatenate([_with_zeros(weights), weights])
    return _gather_rows(g, padded, index, g.dtype(index), (-size - 1, size), node)


@rewrite(op.MatMul(op.Cast(op.Equal(column, const("classes"))), table), opset=13)
def compared_one_hot_product(
    g: Graph, column: str, classes: str, table: str, node: NodeProto
) -> str:
    """(i == [0, 1, ...]) W, with i as a column"""
    weights, listed, shape = g.const(table), g.const(classes), g.shape(column)
    if shape is None or not shape or shape[-1] != 1:
        raise MatchFailure("the last axis of the indices is not of size 1")
    if weights is None or listed is None:
        raise MatchFailure("the table is not constant")
    if listed.reshape(-1).tolist() != list(range(len(weights))):
        raise MatchFailure("the table does not have a row for each index")
    if listed.shape[-1:] != (listed.size,) or listed.ndim > len(shape):
        raise MatchFailure("the classes do not lie along the last axis")
    flat = g.op("Squeeze", column, g.constant(np.array([-1]), "axes"), at=node)
    return _gather_rows(g, _with_zeros(weights), flat, g.dtype(column), (-1, len(weights)), node)


def _with_zeros(weights: Array) -> Array:
    """Return a table with a row of zeros appended."""
    if len(weights) > _MAX_ROWS:
        raise MatchFailure("the table is too large to be copied")
    return np.concatenate([weights, np.zeros_like(weights[:1])])


def _gather_rows(
    g: Graph, padded: Array, index: str, dtype: int, limits: tuple[int, int], node: NodeProto
) -> str:
    """Write a Gather of rows; indices out of range are clipped to `limits`, a row of zeros each."""
    kind = np.int32 if dtype == TensorProto.INT32 else np.int64
    bounds = (g.constant(np.array(limit, dtype=kind), "limit") for limit in limits)
    inside = g.op("Clip", index, *bounds, at=node)
    return g.op("Gather", g.constant(padded, "table"), inside, at=node, axis=0)


RULES = (one_hot_product, compared_one_hot_product)
