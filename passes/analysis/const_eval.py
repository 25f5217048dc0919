"""Kernels that move, repeat and select elements without looking at them: right for every type.

Each is a function of a `Call`. One that meets a case it does not know raises NoKernel, and numpy
raises for malformed ones: `passes.kernels.evaluate` turns both into "ask the runtime".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from passes.analysis.axes import TO_THE_END, positive_axes, positive_axis

Array = NDArray[Any]

INTS = frozenset(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
FLOATS = frozenset([np.dtype(np.float32), np.dtype(np.float64)])
BOOL = frozenset([np.dtype(np.bool_)])
_INDEX = frozenset([np.dtype(np.int32), np.dtype(np.int64)])


class NoKernel(Exception):
    """This case is not computed here."""


def need(condition: bool) -> None:
    """Leave the case to the runtime unless `condition` holds."""
    if not condition:
        raise NoKernel


@dataclass(frozen=True, slots=True)
class Call:
    """One application of an operator to arrays."""

    attrs: dict[str, Any]
    inputs: list[Array | None]
    outputs: int
    opset: int

    def x(self, i: int = 0) -> Array:
        """Input i, which must be there."""
        value = self.get(i)
        if value is None:
            raise NoKernel
        return value

    def get(self, i: int) -> Array | None:
        """Input i, if it is there."""
        return self.inputs[i] if i < len(self.inputs) else None

    def attr(self, name: str, default: Any = None) -> Any:
        return self.attrs.get(name, default)

    def ints(self, i: int, name: str = "", input_since: int = 0) -> list[int]:
        """Integers that are input i from an opset on, and before that an attribute."""
        value = self.optional_ints(i, name, input_since)
        if value is None:
            raise NoKernel
        return value

    def optional_ints(self, i: int, name: str, input_since: int) -> list[int] | None:
        """The same, where they may be left out."""
        if self.opset < input_since:
            return self.attr(name)
        value = self.get(i)
        if value is None:
            return None
        need(value.dtype in _INDEX and value.ndim <= 1)
        return [int(number) for number in value.reshape(-1)]

    def scalar(self, i: int) -> int:
        """The one integer in input i."""
        value = self.x(i)
        need(value.dtype in INTS and value.size == 1)
        return int(value.reshape(())[()])


def axes_of(axes: list[int], rank: int) -> list[int]:
    """Distinct axes, counted from the front."""
    found = positive_axes(axes, rank)
    if found is None:
        raise NoKernel
    return found


def _same(call: Call) -> Array:
    return call.x()


# --- shape -------------------------------------------------------------------------------------


def _reshape(call: Call) -> Array:
    x, sizes = call.x(), call.ints(1, "shape", 5)
    if call.attr("allowzero", 0):
        need(not (0 in sizes and -1 in sizes))
    else:
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    need(sizes.count(-1) <= 1 and all(size >= -1 for size in sizes))
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        need(known > 0 and x.size % known == 0)
    return x.reshape(sizes)


def _squeeze(call: Call) -> Array:
    x, axes = call.x(), call.optional_ints(1, "axes", 13)
    if axes is None:
        axes = [i for i, size in enumerate(x.shape) if size == 1]
    else:
        need(axes != [])  # all or none: read both ways
    return np.squeeze(x, tuple(axes_of(axes, x.ndim)))


def _unsqueeze(call: Call) -> Array:
    x, axes = call.x(), call.ints(1, "axes", 13)
    return np.expand_dims(x, tuple(axes_of(axes, x.ndim + len(axes))))


def _flatten(call: Call) -> Array:
    x = call.x()
    axis = call.attr("axis", 1)
    need(-x.ndim <= axis <= x.ndim)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _transpose(call: Call) -> Array:
    x = call.x()
    return np.transpose(x, axes_of(call.attr("perm", list(range(x.ndim))[::-1]), x.ndim))


def _shape(call: Call) -> Array:
    shape = call.x().shape[call.attr("start", 0) : call.attr("end")]
    return np.array(shape, dtype=np.int64)


def _size(call: Call) -> Array:
    return np.array(call.x().size, dtype=np.int64)


# --- joining and repeating ---------------------------------------------------------------------


def _concat(call: Call) -> Array:
    arrays = [call.x(i) for i in range(len(call.inputs))]
    need(all(array.dtype == arrays[0].dtype for array in arrays))
    axis = call.attr("axis", 1 if call.opset < 4 else None)
    return np.concatenate(arrays, axis=positive_axis(axis, arrays[0].ndim))


def _expand(call: Call) -> Array:
    x = call.x()
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(call.ints(1))))


def _tile(call: Call) -> Array:
    x, repeats = call.x(), call.ints(1)
    need(call.opset >= 6 and len(repeats) == x.ndim)
    return np.tile(x, repeats)


def _pad(call: Call) -> Array:
    """Constant mode; a negative pad crops."""
    x, pads = call.x(), call.ints(1, "pads" if call.opset >= 2 else "paddings", 11)
    need(call.attr("mode", "constant") == "constant" and x.dtype.kind != "O")
    if call.opset < 11:
        value = np.array(call.attr("value", 0.0)).astype(x.dtype)
    else:
        given = call.get(2)
        value = np.zeros((), x.dtype) if given is None else given
    need(value.dtype == x.dtype and value.size == 1)
    axes = call.optional_ints(3, "axes", 18)
    axes = axes_of(list(range(x.ndim)) if axes is None else axes, x.ndim)
    need(len(pads) == 2 * len(axes))
    shape = list(x.shape)
    kept, place = [slice(None)] * x.ndim, [slice(None)] * x.ndim
    for axis, before, after in zip(axes, pads, pads[len(axes) :], strict=False):
        first, last = max(0, -before), x.shape[axis] - max(0, -after)
        need(first <= last)
        kept[axis] = slice(first, last)
        place[axis] = slice(max(0, before), max(0, before) + last - first)
        shape[axis] += before + after
    result = np.full(shape, value.reshape(()), x.dtype)
    result[tuple(place)] = x[tuple(kept)]
    return result


def _constant_of_shape(call: Call) -> Array:
    value = call.attr("value")
    need(value is None or isinstance(value, TensorProto))
    content = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value)
    need(content.size == 1)
    return np.broadcast_to(content.reshape(()), call.ints(0))


def _range(call: Call) -> Array:
    start, limit, delta = (call.scalar(i) for i in range(3))
    need(call.x(0).dtype == call.x(1).dtype == call.x(2).dtype and delta != 0)
    # Runtimes count the steps in double precision.
    need(max(map(abs, (start, limit, delta))) < 2**52)
    return np.arange(start, limit, delta, dtype=call.x().dtype)


def _eye_like(call: Call) -> Array:
    x = call.x()
    to = call.attr("dtype")
    rows, columns = x.shape
    dtype = x.dtype if to is None else helper.tensor_dtype_to_np_dtype(to)
    need(dtype.kind != "O")
    return np.eye(rows, columns, call.attr("k", 0)).astype(dtype)


def _one_hot(call: Call) -> Array:
    indices, depth, values = call.x(), call.scalar(1), call.x(2)
    need(indices.dtype in INTS and indices.ndim > 0 and depth > 0 and values.shape == (2,))
    axis = positive_axis(call.attr("axis", -1), indices.ndim + 1)
    wanted = np.where(indices < 0, indices.astype(np.int64) + depth, indices)
    hit = wanted[..., None] == np.arange(depth)
    return np.moveaxis(np.where(hit, values[1:], values[:1]), -1, axis)


# --- selecting ---------------------------------------------------------------------------------


def _split(call: Call) -> list[Array]:
    x, sizes = call.x(), call.optional_ints(1, "split", 13)
    axis = positive_axis(call.attr("axis", 0), x.ndim)
    size, count = x.shape[axis], call.outputs
    if sizes is None and call.opset >= 18:  # the last part may be smaller
        part = -(-size // count)
        need(call.attr("num_outputs") == count and part * (count - 1) < size)
        sizes = [part] * (count - 1) + [size - part * (count - 1)]
    elif sizes is None:
        need(size % count == 0)
        sizes = [size // count] * count
    need(len(sizes) == count and sum(sizes) == size and min(sizes) >= 0)
    ends = np.cumsum(sizes).tolist()
    before = (slice(None),) * axis
    return [x[(*before, slice(end - n, end))] for n, end in zip(sizes, ends, strict=True)]


def _slice(call: Call) -> Array:
    """Python's slices, but going backward from before the front starts at the front."""
    x = call.x()
    starts, ends = call.ints(1, "starts", 10), call.ints(2, "ends", 10)
    axes = call.optional_ints(3, "axes", 10)
    steps = call.optional_ints(4, "steps", 10)
    axes = axes_of(list(range(len(starts))) if axes is None else axes, x.ndim)
    steps = [1] * len(starts) if steps is None else steps
    region = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        # Backward to "the end": onnxruntime reads the front, ONNX the back.
        need(step > 0 or end < TO_THE_END)
        first = max(start, -x.shape[axis]) if step < 0 else start
        region[axis] = slice(first, end, step)
    return x[tuple(region)]


def _gather(call: Call) -> Array:
    x, indices = call.x(), call.x(1)
    need(indices.dtype in _INDEX)
    axis = positive_axis(call.attr("axis", 0), x.ndim)
    # onnxruntime 1.31 loses strings here; the model must go on doing what it does.
    need(x.dtype.kind != "O" or math.prod(x.shape[axis + 1 :]) == 1)
    if indices.ndim == 0:  # a view
        return x[(*(slice(None),) * axis, int(indices[()]), ...)]
    return np.take(x, indices, axis=axis)


def _window(call: Call, x: Array, indices: Array) -> tuple[Array, int]:
    """The part of `x` that `indices` of equal rank reach, and the axis that they index."""
    axis = positive_axis(call.attr("axis", 0), x.ndim)
    need(indices.dtype in _INDEX and indices.ndim == x.ndim)
    pairs = list(zip(indices.shape, x.shape, strict=True))
    need(all(a <= b for i, (a, b) in enumerate(pairs) if i != axis))
    return x[tuple(slice(None if i == axis else a) for i, (a, _) in enumerate(pairs))], axis


def _gather_elements(call: Call) -> Array:
    indices = call.x(1)
    window, axis = _window(call, call.x(), indices)
    return np.take_along_axis(window, indices, axis)


def _scatter_elements(call: Call) -> Array:
    result: Array = np.array(call.x())
    indices, updates = call.x(1), call.x(2)
    need(call.attr("reduction", "none") == "none")
    need(updates.dtype == result.dtype and updates.shape == indices.shape)
    window, axis = _window(call, result, indices)
    size = result.shape[axis]
    order = np.sort(np.where(indices < 0, indices + size, indices), axis)
    need(not np.any(np.diff(order, axis=axis) == 0))  # the last of two writes: nowhere said
    np.put_along_axis(window, indices, updates, axis)
    return result


def _gather_nd(call: Call) -> Array:
    x, indices = call.x(), call.x(1)
    batch = call.attr("batch_dims", 0)
    need(indices.dtype in _INDEX and 0 <= batch < min(x.ndim, indices.ndim))
    need(x.shape[:batch] == indices.shape[:batch])
    need(1 <= indices.shape[-1] <= x.ndim - batch)
    places = np.ogrid[tuple(slice(size) for size in indices.shape[:-1])][:batch]
    return x[(*places, *np.moveaxis(indices, -1, 0), ...)]


def _scatter_nd(call: Call) -> Array:
    x, indices, updates = call.x(), call.x(1), call.x(2)
    need(call.attr("reduction", "none") == "none" and updates.dtype == x.dtype)
    need(indices.dtype in _INDEX and 1 <= indices.shape[-1] <= x.ndim)
    depth = indices.shape[-1]
    need(updates.shape == (*indices.shape[:-1], *x.shape[depth:]))
    wrapped: Array = np.where(indices < 0, indices + x.shape[:depth], indices)
    need(len(np.unique(wrapped.reshape(-1, depth), axis=0)) == indices.size // depth)
    result: Array = np.array(x)
    result[tuple(np.moveaxis(indices, -1, 0))] = updates
    return result


def _where(call: Call) -> Array:
    condition, x, y = call.x(), call.x(1), call.x(2)
    need(condition.dtype in BOOL and x.dtype == y.dtype)
    result = np.where(condition, x, y)
    if result.dtype.kind == "f":  # onnxruntime makes 0.0 of -0.0
        need(not np.any(np.signbit(result) & (result == 0)))
    return result


def _trilu(call: Call) -> Array:
    x = call.x()
    need(x.ndim >= 2 and x.dtype.kind != "O")
    k = 0 if call.get(1) is None else call.scalar(1)
    return np.triu(x, k) if call.attr("upper", 1) else np.tril(x, k)


def _non_zero(call: Call) -> Array:
    x = call.x()
    need(x.ndim > 0 and x.dtype in INTS | FLOATS | BOOL)
    return np.array(np.nonzero(x), dtype=np.int64)


KERNELS: dict[str, Callable[[Call], Array | list[Array]]] = {
    "Identity": _same,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Shape": _shape,
    "Size": _size,
    "Concat": _concat,
    "Expand": _expand,
    "Tile": _tile,
    "Pad": _pad,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "EyeLike": _eye_like,
    "OneHot": _one_hot,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Where": _where,
    "Trilu": _trilu,
    "NonZero": _non_zero,
}
