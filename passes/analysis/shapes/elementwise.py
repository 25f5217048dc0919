"""Rules of elementwise operators, and their arithmetic on contents."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, cast

import numpy as np
from onnx import TensorProto

from passes.analysis.shapes.dims import broadcast_all
from passes.analysis.shapes.facts import (
    BOOL,
    CONTENT_TYPES,
    INT32,
    INT64,
    Answer,
    Array,
    Fact,
    Op,
    Rule,
    Size,
    in_range,
    same_as_input,
    scalar,
)
from toolkit.ir.op_traits import ELEMENTWISE
from toolkit.symbolic import Dim, Expr, floordiv, is_nonneg, is_positive, maximum, minimum, mod

Function = Callable[..., Any]


def apply(function: Function, *arrays: Array) -> Array:
    """Apply `function` elementwise, with broadcasting."""
    result: Any = np.frompyfunc(function, len(arrays), 1)(*arrays)
    return cast(Array, result) if isinstance(result, np.ndarray) else scalar(result)


def _computed(op: Op, dtype: int, function: Function) -> Array | None:
    """Apply `function` to the contents of all inputs, if those of at least one are known."""
    operands = op.all_contents() if dtype in CONTENT_TYPES else None
    if operands is None:
        return None
    return apply(lambda *items: in_range(function(*items), dtype), *operands)


def broadcasting(function: Callable[[Dim, Dim], Size] | None = None, result: int = 0) -> Rule:
    """Return the rule of an operator whose operands broadcast.

    Its result has the element type `result`, or that of the operands.
    """

    def rule(op: Op) -> Answer:
        types = op.types()
        operand_type = next((known.dtype for known in types if known.dtype), 0)
        dtype = result or operand_type
        if op.version < 7:  # the second operand broadcasts to the first
            return Fact(dtype, types[0].shape)
        shape = broadcast_all([known.shape for known in types])
        if function is None or operand_type not in CONTENT_TYPES:
            return Fact(dtype, shape)
        return Fact(dtype, shape, _computed(op, dtype, function))

    return rule


def variadic(function: Callable[[Dim, Dim], Dim]) -> Rule:
    """Return the rule of Max or Min, with any number of operands."""

    def folded(*items: Dim) -> Dim:
        return reduce(function, items)

    return broadcasting(folded)


def power(op: Op) -> Answer:
    fact = broadcasting()(op)
    return fact._replace(dtype=op.dtype(0)) if isinstance(fact, Fact) else fact


def unary(function: Callable[[Dim], Size]) -> Rule:
    """Return the rule of an operator that computes contents and keeps type and shape."""

    def rule(op: Op) -> Answer:
        fact = same_as_input(op)
        return fact._replace(data=_computed(op, fact.dtype, function))

    return rule


def to_bool(op: Op) -> Answer:
    return Fact(BOOL, op.shape(0))


def where(op: Op) -> Answer:
    dtype = op.dtype(1) or op.dtype(2)
    shape = broadcast_all([known.shape for known in op.types()])
    data = None
    condition, x, y = op.data(0), op.data(1), op.data(2)
    if dtype in CONTENT_TYPES and condition is not None and (x is not None or y is not None):
        x, y = op.contents(1), op.contents(2)
        if x is not None and y is not None:
            data = apply(_choose, condition, x, y)
    return Fact(dtype, shape, data)


def _choose(condition: Dim, x: Dim, y: Dim) -> Size:
    if condition == 1 or x == y:
        return x
    return y if condition == 0 else None


def cast_to_type(op: Op) -> Answer:
    target = op.attribute("to")
    if target is None:
        return None
    # Cast-1 names the type as a string.
    dtype = target.i or (TensorProto.DataType.Value(target.s.decode()) if target.s else 0)
    return _cast_to(op, dtype)


def cast_like(op: Op) -> Answer:
    return _cast_to(op, op.dtype(1))


def _cast_to(op: Op, dtype: int) -> Fact:
    fact = Fact(dtype, op.shape(0))
    source = op.dtype(0)
    if source not in CONTENT_TYPES or dtype not in CONTENT_TYPES:
        return fact
    data = op.data(0) if dtype == BOOL else op.contents(0)
    if data is None:
        return fact
    if dtype == BOOL:
        return fact._replace(data=apply(_truth, data))
    if dtype == INT32 and source == INT64:
        data = apply(_narrowed, data)
    return fact._replace(data=data)


def _narrowed(item: Dim) -> Size:
    """Return the result of a Cast to int32, or None if it may wrap; sizes are assumed to fit."""
    if isinstance(item, Expr) and item.anonymous and not is_nonneg(item):
        return None
    return in_range(item, INT32)


def _truth(item: Dim) -> Size:
    if isinstance(item, int):
        return int(item != 0)
    return 1 if is_positive(item) or is_positive(0 - item) else None


# -- functions on contents; None if the result is unknown


def _divide(a: Dim, b: Dim) -> Size:
    """Divide; floor division agrees with truncation where a/b >= 0 or the division is exact."""
    if b == 0:
        return None
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    quotient = floordiv(a, b)
    if quotient * b == a or (is_nonneg(a) and is_nonneg(b)):
        return quotient
    return None


def modulo(op: Op) -> Answer:
    truncating = op.int("fmod") != 0

    def function(a: Dim, b: Dim) -> Size:
        if b == 0 or (truncating and not (is_nonneg(a) and is_nonneg(b))):
            return None
        return mod(a, b)

    return broadcasting(function)(op)


def _equal(a: Dim, b: Dim) -> Size:
    if a == b:
        return 1
    difference = a - b
    return 0 if is_positive(difference) or is_positive(0 - difference) else None


def _less(a: Dim, b: Dim) -> Size:
    if is_positive(b - a):
        return 1
    return 0 if is_nonneg(a - b) else None


def _less_or_equal(a: Dim, b: Dim) -> Size:
    if is_nonneg(b - a):
        return 1
    return 0 if is_positive(a - b) else None


def _absolute(a: Dim) -> Size:
    if is_nonneg(a):
        return a
    return 0 - a if is_nonneg(0 - a) else None


def _sign(a: Dim) -> Size:
    if a == 0:
        return 0
    if is_positive(a):
        return 1
    return -1 if is_positive(0 - a) else None


def clip(op: Op) -> Answer:
    """Compute min(max(x, low), high) on integer contents; the bounds are inputs."""
    fact = same_as_input(op)
    data = op.data(0)
    if data is None or fact.dtype not in CONTENT_TYPES:
        return fact
    for index, function in ((1, maximum), (2, minimum)):
        if op.given(index):
            bound = op.data(index)
            if bound is None or bound.ndim:
                return fact
            data = apply(function, data, bound)
    return fact._replace(data=data)


_SAME_SHAPE = (
    "CumProd",
    "CumSum",
    "GroupNormalization",
    "Hardmax",
    "InstanceNormalization",
    "LRN",
    "LogSoftmax",
    "LpNormalization",
    "MeanVarianceNormalization",
    "PRelu",
    "ReverseSequence",
    "Softmax",
    "Trilu",
)
"""Operators that are not elementwise, with results of the type and shape of the first operand."""

RULES: dict[str, Rule] = {
    **dict.fromkeys((*sorted(ELEMENTWISE), *_SAME_SHAPE), same_as_input),
    # Operators that change the type, or whose contents are inferred:
    "Abs": unary(_absolute),
    "Neg": unary(lambda a: 0 - a),
    "Not": unary(lambda a: 1 - a),
    "Sign": unary(_sign),
    "Relu": unary(lambda a: maximum(a, 0)),
    "Clip": clip,
    "Add": broadcasting(lambda a, b: a + b),
    "Sub": broadcasting(lambda a, b: a - b),
    "Mul": broadcasting(lambda a, b: a * b),
    "Div": broadcasting(_divide),
    "Mod": modulo,
    "Pow": power,
    **dict.fromkeys(("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor"), broadcasting()),
    "Max": variadic(maximum),
    "Min": variadic(minimum),
    "Sum": broadcasting(),
    "Mean": broadcasting(),
    "Equal": broadcasting(_equal, BOOL),
    "Less": broadcasting(_less, BOOL),
    "LessOrEqual": broadcasting(_less_or_equal, BOOL),
    "Greater": broadcasting(lambda a, b: _less(b, a), BOOL),
    "GreaterOrEqual": broadcasting(lambda a, b: _less_or_equal(b, a), BOOL),
    "And": broadcasting(lambda a, b: a * b, BOOL),
    "Or": broadcasting(lambda a, b: a + b - a * b, BOOL),
    "Xor": broadcasting(result=BOOL),
    "IsInf": to_bool,
    "IsNaN": to_bool,
    "Where": where,
    "Cast": cast_to_type,
    "CastLike": cast_like,
}
