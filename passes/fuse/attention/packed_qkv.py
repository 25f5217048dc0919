"""Split query, key and value of one linear layer before their heads are transposed.

    x [batch, length, 3 * heads * size]
    Transpose(Reshape(x, [batch, length, 3, heads, size]), [2, 0, 3, 1, 4])[i]

Vision Transformers are exported like this. An entry of the axis of size 3 is a part of the last
axis of x. A Split of x itself yields tokens, which attention prefers, and saves the Transpose of
all three. Likewise, an Unsqueeze (for a single key and value head) moves after a Split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.axis_flow import BROADCAST, carried_from
from passes.analysis.operands import (
    int_operand,
    int_vector,
    ints,
    permutation,
    reshape,
    reshape_target,
    slice_range,
    transpose,
    unsqueeze,
)
from toolkit.ir import Graph, Shape, TensorType, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import rewrite

_MAX_PARTS = 8


@rewrite(op.Transpose(op.Reshape(var("x"), ...).named("apart")), opset=13)
def packed_heads(g: Graph, x: str, apart: NodeProto, node: NodeProto) -> str:
    """Transpose(Reshape(x))[i] = Transpose(Reshape(part i of x))"""
    packed = PackedHeads.of(g, x, apart, node)
    merged = _merged(g, node.output[0], packed.axis)
    whole = node if merged is None else merged
    entries = _entries(g, whole.output[0], packed.axis, packed.count)
    parts = packed.parts(x, sorted({entry.index for entry in entries}), node)
    if merged is not None:
        shape = (g.shape(merged.output[0]) or ())[1:]
        parts = {index: _viewed(g, part, shape, node) for index, part in parts.items()}
    for entry in entries:
        parts[entry.index] = _replace_entry(g, parts[entry.index], entry, packed.axis, node)
    for entry in entries:
        g.prune(entry.user)
    return node.output[0]


@rewrite(op.Split(op.Unsqueeze(var("x"), ...).named("view"), ...), opset=13)
def split_before_view(g: Graph, x: str, view: NodeProto, node: NodeProto) -> Sequence[str]:
    """Split(Unsqueeze(x)) = Unsqueeze(each part of x)"""
    sources = carried_from(g, view)
    along = positive_axes([nd.attr(node, "axis", 0)], g.rank(view.output[0]))
    if sources is None or not along or sources[along[0]] == BROADCAST:
        raise MatchFailure("a shape is not known, or the new axis is split")
    if g.sole_user(view.output[0]) is None:
        raise MatchFailure("the Unsqueeze has other users")
    axes = [axis for axis, source in enumerate(sources) if source == BROADCAST]
    attributes = {**nd.attrs(node), "axis": sources[along[0]]}
    parts = g.add("Split", [x, *node.input[1:]], len(node.output), attributes, at=node).output
    results: list[str] = []
    for old, part in zip(node.output, parts, strict=True):
        sizes = g.shape(old)
        if sizes is not None:
            kept = tuple(size for axis, size in enumerate(sizes) if axis not in axes)
            g.learn_type(part, TensorType(g.dtype(x), kept))
        results.append(unsqueeze(g, part, axes, at=node))
    return results


def _replace_entry(g: Graph, part: str, entry: AxisEntry, axis: int, node: NodeProto) -> str:
    """Replace an entry with the part; drop a Squeeze of its axis of size 1.

    Returns the new name of the part, which changes if it becomes an output of the graph.
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
class PackedHeads:
    """A Reshape of the last axis to [count, *heads], followed by a Transpose."""

    g: Graph
    leading: Shape
    """The sizes of the axes before it."""
    count: int
    heads: tuple[int, ...]
    perm: tuple[int, ...]

    @classmethod
    def of(cls, g: Graph, x: str, apart: NodeProto, node: NodeProto) -> PackedHeads:
        shape, sizes, perm = g.shape(x), g.shape(apart.output[0]), permutation(g, node)
        if not shape or sizes is None or perm is None or not isinstance(shape[-1], int):
            raise MatchFailure("a shape is not known")
        numbers: list[int] = []
        for size in reversed(sizes):
            if not isinstance(size, int) or prod(numbers) >= shape[-1]:
                break
            numbers.insert(0, size)
        if len(numbers) < 3 or prod(numbers) != shape[-1]:
            raise MatchFailure("the last axis is not split into parts, heads and head size")
        if not 1 < numbers[0] <= _MAX_PARTS:
            raise MatchFailure(f"the last axis is not split into 2 to {_MAX_PARTS} parts")
        leading = sizes[: len(sizes) - len(numbers)]
        return cls(g, leading, numbers[0], tuple(numbers[1:]), perm)

    @property
    def axis(self) -> int:
        """The axis of the parts after the Transpose."""
        return self.perm.index(len(self.leading))

    def parts(self, x: str, wanted: Sequence[int], node: NodeProto) -> dict[int, str]:
        """Write a Split of `x`; return the wanted parts, each in the layout after the Transpose."""
        g, parts_axis, width = self.g, len(self.leading), prod(self.heads)
        shape = g.shape(x) or ()
        sizes = int_vector(g, [width] * self.count, "sizes")
        split = g.add("Split", [x, sizes], self.count, {"axis": len(shape) - 1}, at=node)
        order = [axis - (axis > parts_axis) for axis in self.perm if axis != parts_axis]
        found: dict[int, str] = {}
        for index in wanted:
            part = split.output[index]
            g.learn_type(part, TensorType(g.dtype(x), (*shape[:-1], width)))
            part = _viewed(g, part, (*self.leading, width), node)
            part = _viewed(g, part, (*self.leading, *self.heads), node)
            found[index] = transpose(g, part, order, at=node)
        return found


def _viewed(g: Graph, value: str, shape: Shape, node: NodeProto) -> str:
    """Write `value` in another shape, unless it already has that shape."""
    if g.shape(value) == shape:
        return value
    target = reshape_target(g.shape(value), shape)
    if target is None:
        raise MatchFailure("no constant target of a Reshape expresses the sizes of its parts")
    return reshape(g, value, target, at=node, shape=shape)


def _merged(g: Graph, value: str, axis: int) -> NodeProto | None:
    """Return a Reshape that is the only user of `value` and keeps the parts as its first axis."""
    user = g.sole_user(value)
    if axis or user is None or not nd.is_op(user, "Reshape"):
        return None
    before, after = g.shape(value), g.shape(user.output[0])
    return user if before and after and before[0] == after[0] else None


# -- users


@dataclass(frozen=True, slots=True)
class AxisEntry:
    """A value that is one entry of an axis; with `has_axis` it keeps that axis, with size 1."""

    value: str
    index: int
    has_axis: bool
    user: NodeProto


def _entries(g: Graph, value: str, axis: int, count: int) -> list[AxisEntry]:
    """Return the users of `value`, which must take single entries of this axis."""
    if g.is_output(value) or g.is_captured(value):
        raise MatchFailure("the packed value is used as a whole, too")
    found: list[AxisEntry] = []
    for user in g.users(value):
        entries = _entries_of(g, user, value, axis, count)
        if not entries:
            raise MatchFailure(f"{nd.label(user)} does not select a single part")
        found.extend(entries)
    return found


def _entries_of(g: Graph, node: NodeProto, value: str, axis: int, count: int) -> list[AxisEntry]:
    if node.input[0] != value or not nd.is_op(node, "Gather", "Slice", "Split"):
        return []
    if nd.is_op(node, "Slice"):
        bounds = slice_range(g, node)
        if bounds is None or bounds[0] != axis or bounds[2] != bounds[1] + 1:
            return []
        return [AxisEntry(node.output[0], bounds[1], True, node)]
    if positive_axes([nd.attr(node, "axis", 0)], g.rank(value)) != [axis]:
        return []
    if nd.is_op(node, "Split"):
        sizes = [(g.shape(part) or (None,) * (axis + 1))[axis] for part in node.output]
        if sizes != [1] * count:
            return []
        return [AxisEntry(part, at, True, node) for at, part in enumerate(node.output) if part]
    indices = ints(g, node.input[1]) if g.rank(node.input[1]) == 0 else None
    if not indices or not -count <= indices[0] < count:
        return []
    return [AxisEntry(node.output[0], indices[0] % count, False, node)]
