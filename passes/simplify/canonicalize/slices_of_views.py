"""Parts of a value that are cut out of a view of it, or of what was joined before.

    Reshape(x, [b, l, 3, n])[:, :, i]              = the parts of Split(x, 3)
    Transpose(x)[i]                                = x[:, :, i], if that leaves the others in order
    Cos(Concat(a, b))[..., :n]                     = Cos(a), of as many elements as `a` has

Packed projections of an attention are taken apart in the first two ways, and the angles of rotary
embeddings, which hold each one twice, in the last.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto

from passes.analysis.axes import TO_THE_END, positive_axes
from passes.analysis.operands import (
    int_operand,
    int_vector,
    ints,
    permutation,
    reshape,
    reshape_target,
    transpose,
)
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.op_traits import ELEMENTWISE
from toolkit.ir.tensor_type import Shape, TensorType
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import rewrite

x = var("x")

_VIEWS = ("Reshape", "Squeeze", "Unsqueeze")


# -- Gather of a Transpose, Transpose between views


@rewrite(op.Gather(op.Transpose(x).shared().named("inner"), const("at")))
def gather_of_transpose(g: Graph, x: str, at: str, inner: NodeProto, node: NodeProto) -> str | None:
    """One entry of an axis, which no longer has a place: the others may be in order as they are.

    A list of one keeps the axis: it is less to transpose.
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


@rewrite(op.Squeeze(op.Transpose(op.Unsqueeze(x, ...).named("outer")).named("inner"), ...))
def transpose_of_unsqueezed(
    g: Graph, x: str, outer: NodeProto, inner: NodeProto, node: NodeProto
) -> str | None:
    """An axis of size 1 that comes, moves and goes."""
    rank = g.rank(outer.output[0])
    new = positive_axes(int_operand(g, outer, "axes", 1), rank)
    gone = positive_axes(int_operand(g, node, "axes", 1), rank)
    perm = permutation(g, inner)
    if new is None or gone is None or perm is None or {perm[axis] for axis in gone} != set(new):
        return None
    before = [axis for axis in range(len(perm)) if axis not in new]
    whole = [before.index(axis) for axis in perm if axis not in new]
    return g.op("Transpose", x, at=node, perm=whole)


@rewrite(op.Reshape(op.Transpose(op.Reshape(x, ...).named("outer")).named("inner"), ...))
def transpose_of_split_axis(
    g: Graph, x: str, outer: NodeProto, inner: NodeProto, node: NodeProto
) -> str | None:
    """The last axis is taken apart, stays where it is while others move, and is put together."""
    before, apart = g.shape(x), g.shape(outer.output[0])
    after, perm = g.shape(node.output[0]), permutation(g, inner)
    if not before or apart is None or after is None or perm is None or len(apart) <= len(before):
        return None
    last = len(before) - 1
    if apart[:last] != before[:last] or list(perm[last:]) != list(range(last, len(apart))):
        return None
    moved = (*(before[axis] for axis in perm[:last]), before[last])
    return g.op("Transpose", x, at=node, perm=[*perm[:last], last]) if moved == after else None


# -- a Split in disguise


@rewrite(op.any("Slice", "Gather")(op.Reshape(x, ...).shared().named("view"), ...), opset=13)
def parts_of_last_axis(g: Graph, x: str, view: NodeProto, node: NodeProto) -> str | None:
    """All entries of an axis that a Reshape has split off the last one, viewed as parts of that."""
    shape, apart = g.shape(x), g.shape(view.output[0])
    if not shape or apart is None or len(apart) < len(shape) + 1:
        return None
    axis = len(shape) - 1
    count, whole = apart[axis], shape[-1]
    if apart[:axis] != shape[:axis] or not isinstance(count, int) or not isinstance(whole, int):
        return None
    if not 1 < count <= 8 or whole % count or g.is_output(view.output[0]):
        return None
    part = (*shape[:axis], whole // count)
    ends: list[tuple[int, NodeProto]] = []
    for user in g.users(view.output[0]):
        index = _entry(g, user, axis)
        found = None if index is None else _viewed_as(g, user, part)
        if index is None or found is None:
            return None
        ends.extend((index, end) for end in found)
    if {index for index, _ in ends} != set(range(count)):
        return None
    sizes = int_vector(g, [whole // count] * count, "sizes")
    split = g.add("Split", [x, sizes], count, {"axis": axis}, at=view)
    for index, end in ends:
        if end is not node:
            g.replace(end.output[0], split.output[index])
            g.prune(end)
    # Not before: a part that becomes an output of the graph changes its name.
    own = [split.output[index] for index, end in ends if end is node]
    return own[0] if own else node.output[0]


@rewrite(op.any("Slice", "Gather")(op.Reshape(x, ...).shared().named("view"), ...), opset=13)
def groups_of_last_axis(g: Graph, x: str, view: NodeProto, node: NodeProto) -> str | None:
    """Entries of such an axis in groups, which keep it: the heads of a query, a key and a value."""
    shape, apart = g.shape(x), g.shape(view.output[0])
    if not shape or apart is None or len(apart) != len(shape) + 1 or apart[:-2] != shape[:-1]:
        return None
    axis, size = len(shape) - 1, apart[-1]
    if not isinstance(size, int) or g.is_output(view.output[0]) or g.is_captured(view.output[0]):
        return None
    found = [(_group(g, user, axis), user) for user in g.users(view.output[0])]
    taken = [(*bounds, user) for bounds, user in found if bounds is not None]
    groups = sorted(taken, key=lambda group: group[:2])
    ends = [0, *(end for _, end, _ in groups)]
    if len(groups) != len(found) or len(groups) < 2 or ends[-1] != apart[-2]:
        return None
    if [start for start, _, _ in groups] != ends[:-1]:
        return None
    counts = [end - start for start, end, _ in groups]
    targets = [reshape_target(shape, (*shape[:-1], count, size)) for count in counts]
    sizes = int_vector(g, [count * size for count in counts], "sizes")
    split = g.add("Split", [x, sizes], len(groups), {"axis": axis}, at=view)
    result = node.output[0]
    for (_, _, user), part, target in zip(groups, split.output, targets, strict=True):
        if target is None:
            return None
        g.learn_type(part, TensorType(g.dtype(x), (*shape[:-1], target[-2] * size)))
        group = reshape(g, part, target, at=user)
        if user is node:
            result = group
        else:
            g.replace(user.output[0], group)
            g.prune(user)
    return result


def _group(g: Graph, node: NodeProto, axis: int) -> tuple[int, int] | None:
    """The first entry of an axis that a Gather or a Slice takes, and the one behind the last."""
    if nd.is_op(node, "Slice"):
        found = cut(g, node)
        return None if found is None or found[0] != axis else found[1:]
    if not nd.is_op(node, "Gather") or g.rank(node.input[1]) != 1:
        return None
    shape, indices = g.shape(node.input[0]), ints(g, node.input[1])
    size = shape[axis] if shape is not None else None
    if not indices or not isinstance(size, int):
        return None
    if positive_axes([nd.attr(node, "axis", 0)], g.rank(node.input[0])) != [axis]:
        return None
    first = indices[0] % size
    in_order = [index % size for index in indices] == list(range(first, first + len(indices)))
    return (first, first + len(indices)) if in_order else None


def _entry(g: Graph, node: NodeProto, axis: int) -> int | None:
    """Which entry of an axis a Gather or a Slice takes."""
    rank = g.rank(node.input[0])
    if nd.is_op(node, "Gather"):
        indices = ints(g, node.input[1])
        axes = positive_axes([nd.attr(node, "axis", 0)], rank)
        size = (g.shape(node.input[0]) or ())[axis] if axes == [axis] else None
        if not isinstance(size, int) or not indices or len(indices) != 1:
            return None
        return indices[0] % size
    if not nd.is_op(node, "Slice"):
        return None
    found = cut(g, node)
    if found is None or found[0] != axis or found[2] != found[1] + 1:
        return None
    return found[1]


def cut(g: Graph, node: NodeProto) -> tuple[int, int, int] | None:
    """Axis, start and end of a Slice along one axis of known size, from the front, step by step."""
    shape = g.shape(node.input[0])
    starts, ends = int_operand(g, node, "starts", 1), int_operand(g, node, "ends", 2)
    if shape is None or starts is None or ends is None or len(starts) != 1 or len(ends) != 1:
        return None
    axes = positive_axes(int_operand(g, node, "axes", 3, absent=[0]), len(shape))
    if axes is None or int_operand(g, node, "steps", 4, absent=[1]) != [1]:
        return None
    size = shape[axes[0]]
    if not isinstance(size, int):
        return None
    start, end, _ = slice(starts[0], min(ends[0], TO_THE_END)).indices(size)
    return axes[0], start, end


def _viewed_as(g: Graph, node: NodeProto, shape: Shape) -> list[NodeProto] | None:
    """The nodes that give `node`'s result this shape, itself or all that read it."""
    value = node.output[0]
    if g.shape(value) == shape:
        return [node]
    users = g.users(value)
    if g.is_output(value) or not users:
        return None
    fitting = [u for u in users if nd.is_op(u, *_VIEWS) and g.shape(u.output[0]) == shape]
    return fitting if len(fitting) == len(users) else None


# -- cutting what was joined


@rewrite(op.Slice(x, ...), opset=13)
def slice_of_joined(g: Graph, x: str, node: NodeProto) -> str | None:
    """A Slice along the last axis that takes one of the joined values, before what follows."""
    found, rank = cut(g, node), g.rank(x)
    if found is None or rank is None or found[0] != rank - 1:
        return None
    chain = list(_chain(g, x, found[1:]))
    join = g.producer(chain[-1].input[0] if chain else x)
    if join is None or not nd.is_op(join, "Concat"):
        return None
    part = _joined_at(g, join, found[1], found[2])
    if part is None or (chain and not _all_cut(g, x, chain, found[1:])):
        return None
    for step in reversed(chain):
        values = [part if name == _varying(g, step) else name for name in step.input]
        part = g.op(step.op_type, *values, at=node, **nd.attrs(step))
    return part


def _varying(g: Graph, node: NodeProto) -> str:
    """The operand that a unary operator, or one with a number beside it, works on."""
    for name in node.input:
        stored = g.tensor(name)
        if stored is None:
            return name
    return node.input[0]


def _chain(g: Graph, value: str, bounds: tuple[int, int]) -> Iterator[NodeProto]:
    """Operators above `value` that do to each element of the last axis the same."""
    for _ in range(6):
        node = g.producer(value)
        if node is None or node.domain not in nd.STANDARD_DOMAINS or not _is_alike(g, node):
            return
        yield node
        value = _varying(g, node)
        if value != node.input[0]:
            return  # keeps the rule simple: a number on the left ends the chain


def _is_alike(g: Graph, node: NodeProto) -> bool:
    before, after = g.shape(node.input[0]), g.shape(node.output[0])
    if not before or not after or before[-1] != after[-1] or g.is_output(node.output[0]):
        return False
    if node.op_type in ELEMENTWISE and len(node.input) == 1:
        return True
    if node.op_type == "Unsqueeze":
        axes = positive_axes(int_operand(g, node, "axes", 1), len(after))
        return axes is not None and len(after) - 1 not in axes
    if node.op_type in ("Mul", "Div", "Add", "Sub"):
        stored = g.tensor(node.input[1])
        return stored is not None and not any(size != 1 for size in stored.dims)
    return False


def _all_cut(g: Graph, value: str, chain: list[NodeProto], bounds: tuple[int, int]) -> bool:
    """Whether all that reads the chain takes the same part: else both would be computed."""
    pending = [value, *(step.output[0] for step in chain[1:])]
    seen = set(pending)
    while pending:
        name = pending.pop()
        for user in g.users(name):
            found = cut(g, user) if nd.is_op(user, "Slice") else None
            if found is not None and found[1:] == bounds and found[0] == (g.rank(name) or 0) - 1:
                continue
            if not _is_alike(g, user) or user.input[0] != name or len(seen) > 16:
                return False
            if user.output[0] not in seen:
                seen.add(user.output[0])
                pending.append(user.output[0])
    return True


def _joined_at(g: Graph, join: NodeProto, start: int, end: int) -> str | None:
    """The input of a Concat along the last axis that lies from start to end."""
    rank = g.rank(join.output[0])
    if rank is None or positive_axes([nd.attr(join, "axis", 0)], rank) != [rank - 1]:
        return None
    at = 0
    for name in join.input:
        shape = g.shape(name)
        if not shape or not isinstance(shape[-1], int):
            return None
        if (at, at + shape[-1]) == (start, end):
            return name
        at += shape[-1]
    return None


RULES = (
    gather_of_transpose,
    transpose_of_unsqueezed,
    transpose_of_split_axis,
    parts_of_last_axis,
    groups_of_last_axis,
    slice_of_joined,
)
