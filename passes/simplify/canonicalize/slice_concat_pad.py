"""Slice, Pad, Concat, Split, Gather, Expand and Tile that are no-ops, or that merge.

Slice(x, 0, size) = x            Slice(Slice(x)) = Slice(x), along other axes
Concat(Split(x))  = x            Concat(a, Concat(b, c)) = Concat(a, b, c)
Expand(x) + y     = x + y        Reshape(Concat(Unsqueeze(a), Unsqueeze(b))) = Concat(a, b)
"""

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
    same_shape,
    slice_ranges,
    whole,
)
from toolkit.ir import Graph, node as nd
from toolkit.ir.op_traits import BROADCASTING
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import rewrite
from toolkit.symbolic import Dim, Expr, minimum

x = var("x")

_MOST_INPUTS = 256
"""Largest number of operands of a merged Concat; a longer list would be copied at each merge."""


# -- Slice and Pad


@rewrite(op.Slice(x, ...))
def slice_of_all(g: Graph, x: str, node: NodeProto) -> str | None:
    """Remove a Slice that keeps every element."""
    found, shape = slice_ranges(g, node), g.shape(x)
    if found is None:
        return None
    for axis, (start, end, step) in found.items():
        size = None if shape is None else shape[axis]
        if step != 1 or not _is_from_start(start, size) or not is_to_end(end, size):
            return None
    return x


def _is_from_start(start: Dim, size: Dim | None) -> bool:
    if start == 0:
        return True
    if isinstance(start, Expr):
        return size is not None and minimum(size, 0 - start) == size
    return start <= -(size if isinstance(size, int) else TO_THE_END)


def is_to_end(end: Dim, size: Dim | None) -> bool:
    """Return whether a Slice that ends at `end` keeps the last element of an axis of this size."""
    if end == size:
        return True
    return isinstance(end, int) and end >= (size if isinstance(size, int) else TO_THE_END)


@rewrite(op.Slice(op.Slice(x, ...).shared().named("inner"), ...))
def slice_of_slice(g: Graph, x: str, inner: NodeProto, node: NodeProto) -> str | None:
    """Merge Slices along different axes; the result copies no more than the second one did."""
    first, second = slice_ranges(g, inner), slice_ranges(g, node)
    if not first or not second or first.keys() & second.keys():
        return None
    starts, ends, steps = map(whole, zip(*(first | second).values(), strict=True))
    if starts is None or ends is None or steps is None:
        return None
    axes = [*first, *second]
    if g.opset() < 10:
        return g.op("Slice", x, at=node, starts=starts, ends=ends, axes=axes)
    listed = [(starts, "starts"), (ends, "ends"), (axes, "axes")]
    if any(step != 1 for step in steps):
        listed.append((steps, "steps"))
    return g.op("Slice", x, *(int_vector(g, values, name) for values, name in listed), at=node)


@rewrite(op.Pad(x, ...))
def pad_by_nothing(g: Graph, x: str, node: NodeProto) -> str | None:
    """Remove a Pad whose pads are all 0."""
    pads = int_operand(g, node, "pads", 1)
    return x if pads is not None and not any(pads) else None


# -- Concat and Split


@rewrite(op.Concat(x, ...))
def concat_inputs(g: Graph, x: str, node: NodeProto) -> str | None:
    """Drop empty operands, undo a Split, and merge a Concat that has no other users."""
    axis = _axis(g, node, 1)
    values = list(node.input)
    kept = [v for v in values if not _is_empty(g, v, axis)] or values[:1]
    joined = _without_splits(g, kept, axis)
    flat = [part for value in joined for part in _parts(g, value, axis)]
    if flat == values or len(flat) > max(len(values), _MOST_INPUTS):
        return None
    return flat[0] if len(flat) == 1 else g.op("Concat", *flat, at=node, axis=axis)


@rewrite(op.Reshape(op.Concat(op.Unsqueeze(var(), ...).shared(), ...).named("stack"), ...))
def flattened_stack(g: Graph, stack: NodeProto, node: NodeProto) -> str | None:
    """Reshape(Concat(Unsqueeze(a), Unsqueeze(b))) = Concat(a, b), if the new axis is merged."""
    shape, axis = g.shape(stack.output[0]), _axis(g, stack, 1)
    if shape is None or not 0 <= axis < len(shape) - 1:
        return None
    pieces: list[str] = []
    for value in stack.input:
        producer = g.producer(value)
        if producer is None or not nd.is_op(producer, "Unsqueeze"):
            return None
        if positive_axes(int_operand(g, producer, "axes", 1), len(shape)) != [axis]:
            return None
        pieces.append(producer.input[0])
    merged = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    if g.shape(node.output[0]) != merged:
        return None
    return g.op("Concat", *pieces, at=node, axis=axis)


def _axis(g: Graph, node: NodeProto, default: int) -> int:
    """Return the attribute `axis`, counted from the front if the rank is known."""
    axis = nd.attr(node, "axis", default)
    found = positive_axes([axis], g.rank(node.input[0]))
    return axis if found is None else found[0]


def _is_empty(g: Graph, value: str, axis: int) -> bool:
    shape = g.shape(value)
    return shape is not None and axis < len(shape) and shape[axis] == 0


def _without_splits(g: Graph, values: Sequence[str], axis: int) -> list[str]:
    """Replace each run of all outputs of a Split along `axis` by the operand of the Split."""
    found: list[str] = []
    at = 0
    while at < len(values):
        producer, count = g.producer(values[at]), 1
        found.append(values[at])
        if nd.is_op(producer, "Split") and producer is not None and _axis(g, producer, 0) == axis:
            outputs = list(producer.output)
            # The first comparison settles most cases without copying the list.
            if values[at] == outputs[0] and values[at : at + len(outputs)] == outputs:
                found[-1], count = producer.input[0], len(outputs)
        at += count
    return found


def _parts(g: Graph, value: str, axis: int) -> list[str]:
    producer = g.producer(value)
    if producer is None or not nd.is_op(producer, "Concat") or g.use_count(value) != 1:
        return [value]
    return list(producer.input) if _axis(g, producer, 1) == axis else [value]


@rewrite(op.Split(x, ...))
def split_into_one(g: Graph, x: str, node: NodeProto) -> str | None:
    """Remove a Split that has a single output."""
    return x if len(node.output) == 1 else None


# -- Gather


@rewrite(op.Unsqueeze(op.Gather(x, const("at", rank=0)).named("inner"), ...))
def unsqueeze_of_gather(g: Graph, x: str, at: str, inner: NodeProto, node: NodeProto) -> str | None:
    """Unsqueeze(Gather(x, i)) = Gather(x, [i]), where the gathered axis is the one put back."""
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
    """Remove an Expand that repeats nothing."""
    if same_shape(g, x, node.output[0]):
        return x
    sizes, rank = dims(g, shape), g.rank(x)
    if sizes is None or rank is None or len(sizes) > rank:
        return None
    return x if all(size == 1 for size in sizes) else None


@rewrite(op.Tile(x, var("repeats")))
def tile_by_one(g: Graph, x: str, repeats: str) -> str | None:
    """Remove a Tile whose repeats are all 1."""
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
def redundant_expand(g: Graph, node: NodeProto) -> str | None:
    """Remove an Expand, or an Unsqueeze of leading axes, in front of an operator that broadcasts.

    The result must keep its shape: proven from the shapes, or by the other operands alone.
    """
    values = list(node.input)
    for slot, value in enumerate(values):
        producer = g.producer(value)
        if producer is None or not _only_widens(g, producer):
            continue
        values[slot] = producer.input[0]
        result = broadcast(*map(g.shape, values))
        if result is not None and result == g.shape(node.output[0]):
            continue
        if not _is_covered(g, producer, values[:slot] + values[slot + 1 :]):
            values[slot] = value
    if values == list(node.input):
        return None
    return g.op(node.op_type, *values, at=node, **nd.attrs(node))


def _only_widens(g: Graph, node: NodeProto) -> bool:
    if nd.is_op(node, "Unsqueeze"):
        axes = positive_axes(int_operand(g, node, "axes", 1), g.rank(node.output[0]))
        return axes is not None and sorted(axes) == list(range(len(axes)))
    return nd.is_op(node, "Expand")


def _is_covered(g: Graph, widening: NodeProto, others: Sequence[str]) -> bool:
    """Return whether the other operands have at least the shape that an Expand asks for.

    Then the shape of the expanded value need not be known: any value that broadcasts to the target
    broadcasts to the others. A table that is too short for either fails before and after.
    """
    if not nd.is_op(widening, "Expand"):
        return False
    whole_shape, sizes = broadcast(*map(g.shape, others)), dims(g, widening.input[1])
    if whole_shape is None or sizes is None:
        return False
    return broadcast(whole_shape, tuple(sizes)) == whole_shape


RULES = (
    slice_of_all,
    slice_of_slice,
    pad_by_nothing,
    concat_inputs,
    flattened_stack,
    split_into_one,
    unsqueeze_of_gather,
    expand_to_same_shape,
    tile_by_one,
    redundant_expand,
)
