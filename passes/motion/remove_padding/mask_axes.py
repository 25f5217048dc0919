"""Along which axes of a value a mask lies, and where that is in what the value was made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import int_operand, permutation
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import Shape


class Place(NamedTuple):
    """The axes of a value along which a mask lies, counted from its end: -1 is the last.

    None for one along which the value does not vary with the mask. The batch has none where it is
    always of one. Along `twin` is the same token as along `row`: a query that is its own key.
    """

    batch: int | None
    row: int | None
    twin: int | None = None
    is_real: bool = False
    """Whether it is where the mask is in REAL, not where it is zero."""

    @property
    def axes(self) -> tuple[int | None, ...]:
        return self.batch, self.row, self.twin

    def moved(self, move: Callable[[int], int | None]) -> Place:
        batch, row, twin = (None if axis is None else move(axis) for axis in self.axes)
        if row is None or row == twin:
            row, twin = twin, None
        return Place(batch, row, twin, self.is_real)

    def within(self, shape: Shape) -> Place:
        """The place in what is broadcast from this shape; none along an axis that it lacks."""
        return self.moved(lambda axis: axis if -axis <= len(shape) and shape[axis] != 1 else None)


NOWHERE = Place(None, None)
"""Of what does not vary with the mask, or not in a way that can be told: any of its elements."""


# -- operators that move elements: where the place is in what they read


def _unsqueeze(g: Graph, node: NodeProto, place: Place) -> Place | None:
    rank = g.rank(node.output[0])
    axes = positive_axes(int_operand(g, node, "axes", 1), rank)
    if axes is None or rank is None:
        return None
    return _renumbered(place, [axis for axis in range(rank) if axis not in axes], rank)


def _squeeze(g: Graph, node: NodeProto, place: Place) -> Place | None:
    rank = g.rank(node.input[0])
    axes = positive_axes(int_operand(g, node, "axes", 1), rank)
    if axes is None or rank is None:
        return None
    left = [axis for axis in range(rank) if axis not in axes]
    return place.moved(lambda axis: left[axis] - rank)


def _reshape(g: Graph, node: NodeProto, place: Place) -> Place | None:
    """One that puts axes of size 1 in, or takes them out."""
    before, after = g.shape(node.input[0]), g.shape(node.output[0])
    if before is None or after is None:
        return None
    old, new = ([axis for axis, size in enumerate(shape) if size != 1] for shape in (before, after))
    if [before[axis] for axis in old] != [after[axis] for axis in new]:
        return None
    found = {there - len(after): here - len(before) for here, there in zip(old, new, strict=True)}
    return place.moved(found.get)


def _transpose(g: Graph, node: NodeProto, place: Place) -> Place | None:
    perm = permutation(g, node)
    return None if perm is None else place.moved(lambda axis: perm[axis] - len(perm))


def _expand(g: Graph, node: NodeProto, place: Place) -> Place | None:
    shape = g.shape(node.input[0])
    return None if shape is None else place.within(shape)


def _some(g: Graph, node: NodeProto, place: Place) -> Place | None:
    """One that picks elements."""
    return None


def _same(g: Graph, node: NodeProto, place: Place) -> Place | None:
    return place


def _renumbered(place: Place, kept: Sequence[int], rank: int) -> Place:
    """The place among the axes that are kept; none along another."""
    numbers = {axis - rank: number - len(kept) for number, axis in enumerate(kept)}
    return place.moved(numbers.get)


VIEWS: dict[str, Callable[[Graph, NodeProto, Place], Place | None]] = {
    "Expand": _expand,
    "Gather": _some,
    "Identity": _same,
    "Reshape": _reshape,
    "Slice": _some,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
