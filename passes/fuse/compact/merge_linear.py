"""Merge linear layers that share their input and whose results meet in one operator.

    x A + a, x B + b, x C + c  =  Split(x [A B C] + [a b c])

Examples are query, key and value of an attention, or the halves of a gated MLP with biases. Layers
are merged only where that leaves fewer nodes: two layers without a bias stay two nodes either way.
Layers with the same input but different attentions (the keys of all layers of a decoder use the
encoder's output) stay apart: merged, all results would be alive from the first layer to the last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given, int_vector
from passes.fuse.typed_op import typed_op
from toolkit.ir import FLOATS, Array, Graph, TensorType, node as nd

_MAX_DISTANCE = 8
"""Largest number of nodes between a layer and the operator where it meets the others."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A MatMul or Gemm with a constant matrix, and the Add of its bias if that is a node."""

    node: NodeProto
    size: int
    """Number of output channels."""
    add: NodeProto | None
    bias: str

    @property
    def result(self) -> str:
        return (self.add or self.node).output[0]

    @property
    def weight(self) -> str:
        return self.node.input[1]


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """Layers to be merged, in graph order."""

    layers: tuple[Layer, ...]

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(layer.weight for layer in self.layers)

    @property
    def saved(self) -> int:
        """The number of nodes saved: one MatMul, one Add and a Split remain."""
        adds = sum(layer.add is not None for layer in self.layers)
        return len(self.layers) + adds - 2 - bool(adds)

    def bytes(self, g: Graph) -> int:
        arrays = (g.const(weight) for weight in dict.fromkeys(self.weights))
        return sum(array.nbytes for array in arrays if array is not None)


def merges(g: Graph) -> list[Merge]:
    """Return all groups of layers worth merging."""
    found = [merge for group in groups(g) for merge in _meeting(g, group) if merge.saved > 0]
    # A weight with users outside of groups with the same weights would be stored twice.
    users = Counter((weight, merge.weights) for merge in found for weight in merge.weights)
    return [
        merge
        for merge in found
        if all(g.use_count(weight) == users[weight, merge.weights] for weight in merge.weights)
    ]


def groups(g: Graph) -> list[list[Layer]]:
    """Return the layers that share their input and differ in nothing but constants."""
    found: dict[tuple[object, ...], list[Layer]] = defaultdict(list)
    for node in g.nodes:
        weight = g.tensor(node.input[1]) if nd.is_op(node, "MatMul", "Gemm") else None
        if weight is None or len(weight.dims) != 2 or weight.data_type not in FLOATS:
            continue
        if g.is_const(node.input[0]) or not _is_plain(node):
            continue
        transposed = nd.attr(node, "transB", 0)
        layer = _layer(g, node, weight.dims[0 if transposed else 1])
        if layer is not None:
            inputs = weight.dims[1 if transposed else 0]
            alike = (node.input[0], inputs, node.op_type, weight.data_type, transposed)
            found[alike].append(layer)
    return [layers for layers in found.values() if len(layers) > 1]


def _is_plain(node: NodeProto) -> bool:
    """Return whether a product is x W + b, without factors or a transposed input."""
    factors = nd.attr(node, "alpha", 1.0), nd.attr(node, "beta", 1.0)
    return factors == (1.0, 1.0) and not nd.attr(node, "transA", 0)


def _layer(g: Graph, node: NodeProto, size: int) -> Layer | None:
    """Return the layer with its bias; None for a Gemm whose bias is not one number per output."""
    if nd.is_op(node, "Gemm"):
        bias = given(node, 2)
        stored = g.tensor(bias) if bias else None
        fits = not bias or (stored is not None and list(stored.dims) in ([size], [1, size]))
        return Layer(node, size, None, bias) if fits else None
    add = g.sole_user(node.output[0])
    if add is not None and nd.is_op(add, "Add"):
        bias = add.input[1] if add.input[0] == node.output[0] else add.input[0]
        stored = g.tensor(bias)
        if stored is not None and list(stored.dims) == [size]:
            return Layer(node, size, add, bias)
    return Layer(node, size, None, "")


def _meeting(g: Graph, layers: Sequence[Layer]) -> Iterator[Merge]:
    """Yield the layers of a group that meet in the same operator."""
    by_meeting: dict[int, list[Layer]] = defaultdict(list)
    for layer in layers:
        meeting = _meets_at(g, layer.result)
        if meeting is not None:
            by_meeting[id(meeting)].append(layer)
    for members in by_meeting.values():
        if len(members) > 1:
            yield Merge(tuple(members))


def _meets_at(g: Graph, value: str) -> NodeProto | None:
    """Return the first operator after `value` with another variable operand."""
    for _ in range(_MAX_DISTANCE):
        attentions = [user for user in g.users(value) if nd.is_op(user, "Attention")]
        user = attentions[0] if len(attentions) == 1 else g.sole_user(value)
        if user is None or user.domain not in nd.STANDARD_DOMAINS:
            return None
        others = [name for name in nd.inputs_of(user) if name != value]
        varies = not all(map(g.is_const, others)) and not nd.is_op(user, "RotaryEmbedding")
        if varies or nd.is_op(user, "Attention"):
            return user
        value = user.output[0]
    return None


def write(g: Graph, merge: Merge, stored: dict[tuple[str, ...], str]) -> None:
    """Replace the layers with one layer and a Split. `stored` holds the weights merged so far."""
    layers, first = merge.layers, merge.layers[0].node
    transposed = bool(nd.attr(first, "transB", 0))
    joined = _joined(g, merge, stored, axis=0 if transposed else 1)
    bias = _bias(g, merge, stored)
    sizes = [layer.size for layer in layers]
    shape = g.shape(first.output[0])
    whole_shape = None if shape is None else (*shape[:-1], sum(sizes))
    known = TensorType(g.dtype(first.output[0]), whole_shape)
    if nd.is_op(first, "Gemm"):
        inputs = nd.without_blanks([first.input[0], joined, bias])
        whole = typed_op(g, known, "Gemm", *inputs, at=first, transB=int(transposed) or None)
    else:
        whole = typed_op(g, known, "MatMul", first.input[0], joined, at=first)
        if bias:
            whole = typed_op(g, known, "Add", whole, bias, at=first)
    splits = [whole, int_vector(g, sizes, "sizes")]
    parts = g.add("Split", splits, len(layers), {"axis": -1}, at=first)
    for layer, part in zip(layers, parts.output, strict=True):
        g.replace(layer.result, part)
        g.prune(layer.add or layer.node)


def _joined(g: Graph, merge: Merge, stored: dict[tuple[str, ...], str], axis: int) -> str:
    """Return the concatenated weights; layers that share weights share them, too."""
    name = stored.get(merge.weights)
    if name is None:
        arrays = [array for weight in merge.weights if (array := g.const(weight)) is not None]
        whole = g.model.weights.keep(np.concatenate(arrays, axis))
        name = stored[merge.weights] = g.constant(whole, "weights")
    return name


def _bias(g: Graph, merge: Merge, stored: dict[tuple[str, ...], str]) -> str:
    """Return the concatenated biases, 0 for a layer without one; blank when none has any."""
    names = ("bias", *(layer.bias for layer in merge.layers), *merge.weights)
    if names in stored:
        return stored[names]
    parts: list[Array | None] = [g.const(m.bias) if m.bias else None for m in merge.layers]
    known = next((part for part in parts if part is not None), None)
    if known is None:
        return ""
    filled = [
        np.zeros(layer.size, known.dtype) if part is None else part.reshape(-1)
        for part, layer in zip(parts, merge.layers, strict=True)
    ]
    stored[names] = g.constant(np.concatenate(filled), "bias")
    return stored[names]
