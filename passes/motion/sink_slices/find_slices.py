"""Find nodes that select few rows of a value.

    Gather(x, i), Slice(x, start, end), GatherND(x, (0..b, i)), Gather(Flatten(x), l (0..b) + i)

Moving a selection pays if it keeps a bounded number of rows, never more than there are, and at most
half of them where their number is known.
"""

from __future__ import annotations

from dataclasses import replace

from onnx import NodeProto, TensorProto

from passes.analysis.affine_index import count
from passes.analysis.axes import TO_THE_END, positive_axes
from passes.analysis.operands import given, slice_ranges
from passes.analysis.shapes.dims import sliced
from passes.motion.sink_slices.row_selection import Entries, RowPerEntry, SelectedRows, Window
from toolkit.ir import Graph, Shape, node as nd
from toolkit.symbolic import Dim, bounds, minimum

SELECTING = ("Gather", "GatherND", "Slice")
MOST_USERS = 64
"""A value with more users than this is assumed to be needed as a whole."""

_INTEGERS = (TensorProto.INT32, TensorProto.INT64)


def find_slice(g: Graph, node: NodeProto) -> SelectedRows | None:
    """Return the rows that `node` selects, or None if moving the selection does not pay."""
    if nd.is_op(node, "Gather"):
        return _gather(g, node) or _gather_flat(g, node)
    if nd.is_op(node, "Slice"):
        return _slice(g, node)
    return _gather_nd(g, node) if nd.is_op(node, "GatherND") else None


def find_slice_behind_view(g: Graph, node: NodeProto) -> SelectedRows | None:
    """Return the rows that `node`, or the sole user of a view `node`, selects."""
    if not nd.is_op(node, "Flatten", "Reshape"):
        return find_slice(g, node)
    users = g.users(node.output[0])
    return find_slice(g, users[0]) if len(users) == 1 else None


def merge_entries(g: Graph, one: SelectedRows) -> SelectedRows:
    """Return the union of `one` and the entries that all other users select of the same value."""
    if g.user_count(one.value) > MOST_USERS:
        return one
    numbers: set[int] = set()
    for user in g.users(one.value):
        other = find_slice_behind_view(g, user)
        if other is None or not isinstance(other.selection, Entries) or other.selection.index:
            return one
        if (other.value, other.axis) != (one.value, one.axis):
            return one
        numbers.update(other.selection.numbers)
    if isinstance(one.selection, Entries) and numbers == set(one.selection.numbers):
        return one
    found = _entries(sorted(numbers), (g.shape(one.value) or ())[one.axis])
    return one if found is None else replace(one, selection=found, drops_axis=False)


def _are_few(count: Dim, size: Dim) -> bool:
    most = bounds(count)[1]
    if not most:
        return False
    return 2 * most <= size if isinstance(size, int) else True


# -- the same rows for all entries of the batch


def _gather(g: Graph, node: NodeProto) -> SelectedRows | None:
    value, index = node.input
    shape, places = g.shape(value), g.shape(index)
    axes = positive_axes([nd.attr(node, "axis", 0)], g.rank(value))
    if shape is None or axes is None or places is None or len(places) > 1:
        return None
    size, stored = shape[axes[0]], g.const(index)
    if stored is not None:
        found = _entries([int(number) for number in stored.reshape(-1)], size)
    else:
        single = all(size == 1 for size in places) and _are_few(1, size)
        found = Entries(1, (), index) if single else None
    return None if found is None else SelectedRows(found, value, axes[0], node, not places)


def _entries(numbers: list[int], size: Dim) -> Entries | None:
    """Return the selection of these entries if they are few and distinct at any size."""
    if isinstance(size, int):
        if not all(-size <= number < size for number in numbers):
            return None
        numbers = [number % size for number in numbers]
    elif min(numbers, default=0) < 0 <= max(numbers, default=0):
        return None
    if len(set(numbers)) < len(numbers) or not _are_few(len(numbers), size):
        return None
    return Entries(len(numbers), tuple(numbers))


def _slice(g: Graph, node: NodeProto) -> SelectedRows | None:
    value, found = node.input[0], slice_ranges(g, node)
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
    names = [node.input[1], node.input[2], given(node, 4)]
    last = limits[0] in (-1, shape[axis] - 1) and bounds(kept)[1] == 1
    window = Window(kept, tuple(filter(None, names)), last)
    return SelectedRows(window, value, axis, node, False)


def _kept(size: Dim, start: Dim, end: Dim, step: Dim) -> Dim:
    """Return how many rows a Slice keeps; 0 if that is unknown, or none although there are rows.

    Of a dynamic number of rows, only the first few or the last few are a known number.
    """
    if isinstance(size, int):
        return sliced(size, start, end, step) or 0
    if step != 1 or not isinstance(start, int) or not isinstance(end, int):
        return 0
    if start == 0 and 0 < end < TO_THE_END:
        return minimum(end, size)
    return minimum(-start, size) if -TO_THE_END < start < 0 and end >= TO_THE_END else 0


# -- one row per entry of the batch


def _gather_nd(g: Graph, node: NodeProto) -> SelectedRows | None:
    value, places = node.input
    shape, batched = g.shape(value), nd.attr(node, "batch_dims", 0)
    if shape is None or len(shape) < 2 or batched > 1 or not _are_few(1, shape[1]):
        return None
    index = places if batched else _row_index(g, places, shape[0])
    sizes = None if index is None else g.shape(index)
    if index is None or sizes not in ((shape[0], 1), (shape[0], 1, 1)):
        return None
    return SelectedRows(RowPerEntry(index, shape[0]), value, 1, node, drops_axis=len(sizes) == 2)


def _row_index(g: Graph, places: str, batch: Dim) -> str | None:
    """Return `index` if `places` is [[0, index 0], [1, index 1], ...] for the whole batch."""
    join = g.producer(places)
    if join is None or not nd.is_op(join, "Concat") or len(join.input) != 2:
        return None
    behind = nd.attr(join, "axis", 0) in (1, -1) and g.rank(places) == 2
    return join.input[1] if behind and _counts(g, join.input[0], (batch, 1), 1) else None


def _gather_flat(g: Graph, node: NodeProto) -> SelectedRows | None:
    """Match a Gather from a batch that was flattened to one matrix.

    Unlike in a GatherND, an index out of range would select a row of another batch entry, so the
    index must be provably in range.
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
    batch, size = shape[:2]
    for start, inner in (total.input, reversed(total.input)):
        counted = g.shape(inner) == (batch,) and _counts(g, start, (batch,), size)
        if counted and _is_in_range(g, inner, size) and _are_few(1, size):
            return SelectedRows(RowPerEntry(inner, batch), value, 1, node, True)
    return None


def _counts(g: Graph, value: str, shape: Shape, stride: Dim) -> bool:
    """Whether `value` is 0, stride, 2 stride, ... along its first axis."""
    found = count(g, value)
    if found is None or found.shape != shape or found.offset != 0:
        return False
    return dict(found.strides) == ({} if shape[0] == 1 else {0: stride})


def _is_in_range(g: Graph, index: str, size: Dim) -> bool:
    """Whether 0 <= index < size is provable for all elements."""
    node = g.producer(index)
    while node is not None and nd.is_op(node, "Cast", "Squeeze"):
        if nd.attr(node, "to", TensorProto.INT64) not in _INTEGERS:
            return False
        node = g.producer(node.input[0])
    if node is None or not nd.is_op(node, "ArgMax", "ArgMin"):
        return False
    shape = g.shape(node.input[0])
    axes = positive_axes([nd.attr(node, "axis", 0)], g.rank(node.input[0]))
    return shape is not None and axes is not None and shape[axes[0]] == size
