"""Plan how an operator computes the same on permuted operands.

Throughout, v = Transpose(v', perm): axis i of v is axis perm[i] of v', so an operator that works
along axis a of v works along axis perm[a] of v'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import NodeProto

from passes.analysis.axis_flow import axis_flow
from passes.analysis.operands import given, int_operand, set_int_operand
from toolkit.ir import Array, Graph, node as nd
from toolkit.ir.op_traits import BROADCASTING, ELEMENTWISE, REDUCTIONS
from toolkit.storage.weights import nbytes

Perm = tuple[int, ...]

_LARGEST_COPY = 1 << 16
"""A constant of more bytes than this is permuted only if the node is its sole user."""
_LARGEST_CONSTANT = 1 << 24
"""A constant of more bytes than this is never permuted."""

_AXES_INPUT = {**dict.fromkeys((*REDUCTIONS, "Squeeze"), 1), "Pad": 3, "Slice": 3}
"""The input that lists the axes of an operator, in opsets where it is not an attribute."""

_PERMUTABLE = (
    *(ELEMENTWISE | _AXES_INPUT.keys()),
    *("ArgMax", "ArgMin", "Concat", "DequantizeLinear", "Hardmax", "LayerNormalization"),
    *("LogSoftmax", "MatMul", "QuantizeLinear", "RMSNormalization", "Softmax", "Split", "Tile"),
)
"""Operators that compute along axes they name (and `_edit` renames), or along trailing axes."""


@dataclass(frozen=True, slots=True)
class PermutedNode:
    """The changes to a node whose operands are permuted."""

    inputs: tuple[int, ...]
    """The operands to permute; the others do not depend on the order of axes."""
    edit: Callable[[], None]
    """Renames the axes in the node's attributes and constant inputs."""
    outputs_stay: bool = False
    """Whether the outputs stay as they are, because the permuted axes are dropped."""


def permuted_node(g: Graph, node: NodeProto, perm: Perm) -> PermutedNode | None:
    """Return how `node` computes on operands before `perm`, or None if it cannot."""
    if nd.is_op(node, *BROADCASTING, "PRelu"):  # its slope is permuted as well
        return _broadcast(g, node, perm)
    if not nd.is_op(node, *_PERMUTABLE) or g.rank(node.input[0]) != len(perm):
        return None
    if nd.is_op(node, "MatMul"):
        weight = g.tensor(node.input[1])
        if weight is None or len(weight.dims) != 2:
            return None  # two activations would both have to move
    elif not nd.is_op(node, "Split") and len(nd.outputs_of(node)) > 1:
        return None  # nothing is known about the axes of the others
    flow = axis_flow(g, node)
    if flow is None:
        return None
    first = flow.operands[0]
    kept = [axis for axis in first.sources if axis >= 0]
    if any(perm[axis] != axis for axis in {*range(len(perm))}.difference(kept, flow.named)):
        return None
    drops_axes = len(first.sources) < len(perm)
    if drops_axes and not _in_order([perm[axis] for axis in kept]):
        return None
    moved = tuple(slot for slot, axes in flow.operands.items() if axes == first)
    return PermutedNode(moved, partial(_edit, g, node, flow.named, perm), drops_axes)


def _in_order(axes: Sequence[int]) -> bool:
    return list(axes) == sorted(axes)


def _edit(g: Graph, node: NodeProto, named: Sequence[int], perm: Perm) -> None:
    """Rename the axes that the node names."""
    moved = [perm[axis] for axis in named]
    if nd.is_op(node, "Tile"):
        _permute_entries(g, node, "repeats", perm)
    elif nd.is_op(node, "Pad") and not given(node, 3):
        _permute_entries(g, node, "pads", perm)
    elif not nd.is_op(node, *_AXES_INPUT):
        if named:
            g.set_attr(node, "axis", moved[0])
    elif nd.is_op(node, "Slice") and g.opset() < 10:
        g.set_attr(node, "axes", moved)
    elif nd.is_op(node, "Slice") or int_operand(g, node, "axes", _AXES_INPUT[node.op_type]):
        slot = _AXES_INPUT[node.op_type]
        set_int_operand(g, node, "axes", slot, moved, like=node.input[1] if slot > 1 else "")


def _permute_entries(g: Graph, node: NodeProto, name: str, perm: Perm) -> None:
    """Permute an operand with one or more entries per axis."""
    before: Array = np.array(int_operand(g, node, name, 1)).reshape(-1, len(perm))
    after = np.empty_like(before)
    after[:, list(perm)] = before
    set_int_operand(g, node, name, 1, after.reshape(-1).tolist())


def _broadcast(g: Graph, node: NodeProto, perm: Perm) -> PermutedNode | None:
    """Permute broadcast operands; one of lower rank must be constant or keep its axes in place."""
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
        if len(shape) < rank and not is_permutable_constant(g, value):
            return None
        moved.append(index)
    return PermutedNode(tuple(moved), _nothing) if full and moved else None


def is_permutable_constant(g: Graph, value: str) -> bool:
    """Whether `value` is a constant that may be stored permuted."""
    tensor = g.tensor(value)
    if tensor is None:
        return False
    size = nbytes(tensor)
    return size <= _LARGEST_COPY or (size <= _LARGEST_CONSTANT and g.use_count(value) == 1)


def permuted_constant(g: Graph, value: str, inverse: Perm) -> Array | None:
    """Return a constant, with leading axes added, as it is before the Transpose, or None."""
    found = g.const(value) if is_permutable_constant(g, value) else None
    if found is None:
        return None
    full: Array = found.reshape((1,) * (len(inverse) - found.ndim) + found.shape)
    return np.ascontiguousarray(np.transpose(full, inverse))


def _nothing() -> None:
    return
