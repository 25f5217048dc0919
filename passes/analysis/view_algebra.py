"""Views as regroupings of factors, so that no spelling of "split the heads" has to be listed.

Reshape splits and merges axes, Transpose moves them, Expand and Concat repeat them. If every axis
is a list of factors, all of that is bookkeeping: a value of shape [batch, 12, length, 64] is traced
back to

    x [batch] [length] [12, 64]        its axes are [batch] [12] [length] [64]

whatever chain of views lies between the two. A factor that the source does not have is a
repetition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import given, int_operand, permutation
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.op_traits import VIEWS
from toolkit.symbolic import Dim, floordiv

_LONGEST_CHAIN = 16


class Factor:
    """A part of an axis. It may turn out to be a product: then `parts` are its factors."""

    __slots__ = ("parts", "size")

    def __init__(self, size: Dim) -> None:
        self.size = size
        self.parts: list[Factor] = []

    def split(self, first: Dim, second: Dim) -> list[Factor]:
        self.parts = [Factor(first), Factor(second)]
        return self.parts


Axis = Sequence[Factor]


def leaves(axis: Iterable[Factor]) -> list[Factor]:
    """The factors as they are known by now; those of size 1 say nothing."""
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
class Source:
    """A value that the traced one is a view of, `scale` times: `axes` says which factors it has."""

    value: str
    axes: tuple[Axis, ...]
    scale: float


class Trace:
    """A value, its axes, and the values that it is a view of."""

    def __init__(self, g: Graph, value: str) -> None:
        self._g = g
        self.value = value
        shape = g.shape(value)
        self.axes: tuple[Axis, ...] = tuple([Factor(size)] for size in shape or ())
        self.sources = list(self._walk()) if shape else []

    def _walk(self) -> Iterator[Source]:
        """The value itself, then what it was made of, up to something that is no view."""
        source = Source(self.value, self.axes, 1.0)
        for _ in range(_LONGEST_CHAIN):
            yield source
            node = self._g.producer(source.value)
            before = None if node is None else _before(self._g, node, source)
            if before is None:
                return
            source = before


def _before(g: Graph, node: NodeProto, source: Source) -> Source | None:
    """The input of a view, seen with the factors of its output."""
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
    return None if axes is None else Source(node.input[0], tuple(axes), source.scale)


def _scaled(g: Graph, node: NodeProto, source: Source) -> Source | None:
    """A product with a scalar constant that leaves the shape alone."""
    for index in (0, 1) if node.op_type == "Mul" else (0,):
        value, number = node.input[index], g.const(node.input[1 - index])
        if number is None or number.size != 1 or number.dtype.kind != "f":
            continue
        if g.rank(value) != len(source.axes):
            continue
        factor = float(number.reshape(-1)[0])
        if node.op_type == "Div":
            factor = 1 / factor if factor else 0.0
        if factor:
            return Source(value, source.axes, source.scale * factor)
    return None


def _unrepeated(g: Graph, node: NodeProto, axes: Sequence[Axis]) -> Sequence[Axis] | None:
    """Axes that were 1 before lose their factors: those only repeat what there is."""
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
    """A value that is joined with itself is repeated as a whole."""
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
    """The same factors, in the same order, as axes of these sizes; None where that is unclear."""
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
    """whole / part where that is a whole number for all sizes; 0 says nothing about the rest."""
    if part == 0 or whole == 0:
        return None
    quotient = floordiv(whole, part)
    return quotient if quotient * part == whole else None


def int_product(factors: Iterable[Factor]) -> int | None:
    """The product of the sizes, if all are known."""
    size = size_of(factors)
    return size if isinstance(size, int) else None
