"""What a value is wherever a mask is zero: an interval, element by element.

    mask [b, s] = 0    =>    Where(Cast(Unsqueeze(mask, [1, 2])), 0, -inf) [b, :, :, s] = -inf

A `Place` says along which axes of a value the batch and the length of the mask lie; both are
counted from the last axis, as broadcasting does. What cannot be told is anything at all. The same
is asked of tokens that are real: what each of them is to all others, and to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.axes import positive_axes
from passes.operands import int_operand, permutation
from toolkit import nodes as nd
from toolkit.graph import Graph
from toolkit.types import FLOATS, Shape

_DEPTH = 48
"""Masks are made in a few steps; what takes more is not looked into."""
_MOST_ELEMENTS = 1 << 24

_FLAG = TensorProto.BOOL


class Interval(NamedTuple):
    """Everything from `low` to `high`; flags are 0 and 1."""

    low: float
    high: float

    @property
    def number(self) -> float | None:
        """The only number in it."""
        return self.low if self.low == self.high else None


ANYTHING, FLAG, NO, YES = (
    Interval(-math.inf, math.inf),
    Interval(0, 1),
    Interval(0, 0),
    Interval(1, 1),
)

REAL = Interval(1, 1 << 20)
"""Numbers by which a mask says that a token is real, those of words among them."""


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


NOWHERE = Place(None, None)
"""Of what does not vary with the mask, or not in a way that can be told: any of its elements."""


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
                found = FLAG if self.g.dtype(value) == _FLAG else ANYTHING
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
        if nd.is_op(node, *_VIEWS):
            seen = _VIEWS[node.op_type](g, node, place) or NOWHERE
            return self.at(node.input[0], seen, depth - 1)
        function = _function(node, g.dtype(value))
        if function is None:
            return None
        if nd.is_op(node, *_OF_EQUALS) and self._reads_one_twice(node, place):
            return _OF_EQUALS[node.op_type]
        operands = [
            self.at(name, self.aligned(name, place), depth - 1) for name in nd.inputs_of(node)
        ]
        found = function(*operands)
        return _in_type(found, g.dtype(value))

    def _of_mask(self, place: Place) -> Interval | None:
        if place.axes != self.place(-2, -1).axes:
            return None
        real = YES if self.g.dtype(self.mask) == _FLAG else REAL
        return real if place.is_real else NO

    def aligned(self, name: str, place: Place) -> Place:
        """The place in an operand that is broadcast; none along an axis that it does not have."""
        shape = self.g.shape(name) or ()
        return place.moved(lambda axis: axis if -axis <= len(shape) and shape[axis] != 1 else None)

    def _reads_one_twice(self, node: NodeProto, place: Place) -> bool:
        """Whether it reads two operands that are one whole number: of a query, and of a key."""
        if place.twin is None or self.g.dtype(node.input[0]) in FLOATS:
            return False
        first, second = (self._origin(name, self.aligned(name, place)) for name in node.input)
        return first == second and first is not None

    def _origin(self, value: str, place: Place) -> tuple[str, Place] | None:
        """The one element that views have put at this place."""
        node = self.g.producer(value)
        while node is not None and nd.is_op(node, *_VIEWS):
            place = _VIEWS[node.op_type](self.g, node, place) or NOWHERE
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
        return None if math.isnan(found.low) else found


def is_told(node: NodeProto) -> bool:
    """Whether anything is known of what it gives."""
    return nd.is_op(node, "Cast", "Range", *_VIEWS, *_FUNCTIONS)


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
    if shape is None:
        return None
    return place.moved(lambda axis: axis if -axis <= len(shape) and shape[axis] != 1 else None)


def _some(g: Graph, node: NodeProto, place: Place) -> Place | None:
    """One that picks elements."""
    return None


def _same(g: Graph, node: NodeProto, place: Place) -> Place | None:
    return place


def _renumbered(place: Place, kept: Sequence[int], rank: int) -> Place:
    """The place among the axes that are kept; none along another."""
    numbers = {axis - rank: number - len(kept) for number, axis in enumerate(kept)}
    return place.moved(numbers.get)


_VIEWS: dict[str, Callable[[Graph, NodeProto, Place], Place | None]] = {
    "Expand": _expand,
    "Gather": _some,
    "Identity": _same,
    "Reshape": _reshape,
    "Slice": _some,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}


# -- operators that work on each element


def _add(x: Interval, y: Interval) -> Interval:
    return Interval(x.low + y.low, x.high + y.high)


def _sub(x: Interval, y: Interval) -> Interval:
    return Interval(x.low - y.high, x.high - y.low)


def _mul(x: Interval, y: Interval) -> Interval:
    corners = [a * b for a in x for b in y]
    if not any(map(math.isnan, corners)):
        return _hull(*corners)
    # Of what nothing is known is taken to be finite, so that 0 times that is 0.
    return NO if {x, y} == {NO, ANYTHING} else ANYTHING


def _abs(x: Interval) -> Interval:
    return _most(x, _neg(x))


def _neg(x: Interval) -> Interval:
    return Interval(-x.high, -x.low)


def _where(condition: Interval, x: Interval, y: Interval) -> Interval:
    if condition in (YES, NO):
        return x if condition == YES else y
    return Interval(min(x.low, y.low), max(x.high, y.high))


def _not(x: Interval) -> Interval:
    return Interval(1 - x.high, 1 - x.low)


def _and(x: Interval, y: Interval) -> Interval:
    return Interval(min(x.low, y.low), min(x.high, y.high))


def _or(x: Interval, y: Interval) -> Interval:
    return Interval(max(x.low, y.low), max(x.high, y.high))


def _less(x: Interval, y: Interval) -> Interval:
    if ANYTHING in (x, y):  # not even a number, perhaps, and then not less and not equal
        return FLAG
    return YES if x.high < y.low else NO if x.low >= y.high else FLAG


def _greater(x: Interval, y: Interval) -> Interval:
    return _less(y, x)


def _not_less(x: Interval, y: Interval) -> Interval:
    return _not(_less(x, y))


def _not_greater(x: Interval, y: Interval) -> Interval:
    return _not(_less(y, x))


def _equal(x: Interval, y: Interval) -> Interval:
    if x.number is not None and x.number == y.number:
        return YES
    return NO if x.high < y.low or y.high < x.low else FLAG


def _range(start: Interval, limit: Interval, delta: Interval) -> Interval:
    """Numbers of positions, all of 64 bits, from the first one on."""
    return Interval(start.low, min(limit.high, (1 << 63) - 1)) if delta.low > 0 else ANYTHING


def _least(*operands: Interval) -> Interval:
    if ANYTHING in operands:  # the least of numbers and something that is none is none
        return ANYTHING
    return Interval(*(min(ends) for ends in zip(*operands, strict=True)))


def _most(*operands: Interval) -> Interval:
    if ANYTHING in operands:
        return ANYTHING
    return Interval(*(max(ends) for ends in zip(*operands, strict=True)))


def _hull(*numbers: float) -> Interval:
    return Interval(min(numbers), max(numbers))


_FUNCTIONS: dict[str, Callable[..., Interval]] = {
    "Abs": _abs,
    "Add": _add,
    "And": _and,
    "Equal": _equal,
    "Greater": _greater,
    "GreaterOrEqual": _not_less,
    "Less": _less,
    "LessOrEqual": _not_greater,
    "Max": _most,
    "Min": _least,
    "Mul": _mul,
    "Neg": _neg,
    "Not": _not,
    "Or": _or,
    "Sub": _sub,
    "Where": _where,
}


_OF_EQUALS = {
    "Equal": YES,
    "Greater": NO,
    "GreaterOrEqual": YES,
    "Less": NO,
    "LessOrEqual": YES,
    "Sub": NO,
}
"""What these make of a whole number and the same again."""


def _function(node: NodeProto, dtype: int) -> Callable[..., Interval] | None:
    """What the node does with intervals, to give one of this type."""
    if nd.is_op(node, "Cast"):
        return _converted(dtype)
    if nd.is_op(node, "Range"):
        return _range if dtype == TensorProto.INT64 else None
    return _FUNCTIONS.get(node.op_type) if nd.is_op(node, *_FUNCTIONS) else None


def _converted(dtype: int) -> Callable[[Interval], Interval]:
    """What a Cast does."""

    def to_flag(x: Interval) -> Interval:
        return YES if x.low > 0 or x.high < 0 else NO if x == NO else FLAG

    def to_whole(x: Interval) -> Interval:
        return ANYTHING if math.inf in map(abs, x) else Interval(*map(math.trunc, x))

    return to_flag if dtype == _FLAG else _same_number if dtype in FLOATS else to_whole


def _same_number(x: Interval) -> Interval:
    return x


def _in_type(x: Interval, dtype: int) -> Interval | None:
    """What numbers of this type are, if they were computed so: rounded, and none is undefined."""
    if not dtype or math.isnan(x.low) or math.isnan(x.high):
        return None
    if dtype == _FLAG:
        return x
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    if dtype in FLOATS:
        with np.errstate(over="ignore"):  # what is too large is infinite
            return Interval(*np.array(x).astype(kind).tolist())
    if kind.kind not in "iu":
        return None
    limits = np.iinfo(kind)
    return x if limits.min <= x.low and x.high <= limits.max else None
