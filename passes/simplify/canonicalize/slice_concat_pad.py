"""Cutting, joining, padding and repeating that gives back what was there."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto

from passes.analysis.axes import TO_THE_END, positive_axes
from passes.analysis.operands import (
    broadcast,
    dims,
    int_operand,
    int_vector,
    ints,
    operand,
    same_shape,
    squeeze,
)
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.op_traits import BROADCASTING
from toolkit.ir.tensor_type import Shape
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import rewrite
from toolkit.symbolic import Dim, Expr, minimum

x = var("x")

_MOST_INPUTS = 256
"""Concats are not merged into larger ones: a long chain would be copied again and again."""


# -- Slice and Pad


@rewrite(op.Slice(x, ...))
def slice_of_all(g: Graph, x: str, node: NodeProto) -> str | None:
    found = ranges(g, node)
    if found is None:
        return None
    shape = g.shape(x)
    for axis, (start, end, step) in found.items():
        size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
        if step != 1 or not _from_start(start, size) or not is_to_end(end, size):
            return None
    return x


def ranges(g: Graph, node: NodeProto) -> dict[int, tuple[Dim, Dim, Dim]] | None:
    """axis -> (start, end, step), each axis as written; None when only the run will know."""
    starts, ends = operand(g, node, "starts", 1), operand(g, node, "ends", 2)
    if starts is None or ends is None:
        return None
    axes = int_operand(g, node, "axes", 3, absent=range(len(starts)))
    steps = operand(g, node, "steps", 4, absent=[1] * len(starts))
    if axes is None or steps is None:
        return None
    if not len(starts) == len(ends) == len(axes) == len(steps) or len(set(axes)) != len(axes):
        return None
    return dict(zip(axes, zip(starts, ends, steps, strict=True), strict=True))


def _from_start(start: Dim, size: Dim | None) -> bool:
    if start == 0:
        return True
    if isinstance(start, Expr):
        return size is not None and minimum(size, 0 - start) == size
    return start <= -(size if isinstance(size, int) else TO_THE_END)


def is_to_end(end: Dim, size: Dim | None) -> bool:
    """Whether a Slice that ends at `end` keeps the last element of an axis of this size."""
    if end == size and size is not None:
        return True
    if not isinstance(end, int):
        return False
    return end >= (size if isinstance(size, int) else TO_THE_END)


@rewrite(op.Slice(op.Slice(x, ...).shared().named("inner"), ...))
def slice_of_slice(g: Graph, x: str, inner: NodeProto, node: NodeProto) -> str | None:
    """Two Slices along different axes are one, which copies no more than the second did."""
    rank = g.rank(x)
    bounds: dict[int, tuple[int, ...]] = {}
    for part in (inner, node):
        found = ranges(g, part)
        axes = positive_axes(list(found), rank) if found is not None else None
        if found is None or axes is None or bounds.keys() & set(axes):
            return None
        for axis, limits in zip(axes, found.values(), strict=True):
            numbers = tuple(limit for limit in limits if isinstance(limit, int))
            if len(numbers) != 3:
                return None
            bounds[axis] = numbers
    columns = [[r[i] for r in bounds.values()] for i in range(3)]
    starts, ends, steps = columns
    axes = list(bounds)
    if g.opset() < 10:
        return g.op("Slice", x, at=node, starts=starts, ends=ends, axes=axes)
    listed = [(starts, "starts"), (ends, "ends"), (axes, "axes")]
    if any(step != 1 for step in steps):
        listed.append((steps, "steps"))
    return g.op("Slice", x, *(int_vector(g, values, name) for values, name in listed), at=node)


@rewrite(op.Pad(x, ...))
def pad_by_nothing(g: Graph, x: str, node: NodeProto) -> str | None:
    pads = int_operand(g, node, "pads", 1)
    return x if pads is not None and not any(pads) else None


# -- Concat and Split


@rewrite(op.Concat(x, ...))
def concat_inputs(g: Graph, x: str, node: NodeProto) -> str | None:
    """Inputs that are empty, all parts of a Split, or a Concat that nothing else reads."""
    axis = _axis(g, node, 1)
    values = list(node.input)
    kept = [v for v in values if not _is_empty(g, v, axis)] or values[:1]
    joined = _without_splits(g, kept, axis)
    flat = [part for value in joined for part in _parts(g, value, axis)]
    if flat == values or len(flat) > max(len(values), _MOST_INPUTS):
        return None
    return flat[0] if len(flat) == 1 else g.op("Concat", *flat, at=node, axis=axis)


@rewrite(op.Reshape(op.Concat(op.Unsqueeze(var(), ...).shared(), ...).named("stack"), ...))
def stack_that_is_flattened(g: Graph, stack: NodeProto, node: NodeProto) -> str | None:
    """Pieces that are joined along an axis of their own, which the next one then takes in."""
    shape, axis = g.shape(stack.output[0]), _axis(g, stack, 1)
    if shape is None or not 0 <= axis < len(shape) - 1:
        return None
    pieces: list[str] = []
    for value in stack.input:
        maker = g.producer(value)
        if maker is None or not nd.is_op(maker, "Unsqueeze"):
            return None
        if positive_axes(int_operand(g, maker, "axes", 1), len(shape)) != [axis]:
            return None
        pieces.append(maker.input[0])
    merged = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    if g.shape(node.output[0]) != merged:
        return None
    return g.op("Concat", *pieces, at=node, axis=axis)


def _axis(g: Graph, node: NodeProto, default: int) -> int:
    """The attribute `axis`, counted from the front where the rank is known."""
    axis = nd.attr(node, "axis", default)
    found = positive_axes([axis], g.rank(node.input[0]))
    return axis if found is None else found[0]


def _is_empty(g: Graph, value: str, axis: int) -> bool:
    shape = g.shape(value)
    return shape is not None and axis < len(shape) and shape[axis] == 0


def _without_splits(g: Graph, values: Sequence[str], axis: int) -> list[str]:
    """Replace each run of all outputs of a Split along `axis` by what the Split reads."""
    found: list[str] = []
    at = 0
    while at < len(values):
        producer = g.producer(values[at])
        if nd.is_op(producer, "Split") and producer is not None and _axis(g, producer, 0) == axis:
            count = len(producer.output)
            starts = values[at] == producer.output[0]  # tells mostly, without comparing all
            if starts and list(values[at : at + count]) == list(producer.output):
                found.append(producer.input[0])
                at += count
                continue
        found.append(values[at])
        at += 1
    return found


def _parts(g: Graph, value: str, axis: int) -> list[str]:
    producer = g.producer(value)
    if producer is None or not nd.is_op(producer, "Concat") or g.use_count(value) != 1:
        return [value]
    return list(producer.input) if _axis(g, producer, 1) == axis else [value]


@rewrite(op.Split(x, ...))
def split_into_one(g: Graph, x: str, node: NodeProto) -> str | None:
    return x if len(node.output) == 1 else None


# -- Gather


@rewrite(op.Gather(x, var("at")))
def gather_of_all(g: Graph, x: str, at: str, node: NodeProto) -> str | None:
    """All entries of an axis in order; or the only one, which then is a Squeeze."""
    shape, places = g.shape(x), g.shape(at)
    axes = positive_axes([nd.attr(node, "axis", 0)], g.rank(x))
    if shape is None or axes is None:
        return None
    size = shape[axes[0]]
    if not isinstance(size, int) or places not in ((size,), () if size == 1 else (size,)):
        return None
    indices = ints(g, at)
    if indices is None or [i % size for i in indices] != list(range(size)):
        return None
    return x if places else squeeze(g, x, axes, at=node)


@rewrite(op.Unsqueeze(op.Gather(x, const("at", rank=0)).named("inner"), ...))
def gather_keeping_its_axis(
    g: Graph, x: str, at: str, inner: NodeProto, node: NodeProto
) -> str | None:
    """One entry, whose axis is put back at once: gather a list of one."""
    rank = g.rank(x)
    axis = positive_axes([nd.attr(inner, "axis", 0)], rank)
    index = g.const(at)
    if axis is None or index is None:
        return None
    if positive_axes(int_operand(g, node, "axes", 1), rank) != axis:
        return None
    return g.op("Gather", x, g.constant(index.reshape(1), "index"), at=node, axis=axis[0])


# -- Expand and Tile


@rewrite(op.Expand(x, var("shape")))
def expand_to_same_shape(g: Graph, x: str, shape: str, node: NodeProto) -> str | None:
    if same_shape(g, x, node.output[0]):
        return x
    sizes, rank = dims(g, shape), g.rank(x)
    if sizes is None or rank is None or len(sizes) > rank:
        return None
    return x if all(size == 1 for size in sizes) else None


@rewrite(op.Tile(x, var("repeats")))
def tile_by_one(g: Graph, x: str, repeats: str) -> str | None:
    times = ints(g, repeats)
    return x if times is not None and all(count == 1 for count in times) else None


broadcasting = op.any(*sorted(BROADCASTING))
widened = op.any("Expand", "Unsqueeze")(x, ...).shared()


@rewrite(
    broadcasting(widened, ...),
    broadcasting(var(), widened, ...),
    broadcasting(var(), var(), widened, ...),
    opset=8,
)
def operand_widened_in_vain(g: Graph, node: NodeProto) -> str | None:
    """An operator that broadcasts by itself reads what was there before the Expand.

    Or before the Unsqueeze, if that adds axes in front: so does broadcasting.
    """
    values = list(node.input)
    for place, value in enumerate(values):
        producer = g.producer(value)
        if producer is None or not _only_widens(g, producer):
            continue
        values[place] = producer.input[0]
        others = [other for index, other in enumerate(values) if index != place]
        if not _same_result(g, values, node.output[0]) and not _adds_none(g, producer, others):
            values[place] = value
    if values == list(node.input):
        return None
    return g.op(node.op_type, *values, at=node, **nd.attrs(node))


def _only_widens(g: Graph, node: NodeProto) -> bool:
    if nd.is_op(node, "Unsqueeze"):
        axes = positive_axes(int_operand(g, node, "axes", 1), g.rank(node.output[0]))
        return axes is not None and sorted(axes) == list(range(len(axes)))
    return nd.is_op(node, "Expand")


def _same_result(g: Graph, values: Sequence[str], result: str) -> bool:
    whole = _broadcast(g, values)
    return whole is not None and whole == g.shape(result)


def _adds_none(g: Graph, widening: NodeProto, others: Sequence[str]) -> bool:
    """Whether the other operands have all that an Expand asks for: whatever fits that, fits them.

    So the size of what is expanded need not be known: a table cut to the length of a text may be
    too short for it, and then neither runs.
    """
    if not nd.is_op(widening, "Expand"):
        return False
    whole, sizes = _broadcast(g, others), dims(g, widening.input[1])
    return whole is not None and sizes is not None and broadcast(whole, tuple(sizes)) == whole


def _broadcast(g: Graph, values: Sequence[str]) -> Shape | None:
    shapes: list[Shape] = []
    for value in values:
        shape = g.shape(value)
        if shape is None:
            return None
        shapes.append(shape)
    return broadcast(*shapes)


RULES = (
    slice_of_all,
    slice_of_slice,
    pad_by_nothing,
    concat_inputs,
    stack_that_is_flattened,
    split_into_one,
    gather_of_all,
    gather_keeping_its_axis,
    expand_to_same_shape,
    tile_by_one,
    operand_widened_in_vain,
)
