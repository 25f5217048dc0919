"""How an operator computes the same on permuted operands.

Throughout, v = Transpose(v', perm): dimension i of v is dimension perm[i] of v', so what an
operator does along axis a of v it does along axis perm[a] of v'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import given, int_operand, normalized_from, set_int_operand
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.op_traits import BROADCASTING, ELEMENTWISE, REDUCTIONS
from toolkit.storage.weights import nbytes

Perm = tuple[int, ...]

_LARGEST_COPY = 1 << 16
_LARGEST_CONSTANT = 1 << 24
"""Bytes of a constant that is rewritten when something else needs it as it is, and at all."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What changes in a node when its operands come permuted."""

    inputs: tuple[int, ...]
    """The operands that are to come permuted; the others do not depend on the layout."""
    edit: Callable[[], None]
    """Changes the node's own axes."""
    outputs_stay: bool = False
    """The outputs are the same as before (the permuted dimensions are gone), not permuted."""


def plan(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    """How `node` works on operands before `perm`; None when it cannot."""
    if node.domain not in nd.STANDARD_DOMAINS:
        return None
    name = node.op_type
    if name in BROADCASTING or name == "PRelu":  # whose slope has a layout just as well
        return _broadcast(g, node, perm)
    if name in ELEMENTWISE:
        return _along(g, node, perm, _nothing)
    if name in REDUCTIONS:
        return _reduce(g, node, perm)
    planner = _PLANNERS.get(name)
    return None if planner is None else planner(g, node, perm)


def may_change(g: Graph, value: str) -> bool:
    """Whether `value` is a constant that can be stored in the other layout."""
    tensor = g.tensor(value)
    if tensor is None:
        return False
    size = nbytes(tensor)
    return size <= _LARGEST_COPY or (size <= _LARGEST_CONSTANT and g.use_count(value) == 1)


def permuted_constant(g: Graph, value: str, inverse: Perm) -> Array | None:
    """The contents of a constant, with leading dimensions added, in the other layout."""
    found = g.const(value) if may_change(g, value) else None
    if found is None:
        return None
    full: Array = found.reshape((1,) * (len(inverse) - found.ndim) + found.shape)
    return np.ascontiguousarray(np.transpose(full, inverse))


def _nothing() -> None:
    return


def _along(g: Graph, node: NodeProto, perm: Perm, edit: Callable[[], None]) -> Plan | None:
    """The plan of an operator whose first input is the only one with a layout."""
    return Plan((0,), edit) if g.rank(node.input[0]) == len(perm) else None


def _broadcast(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    """Operands of lower rank line up with the last dimensions: those must stay, or be constant."""
    if g.opset() < 7:
        return None
    rank = len(perm)
    moved: list[int] = []
    full = False
    for index, value in enumerate(node.input):
        shape = g.shape(value)
        if shape is None or len(shape) > rank:
            return None
        full = full or len(shape) == rank
        if all(size == 1 for size in shape):
            continue
        first = rank - len(shape)
        if first and perm[first:] == tuple(range(first, rank)):
            continue
        if len(shape) < rank and not may_change(g, value):
            return None
        moved.append(index)
    return Plan(tuple(moved), _nothing) if full and moved else None


def _axis(default: int) -> Callable[[Graph, NodeProto, Perm], Plan | None]:
    """An operator along the axis in its attribute `axis`."""

    def planned(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
        axes = positive_axes([nd.attr(node, "axis", default)], len(perm))
        if axes is None:
            return None
        moved = perm[axes[0]]
        return _along(g, node, perm, partial(g.set_attr, node, "axis", moved))

    return planned


def _softmax(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    # Before opset 13 it runs over all dimensions from its axis on.
    return _axis(-1)(g, node, perm) if g.opset() >= 13 else None


def _concat(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    if any(g.rank(value) != len(perm) for value in node.input):
        return None
    found = _axis(1)(g, node, perm)
    return None if found is None else Plan(tuple(range(len(node.input))), found.edit)


def _quantize(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    scale = g.shape(node.input[1])
    if scale in ((), (1,)):
        return _along(g, node, perm, _nothing)
    if scale is not None and len(scale) == 1 and g.opset() >= 13:
        return _axis(1)(g, node, perm)
    return None  # block-wise: the scales have a layout of their own


def _reduce(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    rank = len(perm)
    axes = int_operand(g, node, "axes", 1, absent=[])
    if axes == []:
        # Over all dimensions, or none: the axes need no change.
        keeps = nd.attr(node, "noop_with_empty_axes", 0) or nd.attr(node, "keepdims", 1)
        stay, edit = not keeps, _nothing
    else:
        found = positive_axes(axes, rank)
        if found is None:
            return None
        moved = [perm[axis] for axis in found]
        stay = not nd.attr(node, "keepdims", 1)
        if stay and not _in_order([p for p in perm if p not in moved]):
            return None
        edit = partial(set_int_operand, g, node, "axes", 1, moved)
    return Plan((0,), edit, stay) if g.rank(node.input[0]) == rank else None


def _arg(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    found = _axis(0)(g, node, perm)
    if found is None or nd.attr(node, "keepdims", 1):
        return found
    axis = nd.attr(node, "axis", 0) % len(perm)
    rest = [p for p in perm if p != perm[axis]]
    return Plan((0,), found.edit, True) if _in_order(rest) else None


def _squeeze(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    axes = positive_axes(int_operand(g, node, "axes", 1), len(perm))
    if not axes or g.rank(node.input[0]) != len(perm):
        return None
    moved = [perm[axis] for axis in axes]
    if not _in_order([p for p in perm if p not in moved]):
        return None
    return Plan((0,), partial(set_int_operand, g, node, "axes", 1, sorted(moved)), True)


def _in_order(places: Sequence[int]) -> bool:
    return list(places) == sorted(places)


def _pad(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    rank = len(perm)
    if given(node, 3):
        axes = positive_axes(int_operand(g, node, "axes", 3), rank)
        if axes is None:
            return None
        moved = [perm[axis] for axis in axes]
        return _along(g, node, perm, partial(set_int_operand, g, node, "axes", 3, moved))
    pads = int_operand(g, node, "pads", 1)
    if pads is None or len(pads) != 2 * rank:
        return None
    sides = [0] * (2 * rank)
    for place, other in enumerate(perm):
        sides[other], sides[rank + other] = pads[place], pads[rank + place]
    return _along(g, node, perm, partial(set_int_operand, g, node, "pads", 1, sides))


def _slice(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    starts = int_operand(g, node, "starts", 1)
    absent = None if starts is None else range(len(starts))
    axes = positive_axes(int_operand(g, node, "axes", 3, absent), len(perm))
    if axes is None:
        return None
    moved = [perm[axis] for axis in axes]

    def edit() -> None:
        if g.opset() < 10:
            g.set_attr(node, "axes", moved)
        else:
            set_int_operand(g, node, "axes", 3, moved, like=node.input[1])

    return _along(g, node, perm, edit)


def _matmul(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    """A linear map of the last axis does not mind how the others are arranged."""
    weight = g.tensor(node.input[1])
    if weight is None or len(weight.dims) != 2 or perm[-1] != len(perm) - 1:
        return None
    return _along(g, node, perm, _nothing)


def _norm(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    """Normalizes over the last axes, from its own on: the others may be arranged as they are."""
    first = normalized_from(g, node)
    if first is None or perm[first:] != tuple(range(first, len(perm))):
        return None
    if len(nd.outputs_of(node)) > 1:
        return None  # means and deviations have a layout of their own
    return _along(g, node, perm, _nothing)


def _tile(g: Graph, node: NodeProto, perm: Perm) -> Plan | None:
    repeats = int_operand(g, node, "repeats", 1) if g.opset() >= 6 else None
    if repeats is None or len(repeats) != len(perm):
        return None
    moved = [0] * len(perm)
    for place, other in enumerate(perm):
        moved[other] = repeats[place]
    return _along(g, node, perm, partial(set_int_operand, g, node, "repeats", 1, moved))


_PLANNERS: dict[str, Callable[[Graph, NodeProto, Perm], Plan | None]] = {
    "ArgMax": _arg,
    "ArgMin": _arg,
    "Concat": _concat,
    "DequantizeLinear": _quantize,
    "Hardmax": _softmax,
    "LayerNormalization": _norm,
    "LogSoftmax": _softmax,
    "MatMul": _matmul,
    "Pad": _pad,
    "QuantizeLinear": _quantize,
    "RMSNormalization": _norm,
    "Slice": _slice,
    "Softmax": _softmax,
    "Split": _axis(0),
    "Squeeze": _squeeze,
    "Tile": _tile,
}
