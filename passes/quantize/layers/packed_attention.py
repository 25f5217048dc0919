"""Quantize com.microsoft::Attention, whose projections are packed into one weight.

    com.microsoft::Attention(x, W, b, mask, past)
    xq, xs, xz = DynamicQuantizeLinear(x)
    com.microsoft::QAttention(xq, W, b, xs, s, mask, xz, z, past)       W [inputs, 3 hidden] in int8

The projections compute in int8, the attention itself in float with the same attributes. A node with
an input or attribute that QAttention lacks stays float.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers.weight_storage import WeightStore, drop_unused, require_float32
from passes.quantize.schemes.dynamic.int8_writer import activation, put_node
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.quantization.plan import Entry
from toolkit.rewriting.match_failure import MatchFailure

_WEIGHT, _BIAS, _MASK, _PAST, _ADDED, _PAST_LENGTH = 1, 2, 3, 4, 5, 6
_ATTRIBUTES = ("num_heads", "unidirectional", "scale", "mask_filter_value")


@dataclass(frozen=True, slots=True, eq=False)
class PackedAttention:
    """An Attention of com.microsoft with constant weights."""

    node: NodeProto
    shape: tuple[int, int]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


def packed_attention_of(g: Graph, node: NodeProto) -> PackedAttention | None:
    """Return the layer of an Attention, None if its weights are computed.

    Raise MatchFailure if it must stay float.
    """
    if nd.qualified(node) != "com.microsoft::Attention" or not given(node, _WEIGHT):
        return None
    tensor = g.tensor(node.input[_WEIGHT])
    if tensor is None:
        return None
    require_float32(tensor)
    if len(tensor.dims) != 2 or not all(tensor.dims):
        raise MatchFailure("weights that no attention has")
    if given(node, _ADDED) or given(node, _PAST_LENGTH):
        raise MatchFailure(
            "packed attention with what is added to its scores, or a buffer for the past"
        )
    strange = [name for name, value in nd.attrs(node).items() if value and name not in _ATTRIBUTES]
    if strange:
        raise MatchFailure(
            f"packed attention with {strange[0]}, which the int8 kernel does not know"
        )
    return PackedAttention(node, (tensor.dims[0], tensor.dims[1]))


def write_attention(g: Graph, layer: PackedAttention, entry: Entry, store: WeightStore) -> None:
    """Write an attention in int8. Raises Unfit for weights that cannot be quantized."""
    node = layer.node
    if not g.begin("quantize-attention", node):
        return
    floats = node.input[_WEIGHT]
    weight = store.weight(g, floats, entry, entry.axis)
    scale, zero = store.scale(weight), store.zero_point(weight)
    bias = given(node, _BIAS)
    if not bias:
        bias = g.constant(np.zeros(layer.shape[1], np.float32), "bias")
    x, x_scale, x_zero = activation(g, node.input[0])
    mask, past = given(node, _MASK), given(node, _PAST)
    made = g.add(
        "QAttention",
        [x, weight.codes, bias, x_scale, scale, mask, x_zero, zero, past],
        [g.fresh(name) if name else "" for name in node.output],
        nd.attrs(node),
        domain="com.microsoft",
        at=node,
    )
    put_node(g, node, made)
    drop_unused(g, floats)
