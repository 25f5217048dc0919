"""Query, key and value that one linear map gives, as Vision Transformers take them apart.

    x [batch, length, 3 * heads * size]
    Transpose(Reshape(x, [batch, length, 3, heads, size]), [2, 0, 3, 1, 4])[i]

Entries of an axis that was split off the last one are parts of that last axis. Cut out of `x`
itself they are tokens, which attention takes as they are; a Transpose of all of them, and what
copies each out of it, are then not needed. Nor is an axis for the one head that key and value have
where many queries share it: it comes behind the Split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import (
    int_operand,
    int_vector,
    ints,
    permutation,
    reshape,
    reshape_target,
    transpose,
    unsqueeze,
)
from passes.fuse.linear.affine import only_reader
from passes.simplify.canonicalize.slices_of_views import cut
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import Shape, TensorType
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import Miss
from toolkit.rewriting.rule import rewrite

_MOST_PARTS = 8


@rewrite(op.Transpose(op.Reshape(var("x"), ...).named("apart")), opset=13)
def packed_heads(g: Graph, x: str, apart: NodeProto, node: NodeProto) -> str:
    """Transpose(Reshape(x))[i] = Transpose(Reshape(part i of x))"""
    packed = Packed.of(g, x, apart, node)
    merged = _merged(g, node.output[0], packed.axis)
    whole = node if merged is None else merged
    entries = _entries(g, whole.output[0], packed.axis, packed.count)
    parts = packed.parts(x, sorted({entry.index for entry in entries}), node)
    if merged is not None:
        shape = (g.shape(merged.output[0]) or ())[1:]
        parts = {index: _viewed(g, part, shape, node) for index, part in parts.items()}
    for entry in entries:
        parts[entry.index] = _put(g, parts[entry.index], entry, packed.axis, node)
    for entry in entries:
        g.prune(entry.reader)
    return node.output[0]


@rewrite(op.Split(op.Unsqueeze(var("x"), ...).named("view"), ...), opset=13)
def split_before_view(g: Graph, x: str, view: NodeProto, node: NodeProto) -> Sequence[str]:
    """Split(Unsqueeze(x)) = Unsqueeze(each part of x)"""
    shape, rank = g.shape(x), g.rank(view.output[0])
    axes = positive_axes(int_operand(g, view, "axes", 1), rank)
    along = positive_axes([nd.attr(node, "axis", 0)], rank)
    if shape is None or not axes or not along or along[0] in axes:
        raise Miss("the shapes of its views are not known")
    if only_reader(g, view.output[0]) is None:
        raise Miss("something else reads the view")
    axis = along[0] - sum(one < along[0] for one in axes)
    attributes = {**nd.attrs(node), "axis": axis}
    parts = g.add("Split", [x, *node.input[1:]], len(node.output), attributes, at=node).output
    results: list[str] = []
    for old, part in zip(node.output, parts, strict=True):
        sizes = g.shape(old)
        if sizes is not None:
            kept = tuple(size for place, size in enumerate(sizes) if place not in axes)
            g.learn_type(part, TensorType(g.dtype(x), kept))
        results.append(unsqueeze(g, part, axes, at=node))
    return results


def _put(g: Graph, part: str, entry: Entry, axis: int, node: NodeProto) -> str:
    """Let the readers of an entry read the part, most of them without the axis of size 1.

    The name of the part from now on: one that is an output of the graph has that one's.
    """
    if not entry.has_axis:
        return g.replace(entry.value, part)
    for user in g.users(entry.value):
        axes = int_operand(g, user, "axes", 1) if nd.is_op(user, "Squeeze") else None
        if positive_axes(axes, g.rank(entry.value)) == [axis]:
            part = g.replace(user.output[0], part)
            g.prune(user)
    if not g.is_unused(entry.value):
        g.replace(entry.value, unsqueeze(g, part, [axis], at=node))
    return part


@dataclass(frozen=True, slots=True)
class Packed:
    """How the last axis of a value is split, and the axes are moved then."""

    g: Graph
    leading: Shape
    """The axes before the parts."""
    count: int
    heads: tuple[int, ...]
    """What a part is split into."""
    perm: tuple[int, ...]

    @classmethod
    def of(cls, g: Graph, x: str, apart: NodeProto, node: NodeProto) -> Packed:
        shape, sizes, perm = g.shape(x), g.shape(apart.output[0]), permutation(g, node)
        if not shape or sizes is None or perm is None or not isinstance(shape[-1], int):
            raise Miss("the shapes of its views are not known")
        numbers: list[int] = []
        for size in reversed(sizes):
            if not isinstance(size, int) or prod(numbers) >= shape[-1]:
                break
            numbers.insert(0, size)
        if len(numbers) < 3 or prod(numbers) != shape[-1]:
            raise Miss("the last axis is not split into parts, heads and their elements")
        if not 1 < numbers[0] <= _MOST_PARTS:
            raise Miss("the last axis has one part, or many")
        leading = sizes[: len(sizes) - len(numbers)]
        return cls(g, leading, numbers[0], tuple(numbers[1:]), perm)

    @property
    def axis(self) -> int:
        """Where the parts are, behind the Transpose."""
        return self.perm.index(len(self.leading))

    def parts(self, x: str, wanted: Sequence[int], node: NodeProto) -> dict[int, str]:
        """The parts of `x`, each as it is behind the Transpose."""
        g, place, width = self.g, len(self.leading), prod(self.heads)
        shape = g.shape(x) or ()
        sizes = int_vector(g, [width] * self.count, "sizes")
        split = g.add("Split", [x, sizes], self.count, {"axis": len(shape) - 1}, at=node)
        order = [axis - (axis > place) for axis in self.perm if axis != place]
        found: dict[int, str] = {}
        for index in wanted:
            part = split.output[index]
            g.learn_type(part, TensorType(g.dtype(x), (*shape[:-1], width)))
            part = _viewed(g, part, (*self.leading, width), node)
            part = _viewed(g, part, (*self.leading, *self.heads), node)
            found[index] = transpose(g, part, order, at=node)
            turned = tuple((*self.leading, *self.heads)[axis] for axis in order)
            g.learn_type(found[index], TensorType(g.dtype(x), turned))
        return found


def _viewed(g: Graph, value: str, shape: Shape, node: NodeProto) -> str:
    """`value` in another shape, if it is not in that already."""
    if g.shape(value) == shape:
        return value
    target = reshape_target(g.shape(value), shape)
    if target is None:
        raise Miss("how its parts are to be viewed differs from run to run")
    view = reshape(g, value, target, at=node)
    g.learn_type(view, TensorType(g.dtype(value), shape))
    return view


def _merged(g: Graph, value: str, axis: int) -> NodeProto | None:
    """The one Reshape that reads `value`, where the parts come first and stay there."""
    users = g.users(value)
    if axis or len(users) != 1 or not nd.is_op(users[0], "Reshape") or g.is_output(value):
        return None
    before, after = g.shape(value), g.shape(users[0].output[0])
    return users[0] if before and after and before[0] == after[0] else None


# -- what is read


@dataclass(frozen=True, slots=True)
class Entry:
    """A value that is one entry of an axis; `has_axis`: that is still there, and of size 1."""

    value: str
    index: int
    has_axis: bool
    reader: NodeProto


def _entries(g: Graph, value: str, axis: int, count: int) -> list[Entry]:
    """All that is read of `value`, if that is single entries of this axis."""
    if g.is_output(value) or g.is_captured(value):
        raise Miss("all of it is read")
    found: list[Entry] = []
    for user in g.users(value):
        entries = _entries_of(g, user, value, axis, count)
        if not entries:
            raise Miss(f"{nd.label(user)} reads something else than one part of it")
        found.extend(entries)
    return found


def _entries_of(g: Graph, node: NodeProto, value: str, axis: int, count: int) -> list[Entry]:
    if node.input[0] != value or not nd.is_op(node, "Gather", "Slice", "Split"):
        return []
    if nd.is_op(node, "Slice"):
        bounds = cut(g, node)
        if bounds is None or bounds[0] != axis or bounds[2] != bounds[1] + 1:
            return []
        return [Entry(node.output[0], bounds[1], True, node)]
    if positive_axes([nd.attr(node, "axis", 0)], g.rank(value)) != [axis]:
        return []
    if nd.is_op(node, "Split"):
        sizes = [(g.shape(part) or (None,) * (axis + 1))[axis] for part in node.output]
        if sizes != [1] * count:
            return []
        return [Entry(part, at, True, node) for at, part in enumerate(node.output) if part]
    indices = ints(g, node.input[1]) if g.rank(node.input[1]) == 0 else None
    if not indices or not -count <= indices[0] < count:
        return []
    return [Entry(node.output[0], indices[0] % count, False, node)]
