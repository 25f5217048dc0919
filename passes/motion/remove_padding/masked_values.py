"""What a value is wherever a mask is zero: an interval, element by element.

    mask [b, s] = 0    =>    Where(Cast(Unsqueeze(mask, [1, 2])), 0, -inf) [b, :, :, s] = -inf

A `Place` says along which axes of a value the batch and the length of the mask lie; both are
counted from the last axis, as broadcasting does. What cannot be told is anything at all. The same
is asked of tokens that are real: what each of them is to all others, and to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.intervals import (
    ANYTHING,
    FLAG,
    FUNCTIONS,
    NO,
    OF_EQUALS,
    WILD,
    YES,
    Interval,
    function_of,
    in_type,
)
from passes.motion.remove_padding.mask_axes import NOWHERE, VIEWS, Place
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import FLOATS, Shape

_DEPTH = 48
"""Masks are made in a few steps; what takes more is not looked into."""
_MOST_ELEMENTS = 1 << 24

REAL = Interval(1, 1 << 20)
"""Numbers by which a mask says that a token is real, those of words among them."""


@dataclass(frozen=True, slots=True, eq=False)
class Padding:
    """What is known of the values of a graph where `mask`, of [batch, length], is zero."""

    g: Graph
    mask: str
    sizes: Shape
    _known: dict[tuple[str, Place], Interval] = field(
        default_factory=dict[tuple[str, Place], Interval]
    )

    def place(self, batch: int, row: int) -> Place:
        """Where the mask is zero."""
        return Place(None if self.sizes[0] == 1 else batch, row)

    def real(self, batch: int, row: int, twin: int | None = None) -> Place:
        """Where the mask says that a token is real."""
        return self.place(batch, row)._replace(twin=twin, is_real=True)

    def at(self, value: str, place: Place, depth: int = _DEPTH) -> Interval:
        """What `value` is at the given place."""
        key = value, place
        if key not in self._known:
            found = self._find(value, place, depth) if depth else None
            if found is None:
                found = FLAG if self.g.dtype(value) == TensorProto.BOOL else ANYTHING
            self._known[key] = found
        return self._known[key]

    def _find(self, value: str, place: Place, depth: int) -> Interval | None:
        """None: it cannot be told."""
        g = self.g
        if value == self.mask:
            return self._of_mask(place)
        if g.is_const(value):
            return self._stored(value, place)
        node = g.producer(value)
        if node is None:
            return None
        if nd.is_op(node, *VIEWS):
            seen = VIEWS[node.op_type](g, node, place) or NOWHERE
            return self.at(node.input[0], seen, depth - 1)
        function = function_of(node, g.dtype(value))
        if function is None:
            return None
        if nd.is_op(node, *OF_EQUALS) and self._reads_one_twice(node, place):
            return OF_EQUALS[node.op_type]
        operands = [
            self.at(name, self.aligned(name, place), depth - 1) for name in nd.inputs_of(node)
        ]
        # But for a choice that is known, everything is as wild as what it reads.
        known = nd.is_op(node, "Where") and operands[0].number is not None
        if not known and any(operand.is_wild for operand in operands):
            return in_type(WILD, g.dtype(value))
        return in_type(function(*operands), g.dtype(value))

    def _of_mask(self, place: Place) -> Interval | None:
        if place.axes != self.place(-2, -1).axes:
            return None
        real = YES if self.g.dtype(self.mask) == TensorProto.BOOL else REAL
        return real if place.is_real else NO

    def aligned(self, name: str, place: Place) -> Place:
        """The place in an operand that is broadcast."""
        return place.within(self.g.shape(name) or ())

    def _reads_one_twice(self, node: NodeProto, place: Place) -> bool:
        """Whether it reads two operands that are one whole number: of a query, and of a key."""
        if place.twin is None or self.g.dtype(node.input[0]) in FLOATS:
            return False
        first, second = (self._origin(name, self.aligned(name, place)) for name in node.input)
        return first == second and first is not None

    def _origin(self, value: str, place: Place) -> tuple[str, Place] | None:
        """The one element that views have put at this place."""
        node = self.g.producer(value)
        while node is not None and nd.is_op(node, *VIEWS):
            place = VIEWS[node.op_type](self.g, node, place) or NOWHERE
            value = node.input[0]
            node = self.g.producer(value)
        shape = self.g.shape(value)
        if shape is None or any(
            size != 1 and axis - len(shape) not in place.axes for axis, size in enumerate(shape)
        ):
            return None
        return value, place

    def _stored(self, value: str, place: Place) -> Interval | None:
        stored = self.g.const(value)
        if stored is None or stored.dtype.kind not in "fiub":
            return None
        if place.row is not None and place.twin is not None:
            stored = np.diagonal(stored, axis1=place.row, axis2=place.twin)
        if not 0 < stored.size < _MOST_ELEMENTS:
            return None
        found = Interval(np.min(stored).item(), np.max(stored).item())
        return WILD if found == ANYTHING else found  # both infinities are in it


def is_told(node: NodeProto) -> bool:
    """Whether anything is known of what it gives."""
    return nd.is_op(node, "Cast", "Range", *VIEWS, *FUNCTIONS)


def sources(
    g: Graph, value: str, through: Callable[[NodeProto], bool] = lambda _: True
) -> list[str]:
    """A value, and all but constants that it is made of by such nodes."""
    found: dict[str, None] = {}
    pending = [value]
    while pending:
        value = pending.pop()
        if value and value not in found and not g.is_const(value):
            found[value] = None
            maker = g.producer(value)
            if maker is not None and through(maker):
                pending.extend([*maker.input, *g.captures_of(maker)])
    return list(found)
