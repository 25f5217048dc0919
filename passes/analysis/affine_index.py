"""Affine index analysis: integer tensors whose elements are an affine function of their position.

    value[i_1, ..., i_r] = offset + stride_1 i_1 + ... + stride_r i_r

Range, Slice, Unsqueeze, Expand and the arithmetic between them preserve this form. For example,
`arange(batch)[:, None] * length + arange(length)` enumerates the elements of a matrix in order.
Offset and strides are numbers or symbolic sizes. The result holds for every run in which no index
overflows; for empty tensors it is vacuous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.axes import positive_axes
from passes.analysis.axis_flow import carried_from
from passes.analysis.operands import int_operand, operand
from toolkit.ir import Array, Graph, Shape, node as nd
from toolkit.ir.op_traits import MOVEMENT
from toolkit.symbolic import Dim, Expr, is_nonneg

T = TypeVar("T")

_MOST_VALUES = 64
"""Largest number of values that one query visits."""

_LARGEST_CONSTANT = 1 << 16
"""Largest number of elements of a constant that is analyzed."""

_INTEGERS = (TensorProto.INT64, TensorProto.INT32)


@dataclass(frozen=True, slots=True)
class Count:
    """offset + sum of stride * index over the axes that have a stride, counted from the front."""

    offset: Dim
    strides: Mapping[int, Dim]
    shape: Shape

    @property
    def lowest(self) -> Dim | None:
        """Return a lower bound of all elements, or None."""
        return self._bound(lowest=True)

    @property
    def highest(self) -> Dim | None:
        """Return an upper bound of all elements, or None."""
        return self._bound(lowest=False)

    def _bound(self, lowest: bool) -> Dim | None:
        total = self.offset
        for axis, stride in self.strides.items():
            rising = is_nonneg(stride)
            if not rising and not is_nonneg(0 - stride):
                return None
            if rising != lowest:
                total = total + stride * (self.shape[axis] - 1)
        return total


def count(g: Graph, value: str) -> Count | None:
    """Return the affine form of `value`, or None."""
    return _Query(g).count(value)


def minus(one: Count, other: Count, shape: Shape) -> Count | None:
    """Return one - other, broadcast to `shape`."""
    return _combined(one, other, shape, -1)


class _Query:
    """One analysis of a value and its producers, each visited at most once."""

    def __init__(self, g: Graph) -> None:
        self.g = g
        self._counts: dict[str, Count | None] = {}
        self._truths: dict[str, bool | None] = {}

    def count(self, value: str) -> Count | None:
        return self._visited(self._counts, _count, value)

    def truth(self, value: str) -> bool | None:
        return self._visited(self._truths, _truth, value)

    def _visited(
        self, known: dict[str, T | None], rule: Callable[[_Query, str], T | None], value: str
    ) -> T | None:
        if value not in known and len(known) < _MOST_VALUES:
            known[value] = None
            known[value] = rule(self, value)
        return known.get(value)


def _count(query: _Query, value: str) -> Count | None:
    g = query.g
    shape = g.shape(value)
    if shape is None or g.dtype(value) not in _INTEGERS:
        return None
    single = all(size == 1 for size in shape)
    known = g.data(value) if single and len(shape) < 2 else None
    if known is not None and known.size == 1:
        return Count(known.reshape(-1)[0], {}, shape)
    stored = g.const(value)
    if stored is not None:
        return constant_count(stored)
    node = g.producer(value)
    rule = _RULES.get(node.op_type) if node is not None else None
    if node is None or rule is None or node.domain not in nd.STANDARD_DOMAINS:
        return None
    return rule(query, node, shape)


def constant_count(stored: Array) -> Count | None:
    """Return the affine form of a constant, or None."""
    if not 0 < stored.size <= _LARGEST_CONSTANT:
        return None
    first = int(stored[(0,) * stored.ndim])
    steps: list[int] = []
    for axis, size in enumerate(stored.shape):
        place = [0] * stored.ndim
        place[axis] = min(1, size - 1)
        steps.append(int(stored[tuple(place)]) - first)
    last = first + sum(step * (size - 1) for step, size in zip(steps, stored.shape, strict=True))
    if int(stored[(-1,) * stored.ndim]) != last:
        return None  # settles most cases without reading the rest
    rebuilt: Array = np.full(stored.shape, first, np.int64)
    for step, places in zip(steps, np.indices(stored.shape, sparse=True), strict=True):
        rebuilt += step * places
    strides: dict[int, Dim] = {axis: step for axis, step in enumerate(steps) if step}
    return Count(first, strides, stored.shape) if np.array_equal(stored, rebuilt) else None


# -- operators that preserve the form


def _range(query: _Query, node: NodeProto, shape: Shape) -> Count | None:
    ends = [query.g.data(name) for name in (node.input[0], node.input[2])]
    if any(end is None or end.size != 1 for end in ends):
        return None
    start, step = (end.reshape(-1)[0] for end in ends if end is not None)
    return Count(start, {0: step}, shape)


def _moved(query: _Query, node: NodeProto, shape: Shape) -> Count | None:
    """Follow the axes that the operator carries; the value must not vary along the others."""
    found = query.count(node.input[0])
    if found is None:
        return None
    sources = carried_from(query.g, node) or ()
    varying = {axis for axis in found.strides if found.shape[axis] != 1}
    if not varying.issubset(sources):
        return None
    strides = {to: found.strides[axis] for to, axis in enumerate(sources) if axis in varying}
    return Count(found.offset, strides, shape)


def _widened(found: Count, shape: Shape) -> Count | None:
    """Return the count broadcast to `shape`."""
    extra = len(shape) - len(found.shape)
    strides: dict[int, Dim] = {}
    for axis, stride in found.strides.items():
        if found.shape[axis] == 1:
            continue
        if found.shape[axis] != shape[axis + extra]:
            return None
        strides[axis + extra] = stride
    return Count(found.offset, strides, shape)


def _sum(query: _Query, node: NodeProto, shape: Shape) -> Count | None:
    sign = -1 if nd.is_op(node, "Sub") else 1
    one, other = (query.count(name) for name in node.input)
    if one is None or other is None:
        return None
    return _combined(one, other, shape, sign)


def _combined(one: Count, other: Count, shape: Shape, sign: int) -> Count | None:
    first, second = _widened(one, shape), _widened(other, shape)
    if first is None or second is None:
        return None
    strides = dict(first.strides)
    for axis, stride in second.strides.items():
        strides[axis] = strides.get(axis, 0) + sign * stride
    kept = {axis: stride for axis, stride in strides.items() if stride != 0}
    return Count(first.offset + sign * second.offset, kept, shape)


def _product(query: _Query, node: NodeProto, shape: Shape) -> Count | None:
    counts = [query.count(name) for name in node.input]
    for found, factor in (counts, counts[::-1]):
        if found is not None and factor is not None and not factor.strides:
            wide = _widened(found, shape)
            if wide is None:
                return None
            by = factor.offset
            strides = {axis: stride * by for axis, stride in wide.strides.items()}
            return Count(wide.offset * by, strides, shape)
    return None


def _slice(query: _Query, node: NodeProto, shape: Shape) -> Count | None:
    found = query.count(node.input[0])
    g = query.g
    starts = operand(g, node, "starts", 1)
    if found is None or starts is None:
        return None
    axes = int_operand(g, node, "axes", 3, absent=range(len(starts)))
    steps = int_operand(g, node, "steps", 4, absent=[1] * len(starts))
    places = positive_axes(axes, len(shape))
    if places is None or steps is None or not len(places) == len(starts) == len(steps):
        return None
    offset, strides = found.offset, dict(found.strides)
    for axis, start, step in zip(places, starts, steps, strict=True):
        if axis not in strides:
            continue
        if step < 1 or not is_nonneg(start):
            return None
        offset = offset + strides[axis] * start
        strides[axis] = strides[axis] * step
    return Count(offset, strides, shape)


def _filled(query: _Query, node: NodeProto, shape: Shape) -> Count | None:
    value = nd.attr(node, "value")
    if value is None:
        return None
    stored = query.g.model.weights.array(value).reshape(-1)
    return Count(int(stored[0]), {}, shape) if stored.size == 1 else None


_RULES: dict[str, Callable[[_Query, NodeProto, Shape], Count | None]] = {
    **dict.fromkeys((*MOVEMENT, "Cast"), _moved),
    **dict.fromkeys(("Add", "Sub"), _sum),
    "ConstantOfShape": _filled,
    "Mul": _product,
    "Range": _range,
    "Slice": _slice,
}


# -- truth


def truth(g: Graph, value: str) -> bool | None:
    """Return whether a condition is true everywhere or false everywhere, or None."""
    return _Query(g).truth(value)


def _truth(query: _Query, value: str) -> bool | None:
    g = query.g
    stored = g.const(value)
    if stored is not None:
        if not 0 < stored.size <= _LARGEST_CONSTANT or stored.dtype != np.bool_:
            return None
        first = bool(stored[(0,) * stored.ndim])
        return first if bool((stored == first).all()) else None
    node = g.producer(value)
    if node is None or node.domain not in nd.STANDARD_DOMAINS:
        return None
    if node.op_type in _COMPARISONS:
        return _compared(query, node)
    if node.op_type in ("And", "Or"):
        decides = node.op_type == "Or"
        known = [query.truth(name) for name in node.input]
        if decides in known:
            return decides
        return None if None in known else not decides
    if node.op_type == "Not":
        inner = query.truth(node.input[0])
        return None if inner is None else not inner
    if node.op_type in MOVEMENT:
        return query.truth(node.input[0])
    return None


_COMPARISONS: dict[str, tuple[bool, int]] = {
    "GreaterOrEqual": (True, 0),
    "Greater": (True, 1),
    "LessOrEqual": (False, 0),
    "Less": (False, 1),
}
"""Whether the first operand must be the larger one, and by how much at least."""


def _compared(query: _Query, node: NodeProto) -> bool | None:
    shape = query.g.shape(node.output[0])
    one, other = map(query.count, node.input)
    if shape is None or one is None or other is None:
        return None
    first_larger, by = _COMPARISONS[node.op_type]
    larger, smaller = (one, other) if first_larger else (other, one)
    gap = minus(larger, smaller, shape)
    if gap is None:
        return None
    if gap.lowest is not None and is_nonneg(gap.lowest - by):
        return True
    if gap.highest is not None and is_nonneg(by - 1 - gap.highest):
        return False
    return None


def size_in_inputs(g: Graph, size: Dim) -> tuple[str, int] | None:
    """Return a graph input and its axis that has this symbolic size, or None."""
    if isinstance(size, Expr):
        for value in g.inputs:
            shape = g.shape(value)
            if shape is not None and size in shape:
                return value, shape.index(size)
    return None
