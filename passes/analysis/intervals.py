"""Numbers that are only known to lie between two others, and what operators make of them.

An operator on intervals gives one that holds whatever it makes of numbers in them, rounded as their
type is. What is not known at all may also be no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto, helper

from toolkit.ir import node as nd
from toolkit.ir.tensor_type import FLOATS

_FLAG = TensorProto.BOOL


class Interval(NamedTuple):
    """Everything from `low` to `high`; flags are 0 and 1."""

    low: float
    high: float

    @property
    def number(self) -> float | None:
        """The only number in it."""
        return self.low if self.low == self.high else None

    @property
    def is_wild(self) -> bool:
        return math.isnan(self.low) or math.isnan(self.high)


ANYTHING, FLAG, NO, YES = (
    Interval(-math.inf, math.inf),
    Interval(0, 1),
    Interval(0, 0),
    Interval(1, 1),
)

WILD = Interval(math.nan, math.nan)
"""Of what may be no number. What is merely unknown is taken to be finite: 0 times that is 0."""


def _add(x: Interval, y: Interval) -> Interval:
    opposite = (-math.inf, math.inf) in ((x.low, y.high), (y.low, x.high))
    if opposite and {x, y} != {ANYTHING}:
        return WILD
    return Interval(x.low + y.low, x.high + y.high)


def _sub(x: Interval, y: Interval) -> Interval:
    return _add(x, _neg(y))


def _mul(x: Interval, y: Interval) -> Interval:
    corners = [a * b for a in x for b in y]
    if not any(map(math.isnan, corners)):
        return _hull(*corners)
    return NO if {x, y} == {NO, ANYTHING} else WILD


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


FUNCTIONS: dict[str, Callable[..., Interval]] = {
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


OF_EQUALS = {
    "Equal": YES,
    "Greater": NO,
    "GreaterOrEqual": YES,
    "Less": NO,
    "LessOrEqual": YES,
    "Sub": NO,
}
"""What these make of a whole number and the same again."""


def function_of(node: NodeProto, dtype: int) -> Callable[..., Interval] | None:
    """What the node does with intervals, to give one of this type."""
    if nd.is_op(node, "Cast"):
        return _converted(dtype)
    if nd.is_op(node, "Range"):
        return _range if dtype == TensorProto.INT64 else None
    return FUNCTIONS.get(node.op_type) if nd.is_op(node, *FUNCTIONS) else None


def _converted(dtype: int) -> Callable[[Interval], Interval]:
    """What a Cast does."""

    def to_flag(x: Interval) -> Interval:
        return YES if x.low > 0 or x.high < 0 else NO if x == NO else FLAG

    def to_whole(x: Interval) -> Interval:
        return ANYTHING if math.inf in map(abs, x) else Interval(*map(math.trunc, x))

    return to_flag if dtype == _FLAG else _same_number if dtype in FLOATS else to_whole


def _same_number(x: Interval) -> Interval:
    return x


def in_type(x: Interval, dtype: int) -> Interval | None:
    """What numbers of this type are, if they were computed so: rounded, and none is undefined."""
    if not dtype or x.is_wild:
        return WILD if dtype in FLOATS else None
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
