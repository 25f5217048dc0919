"""What selects rows, and how the same rows are selected of another value.

    Entries    Gather(x, index)             the same entries of an axis for all
    Window     Slice(x, starts, ends)       neighbours along one axis
    OneEach    GatherND(x, (0..b, index))   for each entry of the first axis, one of another
               Gather(Flatten(x), l * (0..b) + index)

A selection is worth moving when it keeps few rows, and surely not more than there are: at most half
of them where their number is known. Everything that it is moved to has as many rows as the value
that it was taken of, so an index is out of range there exactly when it was before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from onnx import NodeProto, TensorProto

from passes.axes import TO_THE_END, positive_axes
from passes.cleanup.pieces import ranges
from passes.indices import count
from passes.operands import given, reshape
from passes.shapes.dims import sliced
from toolkit import nodes as nd
from toolkit.graph import Graph
from toolkit.symbolic import Dim, bounds, minimum
from toolkit.types import Shape

SELECTING = ("Gather", "GatherND", "Slice")
_INTEGERS = (TensorProto.INT32, TensorProto.INT64)


@dataclass(frozen=True, slots=True)
class Entries:
    """Entries of an axis, by an index that is a number or a list."""

    index: str
    numbers: tuple[int, ...] | None
    """The index as far as it is constant: equal ones may be stored apart."""
    count: Dim

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Entries) or self.numbers != other.numbers:
            return False
        return self.numbers is not None or self.index == other.index

    def __hash__(self) -> int:
        return hash(self.numbers)

    def applies(self, g: Graph, value: str, axis: int, of: int) -> bool:
        return True

    def shape(self, shape: Shape, axis: int, of: int) -> Shape:
        return (*shape[:axis], self.count, *shape[axis + 1 :])

    def take(self, g: Graph, value: str, axis: int, of: int, at: NodeProto) -> str:
        """The selected rows of `value`, whose `axis` is axis `of` of what they are needed for."""
        if self.numbers is not None:
            index = g.constant(np.array(self.numbers, np.int64), "index")
        else:
            index = reshape(g, self.index, [1], at=at)
        return g.op("Gather", value, index, at=at, axis=axis)


@dataclass(frozen=True, slots=True)
class Window:
    """Neighbours along an axis, from one to another."""

    bounds: tuple[str, ...]
    """The names of starts and ends, and of steps where there are any."""
    count: Dim

    def applies(self, g: Graph, value: str, axis: int, of: int) -> bool:
        return True

    def shape(self, shape: Shape, axis: int, of: int) -> Shape:
        return (*shape[:axis], self.count, *shape[axis + 1 :])

    def take(self, g: Graph, value: str, axis: int, of: int, at: NodeProto) -> str:
        starts, ends, *steps = self.bounds
        kind = np.int32 if g.dtype(starts) == TensorProto.INT32 else np.int64
        axes = g.constant(np.array([axis], kind), "axes")
        return g.op("Slice", value, starts, ends, axes, *steps, at=at)


@dataclass(frozen=True, slots=True)
class OneEach:
    """For each entry of the first axis one of another axis, by an index with as many elements."""

    index: str
    batch: Dim
    count: Dim = 1

    def applies(self, g: Graph, value: str, axis: int, of: int) -> bool:
        """Between the two axes there may be others of size 1 alone: heads of a mask, say."""
        front = (g.shape(value) or ())[:axis]
        own = axis == of and front[:1] == (self.batch,)
        return of > 0 and all(size == 1 for size in (front[1:] if own else front))

    def shape(self, shape: Shape, axis: int, of: int) -> Shape:
        return (self.batch, *[1] * of, *shape[axis + 1 :])

    def take(self, g: Graph, value: str, axis: int, of: int, at: NodeProto) -> str:
        each = axis == of and (g.shape(value) or ())[:1] == (self.batch,)
        # (0, .., 0, index) names an entry of `axis` and of the axes in front of it.
        names = np.array([0] * (axis - each) + [1], np.int64)
        places = reshape(g, self.index, [-1] + [1] * (of + 1), at=at)
        if g.dtype(self.index) != TensorProto.INT64:
            places = g.op("Cast", places, at=at, to=TensorProto.INT64)
        if len(names) > 1:
            places = g.op("Mul", places, g.constant(names, "place"), at=at)
        return g.op("GatherND", value, places, at=at, batch_dims=int(each))


Selection: TypeAlias = Entries | Window | OneEach


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """One place where rows are selected: along `axis` of `value`, as the node `result` does."""

    selection: Selection
    value: str
    axis: int
    result: NodeProto
    drops_axis: bool


def read(g: Graph, node: NodeProto) -> Selected | None:
    """What a node selects, if that is worth moving."""
    readers = {"Gather": _gather, "GatherND": _gather_nd, "Slice": _slice}
    reader = readers.get(node.op_type) if nd.is_op(node, *SELECTING) else None
    return None if reader is None else reader(g, node)


def read_any(g: Graph, node: NodeProto) -> Selected | None:
    """The same for a node that `value` goes into, which may be a view in front of a Gather."""
    if not nd.is_op(node, "Flatten", "Reshape"):
        return read(g, node)
    users = g.users(node.output[0])
    return read(g, users[0]) if len(users) == 1 else None


def _gather(g: Graph, node: NodeProto) -> Selected | None:
    value, index = node.input
    shape, places = g.shape(value), g.shape(index)
    axes = positive_axes([nd.attr(node, "axis", 0)], g.rank(value))
    if shape is None or axes is None or places is None or len(places) > 1:
        return None
    [axis] = axes
    stored = g.const(index)
    if stored is None and all(size == 1 for size in places):
        if _are_few(1, shape[axis]):
            return Selected(Entries(index, None, 1), value, axis, node, not places)
        return None
    if stored is None:
        return _gather_flat(g, node)
    numbers = tuple(int(number) for number in stored.reshape(-1))
    if not numbers or not _are_distinct(numbers, shape[axis]):
        return None
    found = Entries(index, numbers, len(numbers))
    if not _are_few(found.count, shape[axis]):
        return None
    return Selected(found, value, axis, node, not places)


def _are_distinct(numbers: tuple[int, ...], size: Dim) -> bool:
    """Whether no two of them name one entry, whatever number of entries there are."""
    if isinstance(size, int):
        if not all(-size <= number < size for number in numbers):
            return False
        numbers = tuple(number % size for number in numbers)
    elif min(numbers) < 0 <= max(numbers):
        return False
    return len(set(numbers)) == len(numbers)


def _are_few(count: Dim, size: Dim) -> bool:
    """At most half where that can be told, otherwise no more than a fixed number."""
    most = bounds(count)[1]
    if not most:
        return False
    return 2 * most <= size if isinstance(size, int) else True


def _slice(g: Graph, node: NodeProto) -> Selected | None:
    value, found = node.input[0], ranges(g, node)
    shape = g.shape(value)
    if found is None or len(found) != 1 or shape is None:
        return None
    axes = positive_axes(list(found), len(shape))
    if axes is None:
        return None
    [axis], [limits] = axes, found.values()
    kept = _kept(shape[axis], *limits)
    if not _are_few(kept, shape[axis]):
        return None
    limits = [node.input[1], node.input[2], given(node, 4)]
    return Selected(Window(tuple(filter(None, limits)), kept), value, axis, node, False)


def _kept(size: Dim, start: Dim, end: Dim, step: Dim) -> Dim:
    """How many rows a Slice takes: none at all only where there are none.

    Of a number that varies it must be the first few or the last few; 0 says that it is not.
    """
    if isinstance(size, int):
        return sliced(size, start, end, step) or 0
    if step != 1 or not isinstance(start, int) or not isinstance(end, int):
        return 0
    if start == 0 and 0 < end < TO_THE_END:
        return minimum(end, size)
    return minimum(-start, size) if -TO_THE_END < start < 0 and end >= TO_THE_END else 0


def _gather_nd(g: Graph, node: NodeProto) -> Selected | None:
    value, places = node.input
    shape, rank = g.shape(value), g.rank(places)
    if shape is None or rank != 2 or len(shape) < 2 or not _are_few(1, shape[1]):
        return None
    if nd.attr(node, "batch_dims", 0) == 1:
        index = places if g.shape(places) == (shape[0], 1) else None
    else:
        index = _second_of_each(g, places, shape[0]) if not nd.attr(node, "batch_dims", 0) else None
    return None if index is None else Selected(OneEach(index, shape[0]), value, 1, node, True)


def _second_of_each(g: Graph, places: str, batch: Dim) -> str | None:
    """The index behind 0, 1, 2, .. up to the batch."""
    join = g.producer(places)
    if not nd.is_op(join, "Concat") or join is None or len(join.input) != 2:
        return None
    first, second = join.input
    if nd.attr(join, "axis", 0) not in (1, -1) or g.shape(second) != (batch, 1):
        return None
    return second if _counts(g, first, (batch, 1), 1) else None


def _gather_flat(g: Graph, node: NodeProto) -> Selected | None:
    """Rows of a batch that was laid out as one matrix.

    Unlike that of a GatherND, an index out of range would name a row of another entry: it must be
    known to be in range.
    """
    flat, index = node.input
    view, total = g.producer(flat), g.producer(index)
    if view is None or not nd.is_op(view, "Flatten", "Reshape") or nd.attr(node, "axis", 0):
        return None
    value = view.input[0]
    shape, rows = g.shape(value), g.shape(flat)
    if shape is None or len(shape) < 3 or rows != (shape[0] * shape[1], *shape[2:]):
        return None
    if total is None or not nd.is_op(total, "Add") or g.use_count(flat) != 1:
        return None
    for start, inner in (total.input, reversed(total.input)):
        counts = g.shape(inner) == shape[:1] and _counts(g, start, shape[:1], shape[1])
        if counts and _is_below(g, inner, shape[1]) and _are_few(1, shape[1]):
            return Selected(OneEach(inner, shape[0]), value, 1, node, True)
    return None


def _counts(g: Graph, value: str, shape: Shape, stride: Dim) -> bool:
    """Whether `value` is 0, stride, 2 stride, .. along its first axis."""
    found = count(g, value)
    return (
        found is not None
        and found.shape == shape
        and (found.offset, dict(found.strides))
        == (
            0,
            {0: stride},
        )
    )


def _is_below(g: Graph, index: str, size: Dim) -> bool:
    """Whether no element is negative, or `size` or more."""
    node = g.producer(index)
    while nd.is_op(node, "Cast", "Squeeze") and node is not None:
        if nd.attr(node, "to", TensorProto.INT64) not in _INTEGERS:
            return False
        node = g.producer(node.input[0])
    if node is None or not nd.is_op(node, "ArgMax", "ArgMin"):
        return False
    shape = g.shape(node.input[0])
    axes = positive_axes([nd.attr(node, "axis", 0)], g.rank(node.input[0]))
    return shape is not None and axes is not None and shape[axes[0]] == size
