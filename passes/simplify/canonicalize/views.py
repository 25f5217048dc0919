"""Operators that only say how the same elements are arranged.

Reshape, Flatten, Squeeze and Unsqueeze keep the order of the elements: two in a row are one, and
whatever ends in the shape that it started from is nothing. `cleanup` and `layout` both do this.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import (
    dims,
    given,
    int_operand,
    int_vector,
    permutation,
    reshape,
    reshape_target,
    same_shape,
    squeeze,
    transpose,
    unsqueeze,
)
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import Shape
from toolkit.pattern import op, var
from toolkit.rewriting.rule import rewrite
from toolkit.symbolic import Dim, Expr, is_positive

x = var("x")

VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")


@rewrite(op.any(*VIEWS)(x, ...))
def view_without_effect(g: Graph, x: str, node: NodeProto) -> str | None:
    if same_shape(g, x, node.output[0]):
        return x
    if nd.is_op(node, "Reshape"):
        return x if _copies_all(g, x, node) else None
    if nd.is_op(node, "Flatten"):
        return x if _flat_already(g, x, node) else None
    # A Squeeze of no axes, on the other hand, removes every dimension of size 1.
    empty = nd.is_op(node, "Unsqueeze") and int_operand(g, node, "axes", 1) == []
    return x if empty else None


def _copies_all(g: Graph, x: str, node: NodeProto) -> bool:
    """A Reshape to [0, 0, -1] and the like, as long as what it reads."""
    target = dims(g, given(node, 1)) if given(node, 1) else None
    rank = g.rank(x)
    if target is None or rank != len(target) or nd.attr(node, "allowzero", 0):
        return False
    return all(size in (0, -1) for size in target) and target.count(-1) <= 1


def _flat_already(g: Graph, x: str, node: NodeProto) -> bool:
    return g.rank(x) == 2 and nd.attr(node, "axis", 1) in (1, -1)


@rewrite(op.any(*VIEWS)(op.any(*VIEWS)(x, ...).shared().named("inner"), ...))
def view_and_back(g: Graph, x: str, inner: NodeProto, node: NodeProto) -> str | None:
    """Two views that end in the shape that they started from."""
    if same_shape(g, x, node.output[0]):
        return x
    pair = {inner.op_type, node.op_type}
    if pair != {"Squeeze", "Unsqueeze"}:
        return None
    first, second = _axes(g, inner), _axes(g, node)
    return x if first is not None and second is not None and set(first) == set(second) else None


@rewrite(op.Reshape(op.any(*VIEWS)(x, ...).shared().named("inner"), var("shape")))
def reshape_of_view(g: Graph, x: str, inner: NodeProto, shape: str, node: NodeProto) -> str | None:
    """The last shape counts. Where it says "as before" (0), before must have been the same."""
    if nd.attr(node, "allowzero", 0):
        return g.op("Reshape", x, shape, at=node, allowzero=1)
    target = dims(g, shape)
    before, between = g.shape(x), g.shape(inner.output[0])
    if target is None:
        return None
    written: list[int] = []
    computed = False
    for place, size in enumerate(target):
        kept: Dim | None = between[place] if between and place < len(between) else None
        copied = before is not None and place < len(before) and before[place] == kept
        if isinstance(size, Expr):
            # Computed at run time: 0 for an empty dimension, which then means "as before".
            if not copied and not is_positive(size):
                return None
            written.append(-1)
            computed = True
        elif size == 0 and not copied:
            if not isinstance(kept, int) or not kept:
                return None
            written.append(kept)
        else:
            written.append(size)
    if any(old == 0 != new for old, new in zip(target, written, strict=True)):
        if computed:
            return None
        shape = int_vector(g, written, "shape")
    return g.op("Reshape", x, shape, at=node)


@rewrite(
    op.Squeeze(op.Squeeze(x, ...).shared().named("inner"), ...),
    op.Unsqueeze(op.Unsqueeze(x, ...).shared().named("inner"), ...),
)
def merged_axes(g: Graph, x: str, inner: NodeProto, node: NodeProto) -> str | None:
    """One Squeeze or Unsqueeze does for two."""
    first, second = _axes(g, inner), _axes(g, node)
    if first is None or second is None:
        return None
    if nd.is_op(node, "Squeeze"):
        return squeeze(g, x, _squeezed(first, second), at=node)
    return unsqueeze(g, x, _unsqueezed(first, second), at=node)


@rewrite(op.any("Flatten", "Squeeze", "Unsqueeze")(op.any(*VIEWS)(x, ...), ...), opset=5)
def view_of_view(g: Graph, x: str, node: NodeProto) -> str | None:
    """A Reshape does for two, if it can be told the shape."""
    target = reshape_target(g.shape(x), g.shape(node.output[0]))
    return None if target is None else reshape(g, x, target, at=node)


@rewrite(op.Reshape(x, var("shape")), opset=13)
def reshape_by_ones(g: Graph, x: str, shape: str, node: NodeProto) -> str | None:
    """A computed shape that only adds axes of size 1, or only drops some, need not be computed."""
    return None if g.is_const(shape) else _by_ones(g, x, node)


@rewrite(op.any(*VIEWS)(op.any(*VIEWS)(x, ...).shared(), ...), opset=13)
def views_by_ones(g: Graph, x: str, node: NodeProto) -> str | None:
    """Views that together only add axes of size 1, or only drop some."""
    return _by_ones(g, x, node)


def _by_ones(g: Graph, x: str, node: NodeProto) -> str | None:
    before, after = g.shape(x), g.shape(node.output[0])
    if before is None or after is None or len(before) == len(after):
        return x if before is not None and before == after else None
    if len(before) < len(after):
        axes = _ones_among(after, before)
        return None if axes is None else unsqueeze(g, x, axes, at=node)
    axes = _ones_among(before, after)
    return None if axes is None else squeeze(g, x, axes, at=node)


def _ones_among(longer: Shape, shorter: Shape) -> list[int] | None:
    """The axes of size 1 that are all that `longer` has more."""
    axes: list[int] = []
    left = list(shorter)
    for axis, size in enumerate(longer):
        if left and left[0] == size:
            left.pop(0)
        elif size == 1:
            axes.append(axis)
        else:
            return None
    return None if left else axes


def _axes(g: Graph, node: NodeProto) -> list[int] | None:
    """The axes that a Squeeze removes from its input, or that an Unsqueeze adds to its output."""
    whole = node.input[0] if nd.is_op(node, "Squeeze") else node.output[0]
    return positive_axes(int_operand(g, node, "axes", 1), g.rank(whole)) or None


def _squeezed(first: list[int], second: list[int]) -> list[int]:
    """The second axes count what the first Squeeze left."""
    last = max([*first, len(first) + max(second, default=0)], default=0)
    left = [axis for axis in range(last + 1) if axis not in first]
    return sorted([*first, *(left[axis] for axis in second)])


def _unsqueezed(first: list[int], second: list[int]) -> list[int]:
    """The first axes count what the second Unsqueeze then spreads out."""
    last = len(second) + max(first, default=0)
    places = [axis for axis in range(last + 1) if axis not in second]
    return sorted([*second, *(places[axis] for axis in first)])


@rewrite(op.Transpose(x))
def transpose_without_effect(g: Graph, x: str, node: NodeProto) -> str | None:
    perm = permutation(g, node)
    return x if perm is not None and list(perm) == sorted(perm) else None


@rewrite(op.Transpose(op.Transpose(x).shared().named("inner")))
def transpose_of_transpose(g: Graph, x: str, inner: NodeProto, node: NodeProto) -> str | None:
    first, second = permutation(g, inner), permutation(g, node)
    if first is None or second is None or len(first) != len(second):
        return None
    whole = [first[axis] for axis in second]
    return x if whole == sorted(whole) else transpose(g, x, whole, at=node)


@rewrite(
    op.Transpose(op.any("Squeeze", "Unsqueeze")(op.Transpose(x).named("first"), ...).named("ones"))
)
def transposes_around_ones(
    g: Graph, x: str, first: NodeProto, ones: NodeProto, node: NodeProto
) -> str | None:
    """Two Transposes are one, where only axes of size 1 come or go between."""
    outer, inner, axes = permutation(g, node), permutation(g, first), _axes(g, ones)
    if outer is None or inner is None or axes is None:
        return None
    if nd.is_op(ones, "Unsqueeze"):
        old = [axis for axis in range(len(outer)) if axis not in axes]
        perm = [inner[old.index(axis)] for axis in outer if axis not in axes]
        added = [place for place, axis in enumerate(outer) if axis in axes]
        return unsqueeze(g, _transposed(g, x, perm, node), added, at=node)
    kept = [axis for place, axis in enumerate(inner) if place not in axes]
    ranks = sorted(kept)
    less = squeeze(g, x, sorted(inner[axis] for axis in axes), at=node)
    return _transposed(g, less, [ranks.index(kept[place]) for place in outer], node)


def _transposed(g: Graph, x: str, perm: list[int], node: NodeProto) -> str:
    return x if perm == sorted(perm) else transpose(g, x, perm, at=node)


RULES = (
    view_without_effect,
    view_and_back,
    reshape_of_view,
    merged_axes,
    view_of_view,
    transpose_without_effect,
    transpose_of_transpose,
    transposes_around_ones,
)

BY_ONES = (reshape_by_ones, views_by_ones)
"""For computed shapes: once, when all sizes are known."""
