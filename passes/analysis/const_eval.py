"""Evaluate constant nodes in numpy, bit for bit as onnxruntime does.

Kernels exist for the operators that weights and shape arithmetic go through: data movement of every
element type, integer arithmetic, and single IEEE operations in float32 and float64. Data movement
returns views of its inputs where it can. `fold` leaves every other operator, and every case whose
result ONNX does not determine exactly (half precision, casts out of range), to the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from passes.analysis.axes import TO_THE_END, positive_axes, positive_axis
from toolkit.ir.node import STANDARD_DOMAINS, attrs

Array = NDArray[Any]

INTS = frozenset(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
FLOATS = frozenset([np.dtype(np.float32), np.dtype(np.float64)])
BOOL = frozenset([np.dtype(np.bool_)])
HALF = np.dtype(np.float16)
BFLOAT16 = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
_INDEX = frozenset([np.dtype(np.int32), np.dtype(np.int64)])


class UnsupportedCase(Exception):
    """No kernel computes this case exactly."""


def evaluate(node: onnx.NodeProto, inputs: list[Array | None], opset: int) -> list[Array] | None:
    """Return the node's outputs, or None if the node is malformed or has no exact kernel.

    `inputs` has None for omitted optional inputs; `opset` is the version of the default domain.
    """
    kernel = KERNELS.get(node.op_type)
    if kernel is None or node.domain not in STANDARD_DOMAINS:
        return None
    try:
        call = Call(attrs(node), inputs, len(node.output), opset)
        with np.errstate(all="ignore"):
            result = kernel(call)
    except (UnsupportedCase, ValueError, TypeError, LookupError, ArithmeticError, MemoryError):
        return None
    return result if isinstance(result, list) else [np.asarray(result)]


def require(condition: bool) -> None:
    """Raise UnsupportedCase unless `condition` holds."""
    if not condition:
        raise UnsupportedCase


@dataclass(frozen=True, slots=True)
class Call:
    """An operator applied to arrays."""

    attrs: dict[str, Any]
    inputs: list[Array | None]
    output_count: int
    opset: int

    def x(self, index: int = 0) -> Array:
        """Return a required input."""
        value = self.get(index)
        if value is None:
            raise UnsupportedCase
        return value

    def get(self, index: int) -> Array | None:
        """Return an optional input."""
        return self.inputs[index] if index < len(self.inputs) else None

    def attr(self, name: str, default: Any = None) -> Any:
        return self.attrs.get(name, default)

    def ints(self, index: int, name: str = "", input_since: int = 0) -> list[int]:
        """Return required integers: an input since opset `input_since`, an attribute before."""
        value = self.optional_ints(index, name, input_since)
        if value is None:
            raise UnsupportedCase
        return value

    def optional_ints(self, index: int, name: str, input_since: int) -> list[int] | None:
        """Return integers as `ints` does, or None if they are omitted."""
        if self.opset < input_since:
            return self.attr(name)
        value = self.get(index)
        if value is None:
            return None
        require(value.dtype in _INDEX and value.ndim <= 1)
        return [int(number) for number in value.reshape(-1)]

    def scalar(self, index: int) -> int:
        """Return the only integer of an input."""
        value = self.x(index)
        require(value.dtype in INTS and value.size == 1)
        return int(value.reshape(())[()])


Kernel = Callable[[Call], "Array | list[Array]"]


def _positive_axes(axes: list[int], rank: int) -> list[int]:
    found = positive_axes(axes, rank)
    if found is None:
        raise UnsupportedCase
    return found


# -- views


def _reshape(call: Call) -> Array:
    x, sizes = call.x(), call.ints(1, "shape", 5)
    if call.attr("allowzero", 0):
        require(not (0 in sizes and -1 in sizes))
    else:
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    require(sizes.count(-1) <= 1 and all(size >= -1 for size in sizes))
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        require(known > 0 and x.size % known == 0)
    return x.reshape(sizes)


def _squeeze(call: Call) -> Array:
    x, axes = call.x(), call.optional_ints(1, "axes", 13)
    if axes is None:
        axes = [i for i, size in enumerate(x.shape) if size == 1]
    else:
        require(axes != [])  # runtimes disagree: all axes of size 1, or none
    return np.squeeze(x, tuple(_positive_axes(axes, x.ndim)))


def _unsqueeze(call: Call) -> Array:
    x, axes = call.x(), call.ints(1, "axes", 13)
    return np.expand_dims(x, tuple(_positive_axes(axes, x.ndim + len(axes))))


def _flatten(call: Call) -> Array:
    x = call.x()
    axis = call.attr("axis", 1)
    require(-x.ndim <= axis <= x.ndim)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _transpose(call: Call) -> Array:
    x = call.x()
    return np.transpose(x, _positive_axes(call.attr("perm", list(range(x.ndim))[::-1]), x.ndim))


def _expand(call: Call) -> Array:
    x = call.x()
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(call.ints(1))))


def _split(call: Call) -> list[Array]:
    x, sizes = call.x(), call.optional_ints(1, "split", 13)
    axis = positive_axis(call.attr("axis", 0), x.ndim)
    size, count = x.shape[axis], call.output_count
    if sizes is None and call.opset >= 18:  # the last part may be smaller
        part = -(-size // count)
        require(call.attr("num_outputs") == count and part * (count - 1) < size)
        sizes = [part] * (count - 1) + [size - part * (count - 1)]
    elif sizes is None:
        require(size % count == 0)
        sizes = [size // count] * count
    require(len(sizes) == count and sum(sizes) == size and min(sizes) >= 0)
    ends = np.cumsum(sizes).tolist()
    before = (slice(None),) * axis
    return [x[(*before, slice(end - n, end))] for n, end in zip(sizes, ends, strict=True)]


def _slice(call: Call) -> Array:
    """Slice as Python does, except that a negative step clamps the start to the first element."""
    x = call.x()
    starts, ends = call.ints(1, "starts", 10), call.ints(2, "ends", 10)
    axes = call.optional_ints(3, "axes", 10)
    steps = call.optional_ints(4, "steps", 10)
    axes = _positive_axes(list(range(len(starts))) if axes is None else axes, x.ndim)
    steps = [1] * len(starts) if steps is None else steps
    region = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        # A negative step to "the end": onnxruntime stops at the front, ONNX at the back.
        require(step > 0 or end < TO_THE_END)
        first = max(start, -x.shape[axis]) if step < 0 else start
        region[axis] = slice(first, end, step)
    return x[tuple(region)]


def _gather(call: Call) -> Array:
    x, indices = call.x(), call.x(1)
    require(indices.dtype in _INDEX)
    axis = positive_axis(call.attr("axis", 0), x.ndim)
    # onnxruntime 1.31 loses strings here; folding must not change the model's results.
    require(x.dtype.kind != "O" or math.prod(x.shape[axis + 1 :]) == 1)
    if indices.ndim == 0:  # a view
        return x[(*(slice(None),) * axis, int(indices[()]), ...)]
    return np.take(x, indices, axis=axis)


# -- new arrays


def _shape(call: Call) -> Array:
    shape = call.x().shape[call.attr("start", 0) : call.attr("end")]
    return np.array(shape, dtype=np.int64)


def _concat(call: Call) -> Array:
    arrays = [call.x(i) for i in range(len(call.inputs))]
    require(all(array.dtype == arrays[0].dtype for array in arrays))
    axis = call.attr("axis", 1 if call.opset < 4 else None)
    return np.concatenate(arrays, axis=positive_axis(axis, arrays[0].ndim))


def _constant_of_shape(call: Call) -> Array:
    value = call.attr("value")
    require(value is None or isinstance(value, TensorProto))
    content = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value)
    require(content.size == 1)
    return np.broadcast_to(content.reshape(()), call.ints(0))


def _range(call: Call) -> Array:
    start, limit, delta = (call.scalar(i) for i in range(3))
    require(call.x(0).dtype == call.x(1).dtype == call.x(2).dtype and delta != 0)
    # Runtimes count the steps in double precision.
    require(max(map(abs, (start, limit, delta))) < 2**52)
    return np.arange(start, limit, delta, dtype=call.x().dtype)


def _where(call: Call) -> Array:
    condition, x, y = call.x(), call.x(1), call.x(2)
    require(condition.dtype in BOOL and x.dtype == y.dtype)
    result = np.where(condition, x, y)
    if result.dtype.kind == "f":  # onnxruntime returns 0.0 for -0.0
        require(not np.any(np.signbit(result) & (result == 0)))
    return result


# -- elementwise


def _elementwise(function: Callable[..., Any], types: frozenset[np.dtype[Any]]) -> Kernel:
    """Return a kernel that applies `function` to inputs of one of these element types."""

    def kernel(call: Call) -> Array:
        operands = [call.x(i) for i in range(len(call.inputs))]
        require(all(x.dtype == operands[0].dtype for x in operands))
        require(operands[0].dtype in types)
        # Before opset 7, attributes determined how operands broadcast.
        require(call.opset >= 7 or all(x.shape == operands[0].shape for x in operands))
        return function(*operands)

    return kernel


def _div(x: Array, y: Array) -> Array:
    """Divide; quotients of integers are truncated toward zero."""
    if x.dtype in FLOATS:
        return np.divide(x, y)
    require(bool(np.all(y != 0)))
    quotient = np.floor_divide(x, y)
    if x.dtype.kind == "u":
        return quotient
    overflows = (x == np.iinfo(x.dtype).min) & (y == -1)
    require(not np.any(overflows))
    inexact = (quotient * y != x) & ((x < 0) != (y < 0))
    return quotient + inexact.astype(x.dtype)


def _cast(call: Call) -> Array:
    to = call.attr("to")
    require(isinstance(to, int))
    return _converted(call.x(), helper.tensor_dtype_to_np_dtype(to))


def _converted(x: Array, to: np.dtype[Any]) -> Array:
    """Convert: integers wrap, floats round to nearest even or truncate to integers."""
    if x.dtype == to:
        return x
    halves = {HALF, BFLOAT16}
    require({x.dtype, to} <= INTS | FLOATS | BOOL | halves)
    if to in INTS and x.dtype in FLOATS | halves:
        whole = np.trunc(x.astype(np.float64))
        limits = np.iinfo(to)
        # Out of range, the result depends on the machine. NaN fails both comparisons.
        require(bool(np.all((whole >= float(limits.min)) & (whole < float(limits.max) + 1))))
        return whole.astype(to) if x.dtype in halves else x.astype(to)
    if to in halves:
        y = x.astype(to)
        if x.dtype == np.float32:
            require(not np.any(np.isnan(x)))
        else:  # runtimes may round to float32 first: only exact results are certain
            require(np.array_equal(y.astype(np.float64), x.astype(np.float64)))
        return y
    return x.astype(to)


_NUMBERS = INTS | FLOATS
_SIGNED = frozenset(t for t in _NUMBERS if t.kind != "u")
_COMPARED = _NUMBERS | {HALF}

KERNELS: dict[str, Kernel] = {
    "Identity": Call.x,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Expand": _expand,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Shape": _shape,
    "Size": lambda call: np.array(call.x().size, dtype=np.int64),
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "Where": _where,
    "Add": _elementwise(np.add, _NUMBERS),
    "Sub": _elementwise(np.subtract, _NUMBERS),
    "Mul": _elementwise(np.multiply, _NUMBERS),
    "Div": _elementwise(_div, _NUMBERS),
    "Neg": _elementwise(np.negative, _SIGNED),
    "Abs": _elementwise(np.abs, _NUMBERS),
    "Sqrt": _elementwise(np.sqrt, FLOATS),
    "Floor": _elementwise(np.floor, FLOATS),
    "Ceil": _elementwise(np.ceil, FLOATS),
    "Equal": _elementwise(np.equal, _COMPARED | BOOL),
    "Less": _elementwise(np.less, _COMPARED),
    "LessOrEqual": _elementwise(np.less_equal, _COMPARED),
    "Greater": _elementwise(np.greater, _COMPARED),
    "GreaterOrEqual": _elementwise(np.greater_equal, _COMPARED),
    "And": _elementwise(np.logical_and, BOOL),
    "Or": _elementwise(np.logical_or, BOOL),
    "Not": _elementwise(np.logical_not, BOOL),
    "Cast": _cast,
    "CastLike": lambda call: _converted(call.x(), call.x(1).dtype),
}
