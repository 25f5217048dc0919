"""Convolutions whose activations are quantized as they come, for those who ask for them.

    xq, xs, xz = DynamicQuantizeLinear(x)
    y = Cast(ConvInteger(xq, W, xz)) * (xs * s) + b        W [O, I / groups, *taps] in int8

What is around an image is xz, which is zero. The runtime's kernel is several times slower than
floats: the bytes are all that is won.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import given
from passes.quantize.layers.int8_weights import limit_of, quantize
from passes.quantize.layers.weight_storage import drop_unused, require_float32
from passes.quantize.schemes.dynamic.int8_writer import activation, put
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.quantization.plan import Entry
from toolkit.rewriting.match_failure import Miss


@dataclass(frozen=True, slots=True, eq=False)
class Convolution:
    """A Conv with constant weights."""

    node: NodeProto
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


def convolution_of(g: Graph, node: NodeProto) -> Convolution | None:
    """The layer that a Conv is; None if its weights are computed; Miss for what must stay."""
    if not nd.is_op(node, "Conv"):
        return None
    tensor = g.tensor(node.input[1])
    if tensor is None:
        return None
    require_float32(tensor)
    if not all(tensor.dims):
        raise Miss("no weights at all")
    if given(node, 2) and not g.is_const(node.input[2]):
        raise Miss("a bias that is computed")
    return Convolution(node, tuple(tensor.dims))


@dataclass(slots=True, eq=False)
class ConvolutionWriter:
    """Writes convolutions; a weight that several read is quantized and stored once."""

    _stored: dict[tuple[object, ...], tuple[str, Array]] = field(
        default_factory=dict[tuple[object, ...], tuple[str, Array]]
    )

    def write(self, g: Graph, layer: Convolution, entry: Entry) -> None:
        """Write a convolution in int8. Raises Unfit for weights that cannot be quantized."""
        node = layer.node
        if not g.begin("quantize-conv", node):
            return
        channels = (layer.shape[0], *(1 for _ in layer.shape[2:]))
        values, scale = self._quantized(g, node.input[1], entry)
        scale = scale.reshape(channels) if scale.ndim else scale
        x, x_scale, x_zero = activation(g, node.input[0])
        sums = g.op("ConvInteger", x, values, x_zero, at=node, **nd.attrs(node))
        factor = g.op("Mul", x_scale, g.constant(scale, f"{values}_scale"), at=node)
        result = g.op("Mul", g.op("Cast", sums, at=node, to=TensorProto.FLOAT), factor, at=node)
        if given(node, 2):
            bias = g.const(node.input[2])
            assert bias is not None
            result = g.op("Add", result, g.constant(bias.reshape(channels), "bias"), at=node)
        floats = list(nd.inputs_of(node))[1:]
        put(g, node, result)
        for name in floats:
            drop_unused(g, name)

    def _quantized(self, g: Graph, name: str, entry: Entry) -> tuple[str, Array]:
        """Name of the int8 weight, and its scales."""
        scope, floats = g.scope_of(name), g.const(name)
        assert scope is not None, name
        assert floats is not None, name
        key = id(scope), name, entry.axis, entry.reduce_range
        if key not in self._stored:
            limit = limit_of(entry.reduce_range)
            found = quantize(floats, entry.axis, limit)
            self._stored[key] = scope.constant(found.values, f"{name}_int8"), found.scale
        return self._stored[key]
