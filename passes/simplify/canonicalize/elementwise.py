"""Arithmetic and logic that returns an operand, selections, and chains of Clips."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.operands import fits, given, same_shape
from toolkit.ir import FLOATS, Array, Graph, node as nd
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import rewrite

x = var("x")


def _filled_with(array: Array, value: float) -> bool:
    """Return whether the array is not empty and all of its elements are `value`."""
    if not array.size or array.dtype.kind in "OSU":
        return False
    first = array[(0,) * array.ndim]  # settles most cases without reading the rest
    return bool(first == value) and bool(np.all(array == value))


zeros = const("c", where=lambda array: _filled_with(array, 0))
ones = const("c", where=lambda array: _filled_with(array, 1))


# -- neutral operands


@rewrite(
    op.any("Add", "Or")(x, zeros),
    op.any("Mul", "And")(x, ones),
    op.Sub(x, zeros),
    op.any("Div", "Pow")(x, ones),
    opset=7,  # older operators broadcast by attributes
)
def neutral_operand(g: Graph, x: str, c: str, node: NodeProto) -> str | None:
    """x + 0, x - 0, x * 1, x / 1, x ** 1, x or false, x and true. (-0.0 + 0 is 0: equal.)"""
    return x if fits(g, c, x, node.output[0]) else None


@rewrite(
    op.any("Add", "Or")(x, op.Expand(zeros, var("shape"))),
    op.any("Mul", "And")(x, op.Expand(ones, var("shape"))),
    opset=8,
)
def neutral_operand_widened(g: Graph, x: str, c: str, shape: str, node: NodeProto) -> str | None:
    """x + zeros(shape) = x * ones(shape) = Expand(x, shape)"""
    if g.rank(c) != 0:
        return None
    return g.op("Expand", x, shape, at=node)


# -- repeated operators and operands


@rewrite(op.any("Not", "Neg", "BitwiseNot")(var("y")))
def double_negation(g: Graph, y: str, node: NodeProto) -> str | None:
    """not not x = x, -(-x) = x"""
    before = g.producer(y)
    return before.input[0] if nd.is_op(before, node.op_type) and before else None


@rewrite(op.Neg(op.Sub(x, var("y"))), opset=7)
def negated_difference(g: Graph, x: str, y: str, node: NodeProto) -> str:
    """-(x - y) = y - x. (0 where that is -0.0: equal.)"""
    return g.op("Sub", y, x, at=node)


_minus = op.Neg(var("y")) | op.Mul(var("y"), -1)


@rewrite(op.Add(x, _minus), op.Sub(x, _minus), opset=7)
def negated_operand(g: Graph, x: str, y: str, node: NodeProto) -> str:
    """x + -y = x - y, x - -y = x + y"""
    return g.op("Sub" if nd.is_op(node, "Add") else "Add", x, y, at=node)


_IDEMPOTENT = ("Relu", "Abs", "Ceil", "Floor", "Round", "Sign")


@rewrite(op.any(*_IDEMPOTENT)(var("y")))
def repeated_op(g: Graph, y: str, node: NodeProto) -> str | None:
    """relu(relu(x)) = relu(x), and the same for other idempotent operators."""
    return y if nd.is_op(g.producer(y), node.op_type) else None


@rewrite(
    op.any("Max", "Min", "And", "Or", "BitwiseAnd", "BitwiseOr")(x, x),
    op.any("Concat", "Sum", "Mean", "Max", "Min")(x),
)
def same_operands(g: Graph, x: str, node: NodeProto) -> str:
    """max(x, x) = x, x and x = x, concat(x) = x"""
    return x


# -- selection


@rewrite(op.Where(ones, x, var("other")), op.Where(zeros, var("other"), x))
def known_condition(g: Graph, c: str, x: str, other: str, node: NodeProto) -> str | None:
    """Replace a Where with a uniform constant condition by the selected operand."""
    result = node.output[0]
    return x if fits(g, c, x, result) and fits(g, other, x, result) else None


@rewrite(op.Where(var("c"), x, x))
def where_of_equals(g: Graph, c: str, x: str, node: NodeProto) -> str | None:
    """where(c, x, x) = x, if x has the full shape."""
    return x if fits(g, c, x, node.output[0]) else None


@rewrite(op.Where(op.Not(var("c")).shared(), x, var("other")), opset=9)
def where_not(g: Graph, c: str, x: str, other: str, node: NodeProto) -> str:
    """where(not c, x, y) = where(c, y, x)"""
    return g.op("Where", c, other, x, at=node)


@rewrite(op.Cast(op.Where(var("c"), const("kept"), const("other")).named("where")), opset=9)
def condition_of_where(g: Graph, c: str, where: NodeProto, node: NodeProto) -> str | None:
    """bool(where(c, 0, 1)) = not c, bool(where(c, 1, 0)) = c"""
    if nd.attr(node, "to") != TensorProto.BOOL or not same_shape(g, c, where.output[0]):
        return None
    chosen = [g.const(name) for name in where.input[1:]]
    if any(a is None or a.size != 1 or a.dtype.kind not in "fiu" for a in chosen):
        return None
    kept, other = (bool(a.reshape(-1)[0]) for a in chosen if a is not None)
    if kept == other:
        return None
    return c if kept else g.op("Not", c, at=node)


_chosen = (op.Cast(var("c")).shared().named("flag") * x).shared()
_other = (op.Cast(op.Not(var("c")).shared()).shared() * var("other")).shared()


@rewrite(_chosen + _other, opset=9)
def where_by_factors(
    g: Graph, c: str, x: str, other: str, flag: NodeProto, node: NodeProto
) -> str | None:
    """float(c) * x + float(not c) * y = where(c, x, y), except that 0 * inf is NaN on the left."""
    if g.dtype(c) != TensorProto.BOOL or g.dtype(flag.output[0]) not in _SELECTED:
        return None
    return g.op("Where", c, x, other, at=node)


_SELECTED = (TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64)
"""Element types for which every version of onnxruntime has a Where kernel."""


# -- limits

Limits = tuple[float | None, float | None]
"""Lower and upper limit; None for an absent one, which is the limit of the type."""

_CLIPPED = FLOATS - {TensorProto.BFLOAT16}
"""Element types for which onnxruntime has a Clip kernel, and that represent any limit."""


@rewrite(op.Clip(x, ...))
def clip_nowhere(g: Graph, x: str, node: NodeProto) -> str | None:
    """Remove a Clip to [-inf, inf]; absent limits clip to the largest finite value."""
    return x if limits(g, node) == (-np.inf, np.inf) else None


_bounded = op.any("Clip", "Relu")


@rewrite(_bounded(_bounded(x, ...).named("inner"), ...))
def clip_of_clip(g: Graph, x: str, inner: NodeProto, node: NodeProto) -> str | None:
    """A Clip of a Clip is one Clip, and Relu is a Clip to [0, inf]; two Relus are `repeated_op`."""
    first, second = limits(g, inner), limits(g, node)
    if first is None or second is None or not _ordered(first) or not _ordered(second):
        return None
    relus = sum(nd.is_op(step, "Relu") for step in (inner, node))
    if relus == 2 or (not relus and _drops_largest(first, second)):
        return None
    (low, high), (lowest, highest) = first, second
    if relus and (_is_below(high, lowest) or _is_below(highest, low)):
        return None  # a constant
    return _clip(g, x, (_held(low, second, lowest), _held(high, second, highest)), node)


def limits(g: Graph, node: NodeProto) -> Limits | None:
    """Return the limits of a Clip of any opset, or of a Relu; None if they are not constant."""
    if nd.is_op(node, "Relu"):
        return 0.0, None
    if g.opset() < 11:
        return nd.attr(node, "min"), nd.attr(node, "max")
    found: list[float | None] = []
    for index in (1, 2):
        value = given(node, index)
        array = g.const(value) if value else None
        if value and (array is None or array.size != 1):
            return None
        found.append(None if array is None else float(array.reshape(-1)[0]))
    return found[0], found[1]


def _ordered(found: Limits) -> bool:
    low, high = found
    return not any(v is not None and np.isnan(v) for v in found) and not _is_below(high, low)


def _is_below(high: float | None, low: float | None) -> bool:
    return low is not None and high is not None and high < low


def _drops_largest(first: Limits, second: Limits) -> bool:
    """Return whether an infinite limit meets an absent one, which is the largest finite value."""
    pairs = zip(first, second, strict=True)
    return any(None in pair and any(v is not None and np.isinf(v) for v in pair) for pair in pairs)


def _held(limit: float | None, bounds: Limits, absent: float | None) -> float | None:
    """Clip a limit of the first Clip to the bounds of the second."""
    if limit is None:
        return absent
    low, high = bounds
    limit = limit if low is None else max(limit, low)
    return limit if high is None else min(limit, high)


def _clip(g: Graph, x: str, found: Limits, node: NodeProto) -> str | None:
    dtype = g.dtype(x)
    if dtype not in _CLIPPED:
        return None
    low, high = found
    if g.opset() < 11:
        return g.op("Clip", x, at=node, min=low, max=high)
    inputs = nd.without_blanks([x, _limit(g, dtype, low), _limit(g, dtype, high)])
    return g.op("Clip", *inputs, at=node)


def _limit(g: Graph, dtype: int, value: float | None) -> str:
    if value is None:
        return ""
    array: Array = np.array(value, dtype=helper.tensor_dtype_to_np_dtype(dtype))
    return g.constant(array, "limit")


RULES = (
    neutral_operand,
    neutral_operand_widened,
    double_negation,
    negated_difference,
    negated_operand,
    repeated_op,
    same_operands,
    known_condition,
    where_of_equals,
    where_not,
    where_by_factors,
    condition_of_where,
    clip_nowhere,
    clip_of_clip,
)
