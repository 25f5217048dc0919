"""Replace Gathers with affine indices by a view, a Slice, or a single row that broadcasts.

    GatherND(x, [arange(b)[:, None], arange(l)])         = x
    GatherND(x, Unsqueeze(i, -1))                        = Gather(x, i)
    Gather(Flatten(x), l arange(b)[:, None] + arange(l)) = x
    Gather(table, arange(l) + 2)                         = Slice(table, 2, l + 2)
    y + Gather(table, zeros)                             = y + table[0]
    Gather(table, where(i < 0, i + rows, i))             = Gather(table, i)

Exporters write masks and positions like this. `affine_index` recognizes the indices. The equations
hold for runs that do not fail: where a Gather out of range fails, a Slice ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.affine_index import Count, constant_count, count, size_in_inputs, truth
from passes.analysis.axes import positive_axes
from passes.analysis.operands import (
    broadcast,
    dims,
    int_operand,
    int_vector,
    same_shape,
    slice_ranges,
)
from passes.analysis.shapes.dims import sliced
from passes.simplify.canonicalize.views import viewed_as
from toolkit.ir import Array, Graph, Shape, TensorType, node as nd
from toolkit.ir.op_traits import BROADCASTING
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import rewrite
from toolkit.symbolic import Dim

x = var("x")


# -- all elements in order


@rewrite(op.GatherND(x, op.Concat(var(), ...).named("join")), opset=12)
def gather_nd_of_all(g: Graph, x: str, join: NodeProto, node: NodeProto) -> str | None:
    """Replace a GatherND whose indices, one per axis, enumerate x in order by a view of x."""
    shape, rank = g.shape(x), g.rank(join.output[0])
    axis = positive_axes([nd.attr(join, "axis", 0)], rank)
    if shape is None or rank is None or axis != [rank - 1] or nd.attr(node, "batch_dims", 0):
        return None
    counts = [_without_last(count(g, part)) for part in join.input]
    if len(counts) > len(shape):
        return None
    whole = _enumerated(counts, shape)
    return None if whole is None else viewed_as(g, x, (*whole, *shape[len(counts) :]), node)


@rewrite(
    op.GatherND(x, op.Unsqueeze(var("rows"), ...).shared().named("last")),
    op.GatherND(x, const("at")),
    opset=12,
)
def gather_nd_of_rows(
    g: Graph, x: str, rows: str | None, last: NodeProto | None, at: str | None, node: NodeProto
) -> str | None:
    """Replace a GatherND that indexes the first axis alone by a Gather."""
    if nd.attr(node, "batch_dims", 0):
        return None
    index = g.const(at) if at is not None else None
    if index is not None and index.ndim and index.shape[-1] == 1:
        return g.op("Gather", x, g.constant(index.reshape(index.shape[:-1]), "rows"), at=node)
    if rows is None or last is None:
        return None
    rank = g.rank(last.output[0])
    axes = positive_axes(int_operand(g, last, "axes", 1), rank)
    return g.op("Gather", x, rows, at=node) if rank is not None and axes == [rank - 1] else None


def _without_last(found: Count | None) -> Count | None:
    """Return the count in a shape without the last axis, which must have size 1."""
    if found is None or found.shape[-1] != 1:
        return None
    return Count(found.offset, found.strides, found.shape[:-1])


def _enumerated(counts: Sequence[Count | None], shape: Shape) -> Shape | None:
    """Return the shape of indices that count the leading axes of `shape` in order, or None."""
    axes: list[int] = []
    for found, size in zip(counts, shape, strict=False):
        if found is None or found.offset != 0 or len(found.strides) != 1:
            return None
        [(axis, stride)] = found.strides.items()
        if stride != 1 or found.shape[axis] != size or (axes and axis <= axes[-1]):
            return None
        axes.append(axis)
    whole = broadcast(*(found.shape for found in counts if found is not None))
    if whole is None or any(size != 1 for axis, size in enumerate(whole) if axis not in axes):
        return None
    return whole


@rewrite(op.Gather(x, var("at")))
def gather_of_all(g: Graph, x: str, at: str, node: NodeProto) -> str | None:
    """Replace a Gather of all entries of an axis in order by a view.

    The axis may be a product of axes: batch * length, indexed by length * i + j.
    """
    shape, index, stored = g.shape(x), g.shape(at), g.const(at)
    axes = positive_axes([nd.attr(node, "axis", 0)], g.rank(x))
    if shape is None or axes is None or index is None:
        return None
    entries: Dim = 1
    strides: dict[int, Dim] = {}
    for axis, size in reversed(list(enumerate(index))):
        if size != 1:
            strides[axis] = entries
            entries = entries * size
    size = shape[axes[0]]
    if entries != size:
        return None
    # Constants may count some entries from the end.
    if stored is not None and isinstance(size, int) and size:
        found = constant_count(stored % size)
    else:
        found = count(g, at)
    if found is None or found.offset != 0 or dict(found.strides) != strides:
        return None
    return viewed_as(g, x, (*shape[: axes[0]], *index, *shape[axes[0] + 1 :]), node)


# -- neighbouring rows


@rewrite(op.Gather(const("table", rank=2), var("at")), opset=10)
def gather_of_positions(g: Graph, table: str, at: str, node: NodeProto) -> str | None:
    """Replace a Gather of consecutive rows of a constant table by a Slice."""
    stored, found = g.const(table), count(g, at) if not g.is_const(at) else None
    if stored is None or found is None or len(found.strides) != 1 or nd.attr(node, "axis", 0):
        return None
    [(axis, stride)] = found.strides.items()
    first, rows = found.offset, stored.shape[0]
    if stride != 1 or not isinstance(first, int) or not 0 <= first < rows:
        return None
    if any(size != 1 for place, size in enumerate(found.shape) if place != axis):
        return None
    changed = first > 0 or len(found.shape) > 1
    if changed and g.use_count(table) != 1:
        return None  # the table would be stored twice
    end, length = _length(g, at, found.shape[axis], rows, node)
    size = sliced(rows - first, 0, length, 1)
    if size is None or (size != found.shape[axis] and not _is_size_checked(g, node, axis)):
        return None
    if changed:
        shape = [1] * len(found.shape)
        shape[axis] = rows - first
        table = g.constant(stored[first:].reshape(*shape, -1), "positions")
    bounds = int_vector(g, [0], "start"), end, int_vector(g, [axis], "axes")
    result = g.op("Slice", table, *bounds, at=node)
    sizes: list[Dim] = [1] * len(found.shape)
    sizes[axis] = size
    # The size may differ from the Gather's: where the table is too short, a Slice ends.
    g.learn_type(result, TensorType(g.dtype(table), (*sizes, stored.shape[1])))
    return result


def _is_size_checked(g: Graph, node: NodeProto, axis: int) -> bool:
    """Return whether every user broadcasts the rows against a value of the requested length.

    Then a table that is too short still fails.
    """
    value = node.output[0]
    shape = g.shape(value) or ()
    back = axis - len(shape)
    for user in g.users(value):
        if not nd.is_op(user, *BROADCASTING):
            return False
        others = [g.shape(name) or () for name in user.input if name != value]
        if not any(-back <= len(other) and other[back] == shape[axis] for other in others):
            return False
    return not g.is_output(value) and bool(shape)


def _length(g: Graph, at: str, size: Dim, rows: int, node: NodeProto) -> tuple[str, Dim | None]:
    """Return a vector with the number of positions, or an upper bound of it, and the number."""
    if isinstance(size, int):
        return int_vector(g, [size], "end"), size
    cut = g.producer(at)
    if cut is not None and nd.is_op(cut, "Slice") and len(cut.input) > 2:
        # The positions are sliced from a constant that has as many as the table has rows.
        whole, found, ends = g.shape(cut.input[0]), slice_ranges(g, cut), dims(g, cut.input[2])
        if whole and found and ends and len(found) == 1:
            [(axis, (start, _, _))] = found.items()
            if start == 0 and whole[axis] == rows:
                return cut.input[2], ends[0]
    place = size_in_inputs(g, size)
    if place is None or g.opset() < 15:
        return "", None
    return g.op("Shape", place[0], at=node, start=place[1], end=place[1] + 1), size


# -- one row for all


summed = op.any("Add", "Sub", "Mul")
gathered = op.Gather(const(), var()).shared()


@rewrite(summed(gathered, var()), summed(var(), gathered), opset=8)
def operand_of_one_row(g: Graph, node: NodeProto) -> str | None:
    """Replace a Gather of one row for every element by the row, which broadcasting repeats."""
    for slot, value in enumerate(node.input):
        shape = g.shape(node.input[1 - slot])
        row = _only_row(g, value)
        if row is None or shape is None:
            continue
        if broadcast(row.shape, shape) == g.shape(node.output[0]):
            values = list(node.input)
            values[slot] = g.constant(np.ascontiguousarray(row), "row")
            return g.op(node.op_type, *values, at=node)
    return None


def _only_row(g: Graph, value: str) -> Array | None:
    """Return the row of a constant table that a Gather with a uniform index takes, or None."""
    node = g.producer(value)
    if node is None or not nd.is_op(node, "Gather") or nd.attr(node, "axis", 0):
        return None
    table, at = g.const(node.input[0]), node.input[1]
    found = count(g, at) if table is not None and table.ndim and not g.is_const(at) else None
    if table is None or found is None or found.strides or not isinstance(found.offset, int):
        return None
    index, rows = found.offset, table.shape[0]
    return table[index] if -rows <= index < rows else None


# -- index arithmetic

_narrow = op.Cast(op.CumSum(var("steps"), ...).shared().named("total"), to=TensorProto.INT32)
_flag = op.Cast(var("flag"), to=TensorProto.INT32).shared()


@rewrite(op.Cast(op.Mul(_narrow, _flag), to=TensorProto.INT64), opset=13)
def widened_cumsum(
    g: Graph, steps: str, flag: str, total: NodeProto, node: NodeProto
) -> str | None:
    """Keep a CumSum of booleans in int64: the round trip through int32 never overflows."""
    counted = g.producer(steps)
    if counted is None or not nd.is_op(counted, "Cast"):
        return None
    if g.dtype(total.output[0]) != TensorProto.INT64 or g.dtype(flag) != TensorProto.BOOL:
        return None
    if g.dtype(counted.input[0]) != TensorProto.BOOL:
        return None
    wide = steps if counted.input[0] == flag else g.op("Cast", flag, at=node, to=TensorProto.INT64)
    return g.op("Mul", total.output[0], wide, at=node)


at = var("at")
_from_the_end = op.Add(at, const("rows"))
_is_negative = op.Less(at | op.Cast(at), const("zero"))


@rewrite(op.Gather(x, op.Where(_is_negative, _from_the_end, at)), opset=11)
def gather_from_the_end(
    g: Graph, x: str, at: str, rows: str, zero: str, node: NodeProto
) -> str | None:
    """Gather(x, where(i < 0, i + rows, i)) = Gather(x, i), which counts from the end anyway."""
    axis: int = nd.attr(node, "axis", 0)
    size = (g.shape(x) or ())[axis:][:1]
    limit, shift = g.const(zero), g.const(rows)
    if limit is None or shift is None or limit.size != 1 or shift.size != 1:
        return None
    if limit.reshape(-1)[0] != 0 or size != (int(shift.reshape(-1)[0]),):
        return None
    return g.op("Gather", x, at, at=node, axis=axis) if g.dtype(at) in _INDICES else None


_INDICES = (TensorProto.INT32, TensorProto.INT64)


# -- known conditions


@rewrite(op.any("And", "Or")(x, var("c")), opset=7)
def known_operand(g: Graph, x: str, c: str, node: NodeProto) -> str | None:
    """x and true = x, x or false = x, where symbolic sizes decide the other operand."""
    wanted = nd.is_op(node, "And")
    for value, other in ((x, c), (c, x)):
        if same_shape(g, value, node.output[0]) and truth(g, other) is wanted:
            return value
    return None


RULES = (
    widened_cumsum,
    known_operand,
    gather_nd_of_all,
    gather_nd_of_rows,
    gather_of_all,
    gather_of_positions,
    gather_from_the_end,
    operand_of_one_row,
)
