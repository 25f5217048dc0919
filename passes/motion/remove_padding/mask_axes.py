"""The axes of a value along which a mask lies, followed to the operands of its producer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from onnx import NodeProto

from passes.analysis.axis_flow import BROADCAST, MIXED, carried_from
from toolkit.ir import Graph, Shape


class MaskAxes(NamedTuple):
    """The axes of a value along which a mask [batch, length] lies, counted from the end.

    None stands for any entry: the value does not vary with the mask there, or in no known way. The
    batch is None where its size is always 1. With `twin`, a second axis of tokens, the positions
    are those at which both axes have the same token: a query at its own key.
    """

    batch: int | None
    row: int | None
    twin: int | None = None
    is_real: bool = False
    """Whether these are the positions where the mask is in `REAL`, not those where it is zero."""

    @property
    def axes(self) -> tuple[int | None, ...]:
        return self.batch, self.row, self.twin

    def moved(self, move: Callable[[int], int | None]) -> MaskAxes:
        batch, row, twin = (None if axis is None else move(axis) for axis in self.axes)
        if row is None or row == twin:
            row, twin = twin, None
        return MaskAxes(batch, row, twin, self.is_real)

    def within(self, shape: Shape) -> MaskAxes:
        """Return the axes of an operand of this shape, which is broadcast."""
        return self.moved(lambda axis: axis if -axis <= len(shape) and shape[axis] != 1 else None)

    def before(self, g: Graph, node: NodeProto) -> MaskAxes:
        """Return the axes of the first operand of a node that only moves data."""
        sources, rank = carried_from(g, node), g.rank(node.input[0])
        if sources is None or rank is None:
            return ANYWHERE
        if any(axis is not None and sources[axis] == MIXED for axis in self.axes):
            return ANYWHERE
        return self.moved(lambda axis: None if sources[axis] == BROADCAST else sources[axis] - rank)


ANYWHERE = MaskAxes(None, None)
"""The axes where nothing is known: any element of the value."""
