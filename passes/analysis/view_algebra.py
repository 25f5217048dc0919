"""An algebra of views: axes as lists of factors.

Reshape splits and merges axes, Transpose permutes them, Expand and Concat repeat them. With every
axis a list of factors, each is a regrouping. A value of shape [batch, 12, length, 64] is traced to

    x [batch] [length] [12, 64]        its axes are [batch] [12] [length] [64]

through any chain of views between the two. A factor that the source lacks is a repetition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import given, int_operand, permutation, scalar_value
from toolkit.ir import Graph, node as nd
from toolkit.ir.op_traits import VIEWS
from toolkit.symbolic import Dim, floordiv

_LONGEST_CHAIN = 16


class Factor:
    """A factor of an axis; once it is split, `parts` are its own factors."""

    __slots__ = ("parts", "size")

    def __init__(self, size: Dim) -> None:
        self.size = size
        self.parts: list[Factor] = []

    def split(self, first: Dim, second: Dim) -> list[Factor]:
        self.parts = [Factor(first), Factor(second)]
        return self.parts


Axis = Sequence[Factor]


def leaves(axis: Iterable[Factor]) -> list[Factor]:
    """Return the unsplit factors, without those of size 1."""
    found: list[Factor] = []
    for factor in axis:
        if factor.parts:
            found.extend(leaves(factor.parts))
        elif factor.size != 1:
            found.append(factor)
    return found


def size_of(axis: Iterable[Factor]) -> Dim:
    size: Dim = 1
    for factor in leaves(axis):
        size = size * factor.size
    return size


@dataclass(frozen=True, slots=True)
class TracedSource:
    """A value such that the traced one is a view of `scale` times it, and its axes as factors."""

    value: str
    axes: tuple[Axis, ...]
    scale: float


class Trace:
    """A value, its axes as factors, and the values that it is a view of."""

    def __init__(self, g: Graph, value: str) -> None:
        self._g = g
        self.value = value
        shape = g.shape(value)
        self.axes: tuple[Axis, ...] = tuple([Factor(size)] for size in shape or ())
        self.sources = list(self._walk()) if shape else []

    def _walk(self) -> Iterator[TracedSource]:
        """Yield the value itself, then the sources of its chain of views, nearest first."""
        source = TracedSource(self.value, self.axes, 1.0)
        for _ in range(_LONGEST_CHAIN):
            yield source
            node = self._g.producer(source.value)
            before = None if node is None else _before(self._g, node, source)
            if before is None:
                return
            source = before


def _before(g: Graph, node: NodeProto, source: TracedSource) -> TracedSource | None:
    """Return the operand of a view, its axes in the factors of the result, or None."""
    if node.domain not in nd.STANDARD_DOMAINS or not node.input:
        return None
    if node.op_type in ("Mul", "Div"):
        return _scaled(g, node, source)
    axes: Sequence[Axis] | None = None
    if node.op_type == "Transpose":
        perm = permutation(g, node)
        if perm is not None and len(perm) == len(source.axes):
            axes = [source.axes[perm.index(axis)] for axis in range(len(perm))]
    elif node.op_type in VIEWS:
        shape = g.shape(node.input[0])
        axes = None if shape is None else regroup(source.axes, shape)
    elif node.op_type in ("Expand", "Tile"):
        axes = _unrepeated(g, node, source.axes)
    elif node.op_type == "Concat":
        axes = _unjoined(g, node, source.axes)
    elif node.op_type == "Identity":
        axes = source.axes
    return None if axes is None else TracedSource(node.input[0], tuple(axes), source.scale)


def _scaled(g: Graph, node: NodeProto, source: TracedSource) -> TracedSource | None:
    """Return the operand that Mul or Div scales by a constant without broadcasting it, or None."""
    for index in (0, 1) if node.op_type == "Mul" else (0,):
        value, factor = node.input[index], scalar_value(g, node.input[1 - index])
        if factor and g.rank(value) == len(source.axes):
            factor = 1 / factor if node.op_type == "Div" else factor
            return TracedSource(value, source.axes, source.scale * factor)
    return None


def _unrepeated(g: Graph, node: NodeProto, axes: Sequence[Axis]) -> Sequence[Axis] | None:
    """Return the axes of the operand of an Expand or Tile: repeated ones have no factors."""
    shape, result = g.shape(node.input[0]), g.shape(node.output[0])
    if shape is None or result is None or not given(node, 1) or len(shape) > len(axes):
        return None
    kept: list[Axis] = []
    for size, repeated, axis in zip(
        shape, result[len(result) - len(shape) :], axes[len(axes) - len(shape) :], strict=True
    ):
        if size == repeated:
            kept.append(axis)
        elif size == 1:
            kept.append([])
        else:
            return None
    return kept


def _unjoined(g: Graph, node: NodeProto, axes: Sequence[Axis]) -> Sequence[Axis] | None:
    """Return the axes of the operand of a Concat of one value with itself, or None."""
    axis: int = nd.attr(node, "axis", 0)
    shape = g.shape(node.input[0])
    if shape is None or len(shape) != len(axes) or any(x != node.input[0] for x in node.input):
        return None
    groups = regroup([axes[axis]], (len(node.input), shape[axis]))
    if groups is None:
        return None
    kept = list(axes)
    kept[axis] = groups[1]
    return kept


def viewed(g: Graph, node: NodeProto, axes: Sequence[Axis]) -> list[Axis] | None:
    """Return the axes of a view's result, given the axes of its input; None if that is unknown."""
    rank = len(axes)
    if node.op_type == "Transpose":
        perm = permutation(g, node)
        return [axes[axis] for axis in perm] if perm and len(perm) == rank else None
    if node.op_type == "Flatten":
        axis: int = nd.attr(node, "axis", 1)
        return [_merged(axes[:axis]), _merged(axes[axis:])] if -rank <= axis <= rank else None
    listed = int_operand(g, node, "axes", 1) if node.op_type in ("Squeeze", "Unsqueeze") else None
    if node.op_type == "Squeeze" and listed:
        gone = positive_axes(listed, rank)
        return None if gone is None else [a for i, a in enumerate(axes) if i not in gone]
    if node.op_type == "Unsqueeze":
        new = None if listed is None else positive_axes(listed, rank + len(listed))
        left = iter(axes)
        if new is not None:
            return [[] if i in new else next(left) for i in range(rank + len(new))]
    shape = g.shape(node.output[0])
    return None if shape is None else regroup(axes, shape)


def _merged(axes: Sequence[Axis]) -> Axis:
    return [factor for axis in axes for factor in axis]


def regroup(axes: Sequence[Axis], shape: Sequence[Dim]) -> list[Axis] | None:
    """Group the factors, in order, into axes of these sizes; None if sizes do not divide."""
    waiting = [factor for axis in axes for factor in leaves(axis)]
    waiting.reverse()
    groups: list[Axis] = []
    for size in shape:
        group: list[Factor] = []
        missing = size
        while missing != 1:
            if not waiting:
                return None
            factor = waiting.pop()
            rest = _divided(missing, factor.size)
            if rest is not None:
                group.append(factor)
                missing = rest
                continue
            rest = _divided(factor.size, missing)
            if rest is None:
                return None
            first, second = factor.split(missing, rest)
            group.append(first)
            waiting.append(second)
            missing = 1
        groups.append(group)
    return None if waiting else groups


def _divided(whole: Dim, part: Dim) -> Dim | None:
    """Return whole / part if the division is provably exact and neither is 0, or None."""
    if part == 0 or whole == 0:
        return None
    quotient = floordiv(whole, part)
    return quotient if quotient * part == whole else None


def int_product(factors: Iterable[Factor]) -> int | None:
    """Return the product of the sizes if it is a number, or None."""
    size = size_of(factors)
    return size if isinstance(size, int) else None
