"""Exact numpy kernels of ONNX operators: for constant folding and shape arithmetic.

Only results that ONNX determines to the last bit are computed here: data movement of every type,
integer arithmetic, and single IEEE operations in float32 and float64. Whatever is not so certain
(half precision, NaN and the sign of zero in Min and Max, duplicate scatter indices, casts out of
range) is left to the runtime. Data movement answers with views of its inputs where it can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper

from passes.analysis import const_eval as movement
from passes.analysis.axes import positive_axis
from passes.analysis.const_eval import BOOL, FLOATS, INTS, Array, Call, NoKernel, need
from toolkit.ir.node import STANDARD_DOMAINS, attrs

Kernel = Callable[[Call], "Array | list[Array]"]

HALF = np.dtype(np.float16)
BFLOAT16 = helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)


def evaluate(node: onnx.NodeProto, inputs: list[Array | None], opset: int) -> list[Array] | None:
    """The node's outputs; None when there is no exact kernel for this case, or it is malformed.

    `inputs` has None for omitted optional inputs; `opset` is the version of ONNX's own domain.
    """
    kernel = KERNELS.get(node.op_type)
    if kernel is None or node.domain not in STANDARD_DOMAINS:
        return None
    try:
        call = Call(attrs(node), inputs, len(node.output), opset)
        with np.errstate(all="ignore"):
            result = kernel(call)
    except (NoKernel, ValueError, TypeError, LookupError, ArithmeticError, MemoryError):
        return None
    return result if isinstance(result, list) else [np.asarray(result)]


# --- elementwise -------------------------------------------------------------------------------


def _operands(call: Call, types: frozenset[np.dtype[Any]]) -> list[Array]:
    """All inputs, of one type; before opset 7 broadcasting was another one."""
    operands = [call.x(i) for i in range(len(call.inputs))]
    need(all(x.dtype == operands[0].dtype for x in operands))
    need(operands[0].dtype in types)
    need(call.opset >= 7 or all(x.shape == operands[0].shape for x in operands))
    return operands


def _elementwise(function: Callable[..., Any], types: frozenset[np.dtype[Any]]) -> Kernel:
    return lambda call: function(*_operands(call, types))


def _div(x: Array, y: Array) -> Array:
    """Integers: truncated toward zero."""
    if x.dtype in FLOATS:
        return np.divide(x, y)
    need(bool(np.all(y != 0)))
    quotient = np.floor_divide(x, y)
    if x.dtype.kind == "u":
        return quotient
    overflows = (x == np.iinfo(x.dtype).min) & (y == -1)
    need(not np.any(overflows))
    inexact = (quotient * y != x) & ((x < 0) != (y < 0))
    return quotient + inexact.astype(x.dtype)


def _mod(call: Call) -> Array:
    """fmod=0: the divisor's sign, integers only. fmod=1: the dividend's sign."""
    x, y = _operands(call, INTS | FLOATS)
    fmod = call.attr("fmod", 0)
    if x.dtype in FLOATS:
        need(fmod == 1)
        return np.fmod(x, y)
    need(bool(np.all(y != 0)))
    if not fmod:
        return np.mod(x, y)
    # Runtimes take fmod of integers in double precision.
    need(all(bool(np.all(np.abs(v.astype(np.float64)) < 2**53)) for v in (x, y)))
    return np.fmod(x, y)


def _extreme(function: np.ufunc) -> Kernel:
    def kernel(call: Call) -> Array:
        first, *others = _operands(call, INTS | FLOATS)
        for other in others:
            if first.dtype in FLOATS:
                need(not np.any(np.isnan(first)) and not np.any(np.isnan(other)))
                # Which of 0.0 and -0.0 is larger is nowhere said.
                need(not np.any((first == other) & (np.signbit(first) != np.signbit(other))))
            first = function(first, other)
        return first

    return kernel


def _clip(call: Call) -> Array:
    x, low, high = call.x(), call.get(1), call.get(2)
    need(x.dtype in INTS and call.opset >= 12)
    for bound, function in ((low, np.maximum), (high, np.minimum)):
        if bound is not None:
            need(bound.dtype == x.dtype and bound.size == 1)
            x = function(x, bound.reshape(()))
    return x


def _cast(call: Call) -> Array:
    to = call.attr("to")
    need(isinstance(to, int))
    return _converted(call.x(), helper.tensor_dtype_to_np_dtype(to))


def _cast_like(call: Call) -> Array:
    return _converted(call.x(), call.x(1).dtype)


def _converted(x: Array, to: np.dtype[Any]) -> Array:
    """`x` as `to`: integers wrap, floats round to nearest even or truncate to integers."""
    if x.dtype == to:
        return x
    halves = {HALF, BFLOAT16}
    need({x.dtype, to} <= INTS | FLOATS | BOOL | halves)
    if to in INTS and x.dtype in FLOATS | halves:
        whole = np.trunc(x.astype(np.float64))
        limits = np.iinfo(to)
        # Out of range, each machine has its own answer. NaN fails both comparisons.
        need(bool(np.all((whole >= float(limits.min)) & (whole < float(limits.max) + 1))))
        return whole.astype(to) if x.dtype in halves else x.astype(to)
    if to in halves:
        y = x.astype(to)
        if x.dtype == np.float32:
            need(not np.any(np.isnan(x)))
        else:  # through float32, or at once? Only an exact result is the same either way.
            need(np.array_equal(y.astype(np.float64), x.astype(np.float64)))
        return y
    return x.astype(to)


# --- reductions and scans ------------------------------------------------------------------------


def _reduce(function: Callable[..., Any], input_since: int) -> Kernel:
    def kernel(call: Call) -> Array:
        x = call.x()
        need(x.dtype in INTS and x.size > 0)
        axes = call.optional_ints(1, "axes", input_since)
        if not axes:
            if call.attr("noop_with_empty_axes", 0):
                return x
            axes = list(range(x.ndim))
        along: dict[str, Any] = {"axis": tuple(axes), "keepdims": bool(call.attr("keepdims", 1))}
        if function in (np.sum, np.prod):
            # onnxruntime reduces in double precision and saturates: same as long as all is exact.
            sizes = np.abs(x.astype(np.float64))
            most = function(sizes if function is np.sum else np.maximum(sizes, 1), **along)
            need(bool(np.all(most < min(2**53, np.iinfo(x.dtype).max))))
            along["dtype"] = x.dtype
        return np.asarray(function(x, **along))

    return kernel


def _cumsum(call: Call) -> Array:
    x = call.x()
    need(x.dtype in INTS)
    axis = positive_axis(call.scalar(1), x.ndim)
    ordered = np.flip(x, axis) if call.attr("reverse", 0) else x
    sums = np.cumsum(ordered, axis=axis, dtype=x.dtype)
    if call.attr("exclusive", 0):
        sums = sums - ordered
    return np.flip(sums, axis) if call.attr("reverse", 0) else sums


_NUMBERS = INTS | FLOATS
_SIGNED = frozenset(t for t in _NUMBERS if t.kind != "u")
_COMPARED = _NUMBERS | {HALF}

KERNELS: dict[str, Kernel] = {
    **movement.KERNELS,
    "Add": _elementwise(np.add, _NUMBERS),
    "Sub": _elementwise(np.subtract, _NUMBERS),
    "Mul": _elementwise(np.multiply, _NUMBERS),
    "Div": _elementwise(_div, _NUMBERS),
    "Mod": _mod,
    "Neg": _elementwise(np.negative, _SIGNED),
    "Abs": _elementwise(np.abs, _NUMBERS),
    "Sqrt": _elementwise(np.sqrt, FLOATS),
    "Floor": _elementwise(np.floor, FLOATS),
    "Ceil": _elementwise(np.ceil, FLOATS),
    "Min": _extreme(np.minimum),
    "Max": _extreme(np.maximum),
    "Clip": _clip,
    "Equal": _elementwise(np.equal, _COMPARED | BOOL),
    "Less": _elementwise(np.less, _COMPARED),
    "LessOrEqual": _elementwise(np.less_equal, _COMPARED),
    "Greater": _elementwise(np.greater, _COMPARED),
    "GreaterOrEqual": _elementwise(np.greater_equal, _COMPARED),
    "And": _elementwise(np.logical_and, BOOL),
    "Or": _elementwise(np.logical_or, BOOL),
    "Xor": _elementwise(np.logical_xor, BOOL),
    "Not": _elementwise(np.logical_not, BOOL),
    "BitwiseAnd": _elementwise(np.bitwise_and, INTS),
    "BitwiseOr": _elementwise(np.bitwise_or, INTS),
    "BitwiseXor": _elementwise(np.bitwise_xor, INTS),
    "BitwiseNot": _elementwise(np.bitwise_not, INTS),
    "Cast": _cast,
    "CastLike": _cast_like,
    "ReduceSum": _reduce(np.sum, 13),
    "ReduceProd": _reduce(np.prod, 18),
    "ReduceMin": _reduce(np.min, 18),
    "ReduceMax": _reduce(np.max, 18),
    "CumSum": _cumsum,
}
