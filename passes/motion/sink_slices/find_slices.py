"""Where rows are selected, and whether that is worth moving.

    Gather(x, i), Slice(x, start, end), GatherND(x, (0..b, i)), Gather(Flatten(x), l (0..b) + i)

It is when few rows are kept, and surely not more than there are: a fixed number of them, and at
most half where it is known how many there are.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from passes.analysis.affine_index import count
from passes.analysis.axes import TO_THE_END, positive_axes
from passes.analysis.operands import given
from passes.analysis.shapes.dims import sliced
from passes.motion.sink_slices.row_selection import Entries, OneEach, Selected, Window
from passes.simplify.canonicalize.slice_concat_pad import ranges
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import Shape
from toolkit.symbolic import Dim, bounds, minimum

SELECTING = ("Gather", "GatherND", "Slice")
MOST_USERS = 64
"""A value read by more nodes than this is taken to be needed as a whole."""

_INTEGERS = (TensorProto.INT32, TensorProto.INT64)


def read(g: Graph, node: NodeProto) -> Selected | None:
    """What a node selects, if that is worth moving."""
    if nd.is_op(node, "Gather"):
        return _gather(g, node) or _gather_flat(g, node)
    if nd.is_op(node, "Slice"):
        return _slice(g, node)
    return _gather_nd(g, node) if nd.is_op(node, "GatherND") else None


def read_behind(g: Graph, node: NodeProto) -> Selected | None:
    """The same, where the node may be a view in front of a Gather."""
    if not nd.is_op(node, "Flatten", "Reshape"):
        return read(g, node)
    users = g.users(node.output[0])
    return read(g, users[0]) if len(users) == 1 else None


def joined(g: Graph, one: Selected) -> Selected:
    """All entries that are selected of the value, where different ones are."""
    if g.reader_count(one.value) > MOST_USERS:
        return one
    numbers: set[int] = set()
    ends = [read_behind(g, user) for user in g.users(one.value)]
    for end in ends:
        if end is None or not isinstance(end.selection, Entries) or end.selection.index:
            return one
        if (end.value, end.axis) != (one.value, one.axis):
            return one
        numbers.update(end.selection.numbers)
    if isinstance(one.selection, Entries) and numbers == set(one.selection.numbers):
        return one
    found = _entries(sorted(numbers), (g.shape(one.value) or ())[one.axis])
    return one if found is None else Selected(found, one.value, one.axis, one.result, False)


def _are_few(count: Dim, size: Dim) -> bool:
    most = bounds(count)[1]
    if not most:
        return False
    return 2 * most <= size if isinstance(size, int) else True


# -- the same rows for all


def _gather(g: Graph, node: NodeProto) -> Selected | None:
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
    return None if found is None else Selected(found, value, axes[0], node, not places)


def _entries(numbers: list[int], size: Dim) -> Entries | None:
    """These entries, if no two of them are one, however many there are."""
    if isinstance(size, int):
        if not all(-size <= number < size for number in numbers):
            return None
        numbers = [number % size for number in numbers]
    elif min(numbers, default=0) < 0 <= max(numbers, default=0):
        return None
    if len(set(numbers)) < len(numbers) or not _are_few(len(numbers), size):
        return None
    return Entries(len(numbers), tuple(numbers))


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
    names = [node.input[1], node.input[2], given(node, 4)]
    last = limits[0] in (-1, shape[axis] - 1) and bounds(kept)[1] == 1
    window = Window(kept, tuple(filter(None, names)), last)
    return Selected(window, value, axis, node, False)


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


# -- a row for each entry of the batch


def _gather_nd(g: Graph, node: NodeProto) -> Selected | None:
    value, places = node.input
    shape, batched = g.shape(value), nd.attr(node, "batch_dims", 0)
    if shape is None or len(shape) < 2 or batched > 1 or not _are_few(1, shape[1]):
        return None
    index = places if batched else _second_of_each(g, places, shape[0])
    sizes = None if index is None else g.shape(index)
    if index is None or sizes not in ((shape[0], 1), (shape[0], 1, 1)):
        return None
    return Selected(OneEach(index, shape[0]), value, 1, node, drops_axis=len(sizes) == 2)


def _second_of_each(g: Graph, places: str, batch: Dim) -> str | None:
    """The index behind 0, 1, 2, .. up to the batch."""
    join = g.producer(places)
    if join is None or not nd.is_op(join, "Concat") or len(join.input) != 2:
        return None
    behind = nd.attr(join, "axis", 0) in (1, -1) and g.rank(places) == 2
    return join.input[1] if behind and _counts(g, join.input[0], (batch, 1), 1) else None


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
    batch, size = shape[:2]
    for start, inner in (total.input, reversed(total.input)):
        counted = g.shape(inner) == (batch,) and _counts(g, start, (batch,), size)
        if counted and _is_below(g, inner, size) and _are_few(1, size):
            return Selected(OneEach(inner, batch), value, 1, node, True)
    return None


def _counts(g: Graph, value: str, shape: Shape, stride: Dim) -> bool:
    """Whether `value` is 0, stride, 2 stride, .. along its first axis."""
    found = count(g, value)
    if found is None or found.shape != shape or found.offset != 0:
        return False
    return dict(found.strides) == ({} if shape[0] == 1 else {0: stride})


def _is_below(g: Graph, index: str, size: Dim) -> bool:
    """Whether no element is negative, or `size` or more."""
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
