"""Dynamically quantized convolutions, on request only.

    xq, xs, xz = DynamicQuantizeLinear(x)
    y = Cast(ConvInteger(xq, W, xz)) * (xs * s) + b        W [O, I / groups, *taps] in int8

Padding has the code xz, which is zero. onnxruntime's kernel is several times slower than float; the
model gets smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers.layers import ScaleAxes
from passes.quantize.layers.weight_storage import WeightStore, drop_unused, float_weights
from passes.quantize.schemes.dynamic.int8_writer import activation, dequantized, put
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.quantization.plan import Entry
from toolkit.rewriting.match_failure import MatchFailure


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """A Conv with constant weights."""

    axes: ClassVar[ScaleAxes] = (0, None)
    kind: ClassVar[str] = "a convolution"
    node: NodeProto
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def convolution_of(g: Graph, node: NodeProto) -> Convolution | None:
    """Return the layer of a Conv, None if its weights are computed.

    Raise MatchFailure if it must stay float.
    """
    shape = float_weights(g, node.input[1], 0, "kernel") if nd.is_op(node, "Conv") else None
    if shape is None:
        return None
    if given(node, 2) and not g.is_const(node.input[2]):
        raise MatchFailure("a bias that is computed")
    return Convolution(node, shape)


def write_convolution(g: Graph, layer: Convolution, entry: Entry, store: WeightStore) -> None:
    """Write a convolution in int8. Raises Unfit for weights that cannot be quantized."""
    node = layer.node
    if not g.begin("quantize-conv", node):
        return
    channels = (layer.shape[0], *(1 for _ in layer.shape[2:]))
    weight = store.weight(g, node.input[1], entry, entry.axis)
    scale = weight.params.scale
    scale_name = store.scale(weight, scale.reshape(channels) if scale.ndim else scale)
    x, x_scale, x_zero = activation(g, node.input[0])
    sums = g.op("ConvInteger", x, weight.codes, x_zero, at=node, **nd.attrs(node))
    result = dequantized(g, sums, g.op("Mul", x_scale, scale_name, at=node), node)
    if given(node, 2):
        bias = g.const(node.input[2])
        assert bias is not None
        result = g.op("Add", result, g.constant(bias.reshape(channels), "bias"), at=node)
    floats = list(nd.inputs_of(node))[1:]
    put(g, node, result)
    for name in floats:
        drop_unused(g, name)
