"""Gathering by computed indices that count: a view, a Slice, or one row for all.

    GatherND(x, [arange(b)[:, None], arange(l)])     = x
    GatherND(x, Unsqueeze(i, -1))                    = Gather(x, i)
    Gather(Flatten(x), l arange(b)[:, None] + arange(l)) = x
    Gather(table, arange(l) + 2)                     = Slice(table, 2, l + 2)
    y + Gather(table, zeros)                         = y + table[0]
    Gather(table, where(i < 0, i + rows, i))         = Gather(table, i)

Exporters write masks and positions like this. `affine_index` tells what an index holds. All of
it holds for runs that do not fail: a Gather out of range fails where a Slice ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.affine_index import Count, count, size_in_inputs, truth
from passes.analysis.axes import positive_axes
from passes.analysis.operands import (
    broadcast,
    dims,
    int_operand,
    int_vector,
    operand,
    same_shape,
    unsqueeze,
)
from passes.analysis.shapes.dims import sliced
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.op_traits import BROADCASTING
from toolkit.ir.tensor_type import Shape, TensorType
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import rewrite
from toolkit.symbolic import Dim

x = var("x")


# -- everything, in order


@rewrite(op.GatherND(x, op.Concat(var(), ...).named("join")), opset=12)
def gather_nd_of_all(g: Graph, x: str, join: NodeProto, node: NodeProto) -> str | None:
    """An index for each axis of x, which together name all elements in order."""
    shape, rank = g.shape(x), g.rank(join.output[0])
    axis = positive_axes([nd.attr(join, "axis", 0)], rank)
    if shape is None or rank is None or axis != [rank - 1] or nd.attr(node, "batch_dims", 0):
        return None
    counts = [_without_last(count(g, part)) for part in join.input]
    if len(counts) > len(shape):
        return None
    places = _places(counts, shape)
    return None if places is None else _spread(g, x, places, rank - 1, node)


@rewrite(
    op.GatherND(x, op.Unsqueeze(var("rows"), ...).shared().named("last")),
    op.GatherND(x, const("at")),
    opset=12,
)
def gather_nd_of_rows(
    g: Graph, x: str, rows: str | None, last: NodeProto | None, at: str | None, node: NodeProto
) -> str | None:
    """One index, for the first axis of x."""
    if nd.attr(node, "batch_dims", 0):
        return None
    places = g.const(at) if at is not None else None
    if places is not None and places.ndim and places.shape[-1] == 1:
        return g.op("Gather", x, g.constant(places.reshape(places.shape[:-1]), "rows"), at=node)
    if rows is None or last is None:
        return None
    rank = g.rank(last.output[0])
    axes = positive_axes(int_operand(g, last, "axes", 1), rank)
    return g.op("Gather", x, rows, at=node) if rank is not None and axes == [rank - 1] else None


def _without_last(found: Count | None) -> Count | None:
    """The count in a shape without the last axis, which must be of size 1."""
    if found is None or found.shape[-1] != 1:
        return None
    return Count(found.offset, found.strides, found.shape[:-1])


def _places(counts: Sequence[Count | None], shape: Shape) -> list[int] | None:
    """For each axis of `shape`, the axis of the indices that counts it from end to end."""
    places: list[int] = []
    for found, size in zip(counts, shape, strict=False):
        if found is None or found.offset != 0 or len(found.strides) != 1:
            return None
        [(axis, stride)] = found.strides.items()
        if stride != 1 or found.shape[axis] != size or (places and axis <= places[-1]):
            return None
        places.append(axis)
    whole = broadcast(*(found.shape for found in counts if found is not None))
    if whole is None or any(size != 1 for axis, size in enumerate(whole) if axis not in places):
        return None
    return places


def _spread(g: Graph, x: str, places: Sequence[int], rank: int, node: NodeProto) -> str:
    """x with its first axes at these places of `rank` axes, and the rest of its axes behind."""
    new = [axis for axis in range(rank) if axis not in places]
    return unsqueeze(g, x, new, at=node) if new else x


@rewrite(op.Gather(x, var("at")))
def gather_in_order(g: Graph, x: str, at: str, node: NodeProto) -> str | None:
    """All entries of an axis in order, of which a number is only known at run time."""
    shape, axes = g.shape(x), positive_axes([nd.attr(node, "axis", 0)], g.rank(x))
    if shape is None or axes is None or g.is_const(at):
        return None
    found = count(g, at)
    if found is None or len(found.strides) != 1:
        return _gather_rows(g, x, found, axes[0], node)
    [(axis, stride)] = found.strides.items()
    if (found.offset, stride) != (0, 1) or found.shape[axis] != shape[axes[0]]:
        return None
    if any(size != 1 for place, size in enumerate(found.shape) if place != axis):
        return None
    new = [axes[0] + place for place in range(len(found.shape)) if place != axis]
    return unsqueeze(g, x, new, at=node) if new else x


def _gather_rows(
    g: Graph, flat: str, found: Count | None, axis: int, node: NodeProto
) -> str | None:
    """All entries of axes that were merged into the first one, in order."""
    view = g.producer(flat)
    if found is None or found.offset != 0 or axis or not nd.is_op(view, "Reshape", "Flatten"):
        return None
    source = view.input[0] if view is not None else ""
    shape, merged = g.shape(source), g.shape(flat)
    if shape is None or not merged:
        return None
    # Where the source ends in axes of size 1, the view may have more or fewer of them.
    rest = [size for size in merged[1:] if size != 1]
    lead = len(shape) - len(rest)
    while lead > 0 and shape[lead - 1] == 1:
        lead -= 1
    if [size for size in shape[lead:] if size != 1] != rest:
        return None
    step: Dim = 1
    places: list[int] = []
    for size in reversed(shape[:lead]):
        if size == 1:
            return None
        place = [a for a, stride in found.strides.items() if stride == step]
        if len(place) != 1 or found.shape[place[0]] != size:
            return None
        places.insert(0, place[0])
        step = step * size
    if places != sorted(places) or len(places) != len(found.strides) or merged[0] != step:
        return None
    if any(size != 1 for place, size in enumerate(found.shape) if place not in places):
        return None
    if tuple(shape[lead:]) == tuple(merged[1:]):
        return _spread(g, source, places, len(found.shape), node)
    if lead != len(shape):
        return None
    # [batch, length] was flattened to [batch * length, 1]: the axes of size 1 follow.
    rank = len(found.shape) + len(merged) - 1
    return _spread(g, source, places, rank, node)


# -- neighbours


@rewrite(op.Gather(const("table", rank=2), var("at")), opset=10)
def gather_of_positions(g: Graph, table: str, at: str, node: NodeProto) -> str | None:
    """Rows of a table from one to another."""
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
        return None  # it would be stored twice
    end, length = _length(g, at, found.shape[axis], rows, node)
    size = sliced(rows - first, 0, length, 1)
    if size is None or (size != found.shape[axis] and not _is_measured(g, node, axis)):
        return None
    if changed:
        shape = [1] * len(found.shape)
        shape[axis] = rows - first
        table = g.constant(stored[first:].reshape(*shape, -1), "positions")
    bounds = int_vector(g, [0], "start"), end, int_vector(g, [axis], "axes")
    result = g.op("Slice", table, *bounds, at=node)
    sizes: list[Dim] = [1] * len(found.shape)
    sizes[axis] = size
    # Not the size that the Gather had: where the table is too short, a Slice ends.
    g.learn_type(result, TensorType(g.dtype(table), (*sizes, stored.shape[1])))
    return result


def _is_measured(g: Graph, node: NodeProto, axis: int) -> bool:
    """Whether all that reads the rows broadcasts them against as many as the indices ask for.

    Then their number is known without them, and a table that is too short still fails.
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
    """A vector with the number of positions, which may say more than there are, and the number."""
    if isinstance(size, int):
        return int_vector(g, [size], "end"), size
    cut = g.producer(at)
    if cut is not None and nd.is_op(cut, "Slice") and len(cut.input) > 2:
        # A table of positions cut to the length: the table of rows is as long.
        whole, ends = g.shape(cut.input[0]) or (), dims(g, cut.input[2])
        starts, axes = operand(g, cut, "starts", 1), int_operand(g, cut, "axes", 3, absent=[0])
        if starts == [0] and ends and axes and len(axes) == 1 and whole[axes[0]] == rows:
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
    """One row of a table, taken for every element: broadcasting repeats it as well."""
    for place, value in enumerate(node.input):
        shape = g.shape(node.input[1 - place])
        row = _only_row(g, value)
        if row is None or shape is None:
            continue
        if broadcast(row.shape, shape) == g.shape(node.output[0]):
            values = list(node.input)
            values[place] = g.constant(np.ascontiguousarray(row), "row")
            return g.op(node.op_type, *values, at=node)
    return None


def _only_row(g: Graph, value: str) -> Array | None:
    """The row of a constant table that a Gather takes, by an index that is one everywhere."""
    node = g.producer(value)
    if node is None or not nd.is_op(node, "Gather") or nd.attr(node, "axis", 0):
        return None
    table, at = g.const(node.input[0]), node.input[1]
    found = count(g, at) if table is not None and table.ndim and not g.is_const(at) else None
    if table is None or found is None or found.strides or not isinstance(found.offset, int):
        return None
    index, rows = found.offset, table.shape[0]
    return table[index] if -rows <= index < rows else None


# -- narrow detours

_narrow = op.Cast(op.CumSum(var("steps"), ...).shared().named("total"), to=TensorProto.INT32)
_flag = op.Cast(var("flag"), to=TensorProto.INT32).shared()


@rewrite(op.Cast(op.Mul(_narrow, _flag), to=TensorProto.INT64), opset=13)
def counted_in_narrow_integers(
    g: Graph, steps: str, flag: str, total: NodeProto, node: NodeProto
) -> str | None:
    """How many were true so far, in 32 bits and back: no axis is so long that it would matter."""
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
    """An index below 0 counts from the end anyway. (One below -rows is out of range then.)"""
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
    """x and true, x or false, where comparing counts tells."""
    wanted = nd.is_op(node, "And")
    for value, other in ((x, c), (c, x)):
        if same_shape(g, value, node.output[0]) and truth(g, other) is wanted:
            return value
    return None


RULES = (
    counted_in_narrow_integers,
    known_operand,
    gather_nd_of_all,
    gather_nd_of_rows,
    gather_in_order,
    gather_of_positions,
    gather_from_the_end,
    operand_of_one_row,
)
