"""Integers that count: what a tensor of indices or positions holds, as a formula of its place.

    value[i_1, ..., i_r] = offset + stride_1 i_1 + ... + stride_r i_r

Range, Slice, Unsqueeze, Expand and the arithmetic between them keep this form, so whoever computes
`arange(batch)[:, None] * length + arange(length)` is found out: it names every element of a matrix
in order. Offset and strides are numbers or symbolic sizes. What is said holds for every run in
which no index overflows, and of an empty tensor anything holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.axes import positive_axes
from passes.analysis.axis_flow import carried_from
from passes.analysis.operands import int_operand, operand
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.op_traits import MOVEMENT
from toolkit.ir.tensor_type import Shape
from toolkit.symbolic import Dim, Expr, is_nonneg

_MOST_LOOKED_AT = 64
"""Values that are followed for one question."""

_LARGEST_TABLE = 1 << 16
"""Elements of a constant that is looked at for being a count."""

_INTEGERS = (TensorProto.INT64, TensorProto.INT32)


@dataclass(frozen=True, slots=True)
class Count:
    """offset + sum of stride * place, over axes from the front; only axes with a stride."""

    offset: Dim
    strides: Mapping[int, Dim]
    shape: Shape

    @property
    def lowest(self) -> Dim | None:
        """A number that no element is below; None when that cannot be said."""
        return self._end(lowest=True)

    @property
    def highest(self) -> Dim | None:
        """A number that no element is above."""
        return self._end(lowest=False)

    def _end(self, lowest: bool) -> Dim | None:
        total = self.offset
        for axis, stride in self.strides.items():
            rising = is_nonneg(stride)
            if not rising and not is_nonneg(0 - stride):
                return None
            if rising != lowest:
                total = total + stride * (self.shape[axis] - 1)
        return total


def count(g: Graph, value: str) -> Count | None:
    """What `value` counts; None when it is not known to count anything."""
    return _Search(g).count(value)


def minus(one: Count, other: Count, shape: Shape) -> Count | None:
    """The difference of two that broadcast to `shape`."""
    return _combined(one, other, shape, -1)


class _Search:
    """One question, asked of a value and of what it is computed from, each at most once."""

    def __init__(self, g: Graph) -> None:
        self.g = g
        self._counts: dict[str, Count | None] = {}
        self._truths: dict[str, bool | None] = {}

    def count(self, value: str) -> Count | None:
        if value not in self._counts:
            if len(self._counts) >= _MOST_LOOKED_AT:
                return None
            self._counts[value] = None
            self._counts[value] = _count(self, value)
        return self._counts[value]

    def truth(self, value: str) -> bool | None:
        if value not in self._truths:
            if len(self._truths) >= _MOST_LOOKED_AT:
                return None
            self._truths[value] = None
            self._truths[value] = _truth(self, value)
        return self._truths[value]


def _count(search: _Search, value: str) -> Count | None:
    g = search.g
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
    return rule(search, node, shape)


def constant_count(stored: Array) -> Count | None:
    """Return the count that a constant holds, or None."""
    if not 0 < stored.size <= _LARGEST_TABLE:
        return None
    first = int(stored[(0,) * stored.ndim])
    steps: list[int] = []
    for axis, size in enumerate(stored.shape):
        place = [0] * stored.ndim
        place[axis] = min(1, size - 1)
        steps.append(int(stored[tuple(place)]) - first)
    last = first + sum(step * (size - 1) for step, size in zip(steps, stored.shape, strict=True))
    if int(stored[(-1,) * stored.ndim]) != last:
        return None  # mostly tells, without looking at the rest
    rebuilt: Array = np.full(stored.shape, first, np.int64)
    for step, places in zip(steps, np.indices(stored.shape, sparse=True), strict=True):
        rebuilt += step * places
    strides: dict[int, Dim] = {axis: step for axis, step in enumerate(steps) if step}
    return Count(first, strides, stored.shape) if np.array_equal(stored, rebuilt) else None


# -- the operators that keep the form


def _range(search: _Search, node: NodeProto, shape: Shape) -> Count | None:
    ends = [search.g.data(name) for name in (node.input[0], node.input[2])]
    if any(end is None or end.size != 1 for end in ends):
        return None
    start, step = (end.reshape(-1)[0] for end in ends if end is not None)
    return Count(start, {0: step}, shape)


def _moved(search: _Search, node: NodeProto, shape: Shape) -> Count | None:
    """Follow the axes that are carried; the value must not vary along the others."""
    found = search.count(node.input[0])
    if found is None:
        return None
    sources = carried_from(search.g, node) or ()
    varying = {axis for axis in found.strides if found.shape[axis] != 1}
    if not varying.issubset(sources):
        return None
    strides = {to: found.strides[axis] for to, axis in enumerate(sources) if axis in varying}
    return Count(found.offset, strides, shape)


def _widened(found: Count, shape: Shape) -> Count | None:
    """The same count in a larger shape, in which axes of size 1 are repeated."""
    extra = len(shape) - len(found.shape)
    strides: dict[int, Dim] = {}
    for axis, stride in found.strides.items():
        if found.shape[axis] == 1:
            continue
        if found.shape[axis] != shape[axis + extra]:
            return None
        strides[axis + extra] = stride
    return Count(found.offset, strides, shape)


def _sum(search: _Search, node: NodeProto, shape: Shape) -> Count | None:
    sign = -1 if nd.is_op(node, "Sub") else 1
    one, other = (search.count(name) for name in node.input)
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


def _product(search: _Search, node: NodeProto, shape: Shape) -> Count | None:
    counts = [search.count(name) for name in node.input]
    for found, factor in (counts, counts[::-1]):
        if found is not None and factor is not None and not factor.strides:
            wide = _widened(found, shape)
            if wide is None:
                return None
            by = factor.offset
            strides = {axis: stride * by for axis, stride in wide.strides.items()}
            return Count(wide.offset * by, strides, shape)
    return None


def _slice(search: _Search, node: NodeProto, shape: Shape) -> Count | None:
    found = search.count(node.input[0])
    g = search.g
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


def _filled(search: _Search, node: NodeProto, shape: Shape) -> Count | None:
    value = nd.attr(node, "value")
    if value is None:
        return None
    stored = search.g.model.weights.array(value).reshape(-1)
    return Count(int(stored[0]), {}, shape) if stored.size == 1 else None


_RULES: dict[str, Callable[[_Search, NodeProto, Shape], Count | None]] = {
    **dict.fromkeys((*MOVEMENT, "Cast"), _moved),
    **dict.fromkeys(("Add", "Sub"), _sum),
    "ConstantOfShape": _filled,
    "Mul": _product,
    "Range": _range,
    "Slice": _slice,
}


# -- truth


def truth(g: Graph, value: str) -> bool | None:
    """Whether a condition is true everywhere, or false everywhere; None when it is neither."""
    return _Search(g).truth(value)


def _truth(search: _Search, value: str) -> bool | None:
    g = search.g
    stored = g.const(value)
    if stored is not None:
        if not 0 < stored.size <= _LARGEST_TABLE or stored.dtype != np.bool_:
            return None
        first = bool(stored[(0,) * stored.ndim])
        return first if bool((stored == first).all()) else None
    node = g.producer(value)
    if node is None or node.domain not in nd.STANDARD_DOMAINS:
        return None
    if node.op_type in _COMPARISONS:
        return _compared(search, node)
    if node.op_type in ("And", "Or"):
        decides = node.op_type == "Or"
        known = [search.truth(name) for name in node.input]
        if decides in known:
            return decides
        return None if None in known else not decides
    if node.op_type == "Not":
        inner = search.truth(node.input[0])
        return None if inner is None else not inner
    if node.op_type in MOVEMENT:
        return search.truth(node.input[0])
    return None


_COMPARISONS: dict[str, tuple[bool, int]] = {
    "GreaterOrEqual": (True, 0),
    "Greater": (True, 1),
    "LessOrEqual": (False, 0),
    "Less": (False, 1),
}
"""Whether the first operand is to be the larger one, and by how much."""


def _compared(search: _Search, node: NodeProto) -> bool | None:
    shape = search.g.shape(node.output[0])
    one, other = map(search.count, node.input)
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
    """An input of the graph and its axis that has this symbolic size."""
    if isinstance(size, Expr):
        for value in g.inputs:
            shape = g.shape(value)
            if shape is not None and size in shape:
                return value, shape.index(size)
    return None
