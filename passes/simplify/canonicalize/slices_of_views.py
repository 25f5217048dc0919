"""Slices and Gathers of views and of concatenations.

    Reshape(x, [b, l, 3, n])[:, :, i]              = output i of Split(x, 3)
    Transpose(x)[i]                                = x[:, :, i], if the other axes keep their order
    Cos(Concat(a, b))[..., :n]                     = Cos(a), where `a` has n elements

Exporters write packed projections of attention in the first two forms, and rotary embeddings, whose
angles are stored twice, in the last.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.axis_flow import BROADCAST, axis_flow
from passes.analysis.operands import (
    int_vector,
    ints,
    permutation,
    reshape,
    reshape_target,
    slice_range,
    transpose,
)
from toolkit.ir import Graph, TensorType, node as nd
from toolkit.ir.op_traits import BROADCASTING, ELEMENTWISE
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import rewrite

x = var("x")

_MOST_PARTS = 8
"""Largest number of outputs of a Split that replaces slices."""

_LONGEST_CHAIN = 6
"""Largest number of operators between a Concat and a Slice that moves up to it."""

_PASSED = ("Unsqueeze", *ELEMENTWISE, *BROADCASTING)
"""Operators that a Slice of the last axis may move past."""


@rewrite(op.Gather(op.Transpose(x).shared().named("inner"), const("at")))
def gather_of_transpose(g: Graph, x: str, at: str, inner: NodeProto, node: NodeProto) -> str | None:
    """Gather one element of an axis before the Transpose.

    A scalar index removes the axis: no Transpose is left if the other axes are in order. An index
    of shape [1] keeps the axis: the Transpose moves less.
    """
    perm, indices = permutation(g, inner), g.const(at)
    axes = positive_axes([nd.attr(node, "axis", 0)], g.rank(x))
    if perm is None or axes is None or indices is None or indices.size != 1 or indices.ndim > 1:
        return None
    axis = perm[axes[0]]
    left = [one for one in perm if one != axis]
    if indices.ndim:
        return transpose(g, g.op("Gather", x, at, at=node, axis=axis), perm, at=node)
    return g.op("Gather", x, at, at=node, axis=axis) if left == sorted(left) else None


# -- slices that are a Split


@rewrite(op.any("Slice", "Gather")(op.Reshape(x, ...).shared().named("view"), ...), opset=13)
def split_of_last_axis(g: Graph, x: str, view: NodeProto, node: NodeProto) -> str | None:
    """Replace slices that cover an axis, which a Reshape splits off the last one, by a Split.

    They are the query, key and value of a packed projection, or groups of its heads.
    """
    value = view.output[0]
    shape, apart = g.shape(x), g.shape(value)
    if not shape or apart is None or len(apart) <= len(shape):
        return None
    axis = len(shape) - 1
    count, whole = apart[axis], shape[axis]
    if apart[:axis] != shape[:axis] or not isinstance(count, int) or not isinstance(whole, int):
        return None
    if not count or whole % count or g.is_output(value) or g.is_captured(value):
        return None
    users = g.users(value)
    slices = [(user, taken) for user in users if (taken := _range(g, user, axis)) is not None]
    ranges = sorted({taken for _, taken in slices})
    ends = [0, *(end for _, end in ranges)]
    if len(slices) != len(users) or not 1 < len(ranges) <= _MOST_PARTS:
        return None
    if [start for start, _ in ranges] != ends[:-1] or ends[-1] != count:
        return None
    sizes = [(end - start) * (whole // count) for start, end in ranges]
    parts = {taken: (*shape[:axis], size) for taken, size in zip(ranges, sizes, strict=True)}
    targets = [reshape_target(parts[taken], g.shape(user.output[0])) for user, taken in slices]
    if None in targets:
        return None
    split = g.add("Split", [x, int_vector(g, sizes, "sizes")], len(sizes), {"axis": axis}, at=view)
    for part, output in zip(parts.values(), split.output, strict=True):
        g.learn_type(output, TensorType(g.dtype(x), part))
    # `node` last: replacing a graph output by an output of the Split renames the latter.
    order = sorted(range(len(slices)), key=lambda i: slices[i][0] is node)
    result = node.output[0]
    for user, taken, target in ((*slices[i], targets[i]) for i in order):
        result = split.output[ranges.index(taken)]
        if target is not None and g.shape(user.output[0]) != parts[taken]:
            result = reshape(g, result, target, at=user)
        if user is not node:
            g.replace(user.output[0], result)
            g.prune(user)
    return result


def _range(g: Graph, node: NodeProto, axis: int) -> tuple[int, int] | None:
    """Return start and end of the range of `axis` that a Slice or a Gather takes."""
    if nd.is_op(node, "Slice"):
        found = slice_range(g, node)
        return None if found is None or found[0] != axis else found[1:]
    shape = g.shape(node.input[0])
    if not nd.is_op(node, "Gather") or shape is None or (g.rank(node.input[1]) or 0) > 1:
        return None
    size, indices = shape[axis], ints(g, node.input[1])
    if not indices or not isinstance(size, int):
        return None
    if positive_axes([nd.attr(node, "axis", 0)], len(shape)) != [axis]:
        return None
    first = indices[0] % size
    in_order = [index % size for index in indices] == list(range(first, first + len(indices)))
    return (first, first + len(indices)) if in_order else None


# -- slices of a Concat


@rewrite(op.Slice(x, ...), opset=13)
def slice_of_concat(g: Graph, x: str, node: NodeProto) -> str | None:
    """Read the operand of a Concat that a Slice takes, past elementwise operators in between.

    The Slice moves past one operator at a time, and only where all users of its result are the same
    Slice: then nothing is computed twice.
    """
    found = _last_axis(g, node)
    operand = None if found is None else _operand_at(g, x, found)
    above = g.producer(x)
    if operand is None or found is None or above is None or nd.is_op(above, "Concat"):
        return operand
    users = g.users(x)
    if any(not nd.is_op(user, "Slice") or _last_axis(g, user) != found for user in users):
        return None
    source = above.input[0]
    bounds = ((found[:1], "start"), (found[1:], "end"), ((-1,), "axis"))
    part = g.op("Slice", source, *(int_vector(g, v, name) for v, name in bounds), at=node)
    shape = g.shape(source) or ()
    g.learn_type(part, TensorType(g.dtype(source), (*shape[:-1], found[1] - found[0])))
    result = g.op(above.op_type, part, *above.input[1:], at=node, **nd.attrs(above))
    for user in users:
        if user is not node:
            g.replace(user.output[0], result)
            g.prune(user)
    return result


def _last_axis(g: Graph, node: NodeProto) -> tuple[int, int] | None:
    """Return start and end of a Slice along the last axis."""
    found = slice_range(g, node)
    return None if found is None or found[0] + 1 != g.rank(node.input[0]) else found[1:]


def _operand_at(g: Graph, value: str, taken: tuple[int, int]) -> str | None:
    """Return the operand of the Concat above `value` that lies at this range of the last axis."""
    node = g.producer(value)
    for _ in range(_LONGEST_CHAIN):
        if node is None or not _keeps_last_axis(g, node):
            break
        node = g.producer(node.input[0])
    if node is None or not nd.is_op(node, "Concat"):
        return None
    rank = g.rank(node.output[0])
    if rank is None or positive_axes([nd.attr(node, "axis", 0)], rank) != [rank - 1]:
        return None
    start = 0
    for name in node.input:
        shape = g.shape(name)
        if not shape or not isinstance(shape[-1], int):
            return None
        if (start, start + shape[-1]) == taken:
            return name
        start += shape[-1]
    return None


def _keeps_last_axis(g: Graph, node: NodeProto) -> bool:
    """Return whether each entry of the last axis depends on that entry of the first operand alone.

    The other operands must not vary along the last axis.
    """
    flow = axis_flow(g, node) if nd.is_op(node, *_PASSED) else None
    rank = g.rank(node.input[0]) if flow is not None else None
    if flow is None or not rank or g.is_output(node.output[0]):
        return False
    last = {slot: operand.sources[-1] for slot, operand in flow.operands.items()}
    return last.pop(0) == rank - 1 and set(last.values()) <= {BROADCAST}


RULES = (gather_of_transpose, split_of_last_axis, slice_of_concat)
