"""Interval arithmetic: bounds of an operator's result from bounds of its operands.

The transfer function of an operator returns an interval that contains every result for operands in
the given intervals, rounded to their element type. An unknown operand may also be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto, helper

from toolkit.ir import FLOATS, node as nd


class Interval(NamedTuple):
    """All numbers from `low` to `high`; booleans are 0 and 1."""

    low: float
    high: float

    @property
    def number(self) -> float | None:
        """The only number in the interval, or None."""
        return self.low if self.low == self.high else None

    @property
    def may_be_nan(self) -> bool:
        return math.isnan(self.low) or math.isnan(self.high)


UNKNOWN = Interval(-math.inf, math.inf)
"""An interval without information. Its values are taken to be finite: 0 times them is 0."""
NAN = Interval(math.nan, math.nan)
"""The interval of values that may be NaN or infinite."""
ZERO, ONE, BOOLEAN = Interval(0, 0), Interval(1, 1), Interval(0, 1)

_ROUNDING = 1e-5
"""Relative error allowed for operators that runtimes approximate; some 80 ulp of a float32."""
_EXACT = 1 << 53
"""The largest integer up to which float division of integers truncates correctly."""


def _add(x: Interval, y: Interval) -> Interval:
    opposite = (-math.inf, math.inf) in ((x.low, y.high), (y.low, x.high))
    if opposite and {x, y} != {UNKNOWN}:
        return NAN
    return Interval(x.low + y.low, x.high + y.high)


def _sub(x: Interval, y: Interval) -> Interval:
    return _add(x, _neg(y))


def _mul(x: Interval, y: Interval) -> Interval:
    corners = [a * b for a in x for b in y]
    if not any(map(math.isnan, corners)):
        return _hull(*corners)
    return ZERO if {x, y} == {ZERO, UNKNOWN} else NAN


def _div(x: Interval, y: Interval) -> Interval:
    if UNKNOWN in (x, y):
        return UNKNOWN
    if y.low <= 0 <= y.high or math.inf in map(abs, (*x, *y)):
        return NAN
    return _widened(_hull(*(a / b for a in x for b in y)))


def _integer_div(x: Interval, y: Interval) -> Interval:
    if any(abs(end) > _EXACT for end in (*x, *y)) or y.low <= 0 <= y.high:
        return UNKNOWN
    return _hull(*(math.trunc(a / b) for a in x for b in y))


def _sqrt(x: Interval) -> Interval:
    if x == UNKNOWN:
        return UNKNOWN
    return NAN if x.low < 0 else _widened(Interval(*map(math.sqrt, x)))


def _log(x: Interval) -> Interval:
    if x == UNKNOWN:
        return UNKNOWN
    return NAN if x.low <= 0 else _widened(Interval(*map(math.log, x)))


def _widened(x: Interval) -> Interval:
    return Interval(x.low - _ROUNDING * abs(x.low), x.high + _ROUNDING * abs(x.high))


def _floor(x: Interval) -> Interval:
    return Interval(*(end if math.isinf(end) else math.floor(end) for end in x))


def _ceil(x: Interval) -> Interval:
    return _neg(_floor(_neg(x)))


def _sign(x: Interval) -> Interval:
    return UNKNOWN if x == UNKNOWN else Interval(*((end > 0) - (end < 0) for end in x))


def _abs(x: Interval) -> Interval:
    return _max(x, _neg(x))


def _neg(x: Interval) -> Interval:
    return Interval(-x.high, -x.low)


def _where(condition: Interval, x: Interval, y: Interval) -> Interval:
    if condition in (ONE, ZERO):
        return x if condition == ONE else y
    return Interval(min(x.low, y.low), max(x.high, y.high))


def _not(x: Interval) -> Interval:
    return Interval(1 - x.high, 1 - x.low)


def _and(x: Interval, y: Interval) -> Interval:
    return Interval(min(x.low, y.low), min(x.high, y.high))


def _or(x: Interval, y: Interval) -> Interval:
    return Interval(max(x.low, y.low), max(x.high, y.high))


def _less(x: Interval, y: Interval) -> Interval:
    if UNKNOWN in (x, y):  # NaN compares false with everything
        return BOOLEAN
    return ONE if x.high < y.low else ZERO if x.low >= y.high else BOOLEAN


def _greater(x: Interval, y: Interval) -> Interval:
    return _less(y, x)


def _greater_or_equal(x: Interval, y: Interval) -> Interval:
    return _not(_less(x, y))


def _less_or_equal(x: Interval, y: Interval) -> Interval:
    return _not(_less(y, x))


def _equal(x: Interval, y: Interval) -> Interval:
    if x.number is not None and x.number == y.number:
        return ONE
    return ZERO if x.high < y.low or y.high < x.low else BOOLEAN


def _range(start: Interval, limit: Interval, delta: Interval) -> Interval:
    """Return the bounds of increasing 64-bit integers."""
    return Interval(start.low, min(limit.high, (1 << 63) - 1)) if delta.low > 0 else UNKNOWN


def _min(*operands: Interval) -> Interval:
    if UNKNOWN in operands:  # the minimum of a number and NaN is NaN
        return UNKNOWN
    return Interval(*(min(ends) for ends in zip(*operands, strict=True)))


def _max(*operands: Interval) -> Interval:
    if UNKNOWN in operands:
        return UNKNOWN
    return Interval(*(max(ends) for ends in zip(*operands, strict=True)))


def _clip(x: Interval, low: Interval, high: Interval) -> Interval:
    return _min(_max(x, low), high)


def _hull(*numbers: float) -> Interval:
    return Interval(min(numbers), max(numbers))


def _identity(x: Interval) -> Interval:
    return x


def _to_boolean(x: Interval) -> Interval:
    return ONE if x.low > 0 or x.high < 0 else ZERO if x == ZERO else BOOLEAN


def _to_integer(x: Interval) -> Interval:
    return UNKNOWN if math.inf in map(abs, x) else Interval(*map(math.trunc, x))


_FUNCTIONS: dict[str, Callable[..., Interval]] = {
    "Abs": _abs,
    "Add": _add,
    "And": _and,
    "Ceil": _ceil,
    "Clip": _clip,
    "Div": _div,
    "Equal": _equal,
    "Floor": _floor,
    "Greater": _greater,
    "GreaterOrEqual": _greater_or_equal,
    "Less": _less,
    "LessOrEqual": _less_or_equal,
    "Log": _log,
    "Max": _max,
    "Min": _min,
    "Mul": _mul,
    "Neg": _neg,
    "Not": _not,
    "Or": _or,
    "Sign": _sign,
    "Sqrt": _sqrt,
    "Sub": _sub,
    "Where": _where,
}

ELEMENTWISE_BOUNDED = (*_FUNCTIONS, "Cast")
"""Elementwise and broadcasting operators with a transfer function."""

ON_EQUAL_INTEGERS = {
    "Equal": ONE,
    "Greater": ZERO,
    "GreaterOrEqual": ONE,
    "Less": ZERO,
    "LessOrEqual": ONE,
    "Sub": ZERO,
}
"""Results of operators whose two operands are the same integer."""


def transfer_function(node: NodeProto, dtype: int) -> Callable[..., Interval] | None:
    """Return the transfer function of a node with results of this type, or None."""
    if nd.is_op(node, "Cast"):
        if dtype == TensorProto.BOOL:
            return _to_boolean
        return _identity if dtype in FLOATS else _to_integer
    if nd.is_op(node, "Range"):
        return _range if dtype == TensorProto.INT64 else None
    if nd.is_op(node, "Div") and dtype not in FLOATS:
        return _integer_div
    if nd.is_op(node, "Clip") and len(nd.inputs_of(node)) != 3:
        return None  # bounds as attributes, or left out
    return _FUNCTIONS.get(node.op_type) if nd.is_op(node, *_FUNCTIONS) else None


def rounded_to(x: Interval, dtype: int) -> Interval | None:
    """Return the bounds of values computed in this element type; None if they may overflow."""
    if not dtype or x.may_be_nan:
        return NAN if dtype in FLOATS else None
    if dtype == TensorProto.BOOL:
        return x
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    if dtype in FLOATS:
        with np.errstate(over="ignore"):  # overflow gives infinity
            return Interval(*np.array(x).astype(kind).tolist())
    if kind.kind not in "iu":
        return None
    limits = np.iinfo(kind)
    return x if limits.min <= x.low and x.high <= limits.max else None


def bounds_of(stored: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Interval | None:
    """Return the bounds of a constant, or None if it is empty or has no numbers."""
    if not stored.size or stored.dtype.kind not in "fiub":
        return None
    found = Interval(np.min(stored).item(), np.max(stored).item())
    return NAN if found == UNKNOWN else found  # both infinities are in it
