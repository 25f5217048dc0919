"""How a positive channel factor passes through operators.

For an operator and the slot of the scaled operand, each function returns the scaled results with
the channel of each of their elements, or None if the factor does not pass. See `propagate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from passes.analysis.axis_flow import carried_from
from passes.analysis.operands import extra_outputs_used, given, whole
from passes.quantize.schemes.static.quantizable_ops import bounds_of, pads_zeros_or_copies
from toolkit.ir import Array, Graph, Shape, node as nd
from toolkit.ir.op_traits import VIEWS
from toolkit.symbolic import Dim

Index = NDArray[np.int64]
Flow = tuple[str, Index]
"""A value with the channel of each element."""
Passer = Callable[[Graph, NodeProto, int, Index], "list[Flow] | None"]

_UNBOUNDED = 3e38
"""Exporters write larger bounds, up to the largest float32, to mean none."""


def along(index: Index, axis: int) -> Index | None:
    """Return the channels along one axis, counted from the end; None if others vary too."""
    if index.ndim < -axis or index.size != index.shape[axis]:
        return None
    return index.reshape(-1)


def _in_place(g: Graph, node: NodeProto, slot: int, index: Index) -> list[Flow] | None:
    """Pass a homogeneous operator on each element of its first operand."""
    if slot or extra_outputs_used(g, node):
        return None
    return [(node.output[0], index)]


def _carried(g: Graph, node: NodeProto, slot: int, index: Index) -> list[Flow] | None:
    """Pass an operator that carries every axis along which the channels vary (see `axis_flow`)."""
    sources, rank = carried_from(g, node), g.rank(node.input[0])
    if slot or sources is None or extra_outputs_used(g, node):
        return None
    rank = len(sources) if rank is None else rank
    if rank < index.ndim:
        return None
    index = _ranked(index, rank)
    kept = [axis for axis in sources if axis >= 0]
    dropped = [axis for axis in range(rank) if axis not in kept]
    if any(index.shape[axis] != 1 for axis in dropped):
        return None
    shape = [index.shape[axis] if axis >= 0 else 1 for axis in sources]
    return [(node.output[0], np.transpose(index, kept + dropped).reshape(shape))]


def _prelu(g: Graph, node: NodeProto, slot: int, index: Index) -> list[Flow] | None:
    return _in_place(g, node, slot, index) if g.is_const(node.input[1]) else None


def _clip(g: Graph, node: NodeProto, slot: int, index: Index) -> list[Flow] | None:
    """Pass a Clip with the lower bound 0 or none, and no upper bound."""
    low, high = bounds_of(g, node) or (math.nan, math.nan)
    passes = (low == 0 or low < -_UNBOUNDED) and high > _UNBOUNDED
    return _in_place(g, node, slot, index) if passes else None


def _term(g: Graph, node: NodeProto, slot: int, index: Index) -> list[Flow] | None:
    """Pass a sum with constants, which are scaled as well (see `FactorSpread.terms`)."""
    others = [g.const(name) for place, name in enumerate(node.input) if place != slot]
    scales = all(known is not None and _can_scale(known, index) for known in others)
    return [(node.output[0], index)] if scales else None


def _can_scale(constant: Array, index: Index) -> bool:
    """Whether a constant scaled by channel is at most as large as before, or a vector."""
    try:
        shape = np.broadcast_shapes(constant.shape, index.shape)
    except ValueError:
        return False
    return math.prod(shape) <= max(constant.size, index.size)


def _factor(g: Graph, node: NodeProto, slot: int, index: Index) -> list[Flow] | None:
    """Pass a product, or the numerator of a quotient."""
    return None if nd.is_op(node, "Div") and slot else [(node.output[0], index)]


def _reshape(g: Graph, node: NodeProto, slot: int, index: Index) -> list[Flow] | None:
    """Pass a view if trailing axes of its operand and its result have equal element counts."""
    before, after = g.shape(node.input[0]), g.shape(node.output[0])
    index = _trimmed(index)
    if slot or after is None or (before is None and 1 in index.shape):
        return None
    sizes = _equal_ends(index.shape if before is None else before, after, index.ndim)
    if sizes is None:
        return None
    full = np.ascontiguousarray(np.broadcast_to(index, sizes[0]))
    return [(node.output[0], full.reshape(sizes[1]))]


def _trimmed(index: Index) -> Index:
    """Remove leading axes of size 1."""
    while index.ndim and index.shape[0] == 1:
        index = index[0]
    return index


def _equal_ends(before: Shape, after: Shape, least: int) -> tuple[list[int], list[int]] | None:
    """Return the trailing sizes of both, at least `least` of the first, with equal element counts.

    A reshape keeps the order of elements: the leading axes do not matter.
    """
    old, new = list(before[len(before) - least :]), list[Dim]()
    while True:
        old_sizes, new_sizes = whole(old), whole(new)
        if old_sizes is None or new_sizes is None or 0 in old_sizes:
            return None
        if math.prod(old_sizes) == math.prod(new_sizes):
            return old_sizes, new_sizes
        few = math.prod(new_sizes) < math.prod(old_sizes)
        sizes, shape = (new, after) if few else (old, before)
        if len(sizes) == len(shape):
            return None
        sizes.insert(0, shape[len(shape) - len(sizes) - 1])


def _concat(g: Graph, node: NodeProto, slot: int, index: Index) -> list[Flow] | None:
    rank = g.rank(node.output[0])
    if rank is None or rank < index.ndim:
        return None
    axis = nd.attr(node, "axis", 1) % rank
    index = _ranked(index, rank)
    if index.shape[axis] == 1:  # the other operands do not have the factor
        return [(node.output[0], index)] if len(node.input) == 1 else None
    parts: list[Index] = []
    for place, name in enumerate(node.input):
        size = _size(g.shape(name), axis)
        if size is None:
            return None
        other = [size if a == axis else n for a, n in enumerate(index.shape)]
        parts.append(index if place == slot else np.full(other, -1, np.int64))
    return [(node.output[0], np.concatenate(parts, axis))]


def _size(shape: Shape | None, axis: int) -> int | None:
    size = shape[axis] if shape is not None else None
    return size if isinstance(size, int) else None


def _split(g: Graph, node: NodeProto, slot: int, index: Index) -> list[Flow] | None:
    shapes = [g.shape(name) for name in node.output]
    rank = next((len(shape) for shape in shapes if shape is not None), None)
    if slot or rank is None or rank < index.ndim:
        return None
    axis = nd.attr(node, "axis", 0) % rank
    index = _ranked(index, rank)
    if index.shape[axis] == 1:
        return [(name, index) for name in node.output if name]
    flows: list[Flow] = []
    at = 0
    for name, shape in zip(node.output, shapes, strict=True):
        size = _size(shape, axis)
        if size is None:
            return None
        part = [slice(None)] * axis + [slice(at, at + size)]
        at += size
        if name:
            flows.append((name, index[tuple(part)]))
    return flows if at == index.shape[axis] else None


def _pad(g: Graph, node: NodeProto, slot: int, index: Index) -> list[Flow] | None:
    """Pass a Pad with zeros, or with copies of elements."""
    return _carried(g, node, slot, index) if pads_zeros_or_copies(g, node) else None


def _product(g: Graph, node: NodeProto, slot: int, index: Index) -> list[Flow] | None:
    """Pass the right operand V of a product P V if its channels vary along columns only.

    A vector P would remove the axis of the rows.
    """
    if slot != 1 or (index.ndim > 1 and index.shape[-2] != 1):
        return None
    if index.ndim > 1 and (g.rank(node.input[0]) or 0) < 2:
        return None
    rank = max(index.ndim, g.rank(node.input[1]) or 0)
    return [(node.output[0], index)] if rank > 1 else None


def _attention(g: Graph, node: NodeProto, slot: int, index: Index) -> list[Flow] | None:
    """Pass the values of an attention; a group of query heads shares one value head."""
    heads = {
        "Attention": ("q_num_heads", "kv_num_heads"),
        "com.microsoft::MultiHeadAttention": ("num_heads", "num_heads"),
        "com.microsoft::GroupQueryAttention": ("num_heads", "kv_num_heads"),
    }[nd.qualified(node)]
    queries, values = (nd.attr(node, name, 0) for name in heads)
    cached = given(node, 4) or given(node, 5) if nd.is_op(node, "Attention") else ""
    if node.op_type == "MultiHeadAttention":
        cached = given(node, 3) or given(node, 6) or given(node, 7)
    if node.op_type == "GroupQueryAttention":
        cached = given(node, 3) or given(node, 4)
    kept = node.output[2] if len(node.output) > 2 else ""
    if slot != 2 or cached or (kept and not g.is_unused(kept)):
        return None
    if not queries or not values:  # four axes, one of them heads
        ranks = {g.rank(node.input[0]), g.rank(node.input[2]), 4}
        shapes = [g.shape(node.input[place]) for place in (0, 2)]
        alike = [shape[1] for shape in shapes if shape is not None and len(shape) == 4]
        if ranks != {4} or len(alike) != 2 or alike[0] != alike[1]:
            return None
        return _product(g, node, 1, index)
    found = along(index, -1)
    if found is None or queries % values or found.size % values:
        return None
    if g.rank(node.input[2]) != 3:
        return None
    shared = np.repeat(found.reshape(values, -1), queries // values, axis=0)
    return [(node.output[0], shared.reshape(-1))]


def _ranked(index: Index, rank: int) -> Index:
    return index.reshape((1,) * (rank - index.ndim) + index.shape)


PASSERS: Mapping[str, Passer] = {
    **dict.fromkeys(("Identity", "Relu", "LeakyRelu", "Abs", "Neg", "Dropout"), _in_place),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"), _carried),
    "PRelu": _prelu,
    "Clip": _clip,
    **dict.fromkeys(("Add", "Sum", "Sub"), _term),
    **dict.fromkeys(("Mul", "Div"), _factor),
    "Transpose": _carried,
    **dict.fromkeys(VIEWS, _reshape),
    "Concat": _concat,
    "Split": _split,
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"), _carried),
    "Pad": _pad,
    "MatMul": _product,
    "Attention": _attention,
    "com.microsoft::MultiHeadAttention": _attention,
    "com.microsoft::GroupQueryAttention": _attention,
}
