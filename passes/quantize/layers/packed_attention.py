"""Attention with its projections packed into one weight, as onnxruntime's own optimizer writes it.

    com.microsoft::Attention(x, W, b, mask, past)
    xq, xs, xz = DynamicQuantizeLinear(x)
    com.microsoft::QAttention(xq, W, b, xs, s, mask, xz, z, past)       W [inputs, 3 hidden] in int8

The projections compute in integers, the attention itself in floats, with the same attributes. What
QAttention has no input or attribute for stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers.int8_weights import limit_of, quantize
from passes.quantize.layers.weight_storage import drop_unused, require_float32
from passes.quantize.schemes.dynamic.int8_writer import activation, put_node
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.quantization.plan import Entry
from toolkit.rewriting.match_failure import Miss

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
    """The layer that an Attention is; None if its weights are computed; Miss for what must stay."""
    if nd.qualified(node) != "com.microsoft::Attention" or not given(node, _WEIGHT):
        return None
    tensor = g.tensor(node.input[_WEIGHT])
    if tensor is None:
        return None
    require_float32(tensor)
    if len(tensor.dims) != 2 or not all(tensor.dims):
        raise Miss("weights that no attention has")
    if given(node, _ADDED) or given(node, _PAST_LENGTH):
        raise Miss("packed attention with what is added to its scores, or a buffer for the past")
    strange = [name for name, value in nd.attrs(node).items() if value and name not in _ATTRIBUTES]
    if strange:
        raise Miss(f"packed attention with {strange[0]}, which the int8 kernel does not know")
    return PackedAttention(node, (tensor.dims[0], tensor.dims[1]))


@dataclass(slots=True, eq=False)
class PackedAttentionWriter:
    """Writes attention; a weight that several read is quantized and stored once."""

    _stored: dict[tuple[object, ...], tuple[str, str, str]] = field(
        default_factory=dict[tuple[object, ...], tuple[str, str, str]]
    )

    def write(self, g: Graph, layer: PackedAttention, entry: Entry) -> None:
        """Write an attention in int8. Raises Unfit for weights that cannot be quantized."""
        node = layer.node
        if not g.begin("quantize-attention", node):
            return
        weight, scale, zero = self._quantized(g, node.input[_WEIGHT], entry)
        bias = given(node, _BIAS)
        if not bias:
            bias = g.constant(np.zeros(layer.shape[1], np.float32), "bias")
        x, x_scale, x_zero = activation(g, node.input[0])
        mask, past = given(node, _MASK), given(node, _PAST)
        made = g.add(
            "QAttention",
            [x, weight, bias, x_scale, scale, mask, x_zero, zero, past],
            [g.fresh(name) if name else "" for name in node.output],
            nd.attrs(node),
            domain="com.microsoft",
            at=node,
        )
        floats = node.input[_WEIGHT]
        put_node(g, node, made)
        drop_unused(g, floats)

    def _quantized(self, g: Graph, name: str, entry: Entry) -> tuple[str, str, str]:
        """Names of the int8 weight, its scales and its zeros."""
        scope, floats = g.scope_of(name), g.const(name)
        assert scope is not None, name
        assert floats is not None, name
        key = id(scope), name, entry.axis, entry.reduce_range
        if key not in self._stored:
            found = quantize(floats, entry.axis, limit_of(entry.reduce_range))
            zero = np.zeros(found.scale.shape, np.int8)
            self._stored[key] = (
                scope.constant(found.values, f"{name}_int8"),
                scope.constant(found.scale, f"{name}_scale"),
                scope.constant(zero, f"{name}_zero"),
            )
        return self._stored[key]
