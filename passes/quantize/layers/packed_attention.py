"""Quantize com.microsoft::Attention, whose projections are packed into one weight.

    com.microsoft::Attention(x, W, b, mask, past)
    xq, xs, xz = DynamicQuantizeLinear(x)
    com.microsoft::QAttention(xq, W, b, xs, s, mask, xz, z, past)       W [inputs, 3 hidden] in int8

The projections compute in int8, the attention itself in float with the same attributes. A node with
an input or attribute that QAttention lacks stays float.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers.layers import ScaleAxes
from passes.quantize.layers.weight_storage import WeightStore, drop_unused, float_weights
from passes.quantize.schemes.dynamic.int8_writer import activation, put_kernel
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.quantization.plan import Entry
from toolkit.rewriting.match_failure import MatchFailure

_WEIGHT, _BIAS, _MASK, _PAST, _ADDED, _PAST_LENGTH = 1, 2, 3, 4, 5, 6
_ATTRIBUTES = ("num_heads", "unidirectional", "scale", "mask_filter_value")


@dataclass(frozen=True, slots=True, eq=False)
class PackedAttention:
    """An Attention of com.microsoft with constant weights."""

    axes: ClassVar[ScaleAxes] = (1, None)
    kind: ClassVar[str] = "packed attention"
    node: NodeProto
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def packed_attention_of(g: Graph, node: NodeProto) -> PackedAttention | None:
    """Return the layer of an Attention, None if its weights are computed.

    Raise MatchFailure if it must stay float.
    """
    if nd.qualified(node) != "com.microsoft::Attention":
        return None
    shape = float_weights(g, given(node, _WEIGHT), 2, "matrix")
    if shape is None:
        return None
    if given(node, _ADDED) or given(node, _PAST_LENGTH):
        raise MatchFailure("packed attention with an attention bias or a buffer for the past")
    others = [name for name, value in nd.attrs(node).items() if value and name not in _ATTRIBUTES]
    if others:
        raise MatchFailure(f"packed attention with {others[0]}, which the int8 kernel lacks")
    return PackedAttention(node, shape)


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
    inputs = [x, weight.codes, bias, x_scale, scale, mask, x_zero, zero, past]
    put_kernel(g, node, "QAttention", inputs, nd.attrs(node))
    drop_unused(g, floats)
