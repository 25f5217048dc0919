"""Find quantized layers whose bias can be corrected, and read and write the bias.

    Conv, ConvTranspose, Gemm     weights after a DequantizeLinear; the bias is input 2: int32
                                  after a DequantizeLinear, or float, or absent
    MatMul, MatMulInteger, ...    the bias is a constant that an Add adds to the product

`value` is the layer's output to observe. Its `counterpart` in the float model has the name of the
output, or of its dequantized copy.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers.channel_weights import kernel_with
from passes.quantize.layers.weight_storage import drop_unused
from toolkit.ir import Array, Graph, node as nd
from toolkit.quantization.number_format import INT32

_WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")
_INTEGERS = ("MatMulInteger", "com.microsoft::MatMulIntegerToFloat", "com.microsoft::MatMulNBits")
_OWN_BIAS = 6
"""The bias slot of MatMulIntegerToFloat; a layer with such a bias is corrected already."""


@dataclass(frozen=True, slots=True, eq=False)
class Biased:
    """A quantized layer: `node` has the bias in `slot`, outputs are along `axis`."""

    layer: NodeProto
    node: NodeProto
    slot: int
    value: str
    counterpart: str
    axis: int
    outputs: int

    @property
    def label(self) -> str:
        return nd.label(self.layer)

    def bias(self, g: Graph) -> Array:
        """Return the bias in float32, one number per output."""
        name = given(self.node, self.slot)
        if not name:
            return np.zeros(self.outputs, np.float32)
        found = _int32_bias(g, name)
        known = g.const(name) if found is None else found[0] * found[1]
        assert known is not None
        return np.broadcast_to(known.reshape(-1), (self.outputs,)).astype(np.float32)

    def rounded(self, g: Graph, wanted: Array) -> tuple[Array, Array]:
        """Return the bias nearest to `wanted`, as stored and in float32."""
        scale = self._scale(g)
        if scale is None:
            floats = wanted.astype(np.float32)
            return floats, floats
        steps = np.rint(wanted.astype(np.float64) / scale)
        codes = np.clip(steps, -INT32.limit, INT32.limit).astype(np.int32)
        return codes, (codes * scale).astype(np.float32)

    def put(self, g: Graph, wanted: Array) -> None:
        """Replace the bias of the layer."""
        stored, _ = self.rounded(g, wanted)
        name, scale = given(self.node, self.slot), self._scale(g)
        old = g.producer(name) if name and scale is not None else None
        shape = g.shape(old.input[0] if old is not None else name) if name else None
        if shape is not None and all(isinstance(size, int) for size in shape):
            stored = stored.reshape([size for size in shape if isinstance(size, int)])
        made = g.constant(stored, "bias")
        if old is not None:
            inputs = [made, *old.input[1:]]
            made = g.op("DequantizeLinear", *inputs, at=self.node, **nd.attrs(old))
        elif scale is not None:
            axis = 0 if scale.ndim else None
            by = g.constant(scale, "bias_scale")
            made = g.op("DequantizeLinear", made, by, at=self.node, axis=axis)
        inputs = [*self.node.input]
        inputs.extend([""] * (self.slot + 1 - len(inputs)))
        inputs[self.slot] = made
        g.set_inputs(self.node, inputs)
        if old is not None:
            name = old.input[0]
            g.prune(old)
        if name:
            drop_unused(g, name)

    def _scale(self, g: Graph) -> Array | None:
        """Return the scale of an int32 bias, present or to be added; None for a float bias."""
        name = given(self.node, self.slot)
        if name:
            found = _int32_bias(g, name)
            return None if found is None else found[1]
        if not nd.is_op(self.node, *_WITH_BIAS):
            return None
        dequantizers = [_dequantizer(g, self.node.input[place]) for place in (0, 1)]
        x, w = (g.const(d.input[1]) if d is not None else None for d in dequantizers)
        if x is None or w is None or x.size != 1 or w.size not in (1, self.outputs):
            return None
        return np.asarray(w.reshape(() if w.size == 1 else -1) * x.reshape(()), np.float32)


def biased_layers(g: Graph, names: Container[str]) -> tuple[list[Biased], list[NodeProto]]:
    """Return the quantized layers in graph order, and those without a value among `names`.

    A product without an Add has no bias and is in neither list.
    """
    found: list[Biased] = []
    left: list[NodeProto] = []
    for node in g.nodes:
        if not _is_quantized(g, node):
            continue
        layer = _with_input(g, node, names) or _with_sum(g, node, names)
        if layer is not None:
            found.append(layer)
        elif nd.is_op(node, *_WITH_BIAS):
            left.append(node)
    return found, left


def _is_quantized(g: Graph, node: NodeProto) -> bool:
    if nd.qualified(node) in _INTEGERS:
        return not given(node, _OWN_BIAS)
    if not nd.is_op(node, "MatMul", *_WITH_BIAS):
        return False
    producer = _dequantizer(g, node.input[1])
    return producer is not None and g.is_const(producer.input[0])


def _with_input(g: Graph, node: NodeProto, names: Container[str]) -> Biased | None:
    if not nd.is_op(node, *_WITH_BIAS):
        return None
    producer = g.producer(node.input[1])
    weights = g.const(producer.input[0]) if producer is not None else None
    if weights is None or nd.attr(node, "alpha", 1.0) != 1 or nd.attr(node, "beta", 1.0) != 1:
        return None
    kernel = kernel_with(node, weights.shape)
    if kernel is None:
        return None
    outputs, axis = kernel.outputs, -1 if kernel.is_matrix else 1
    name = given(node, 2)
    if name and not _is_vector(g, name, outputs):
        return None
    seen = _comparable(g, node.output[0], names)
    return Biased(node, node, 2, *seen, axis, outputs) if seen is not None else None


def _with_sum(g: Graph, node: NodeProto, names: Container[str]) -> Biased | None:
    """Return a product whose Casts and scalings end in the Add of a constant."""
    value = node.output[0]
    while (user := g.sole_user(value)) is not None:
        if nd.is_op(user, "Add", "Sum") and len(user.input) == 2:
            slot = 1 - list(user.input).index(value)
            known = g.const(user.input[slot])
            if known is None or known.ndim < 1 or known.dtype != np.float32:
                return None
            outputs = known.shape[-1]
            seen = _comparable(g, user.output[0], names)
            if known.size != outputs or seen is None or outputs == 1:
                return None
            return Biased(node, user, slot, *seen, -1, outputs)
        integer = node.op_type == "MatMulInteger" and nd.is_op(user, "Cast", "Mul")
        if not integer and not nd.is_op(user, "QuantizeLinear", "DequantizeLinear"):
            return None
        value = user.output[0]
    return None


def _comparable(g: Graph, value: str, names: Container[str]) -> tuple[str, str] | None:
    """Return the value to observe, and its counterpart in the float model.

    A result with only quantized users is observed after its DQ: a Relu may have been dropped there
    because the zero point replaces it.
    """
    copy = _dequantized_copy(g, value)
    if value in names:
        return copy or value, value
    return (copy, copy) if copy in names else None


def _dequantized_copy(g: Graph, value: str) -> str:
    """Return the dequantized copy of a value if its sole user is a QuantizeLinear."""
    users = g.users(value)
    if len(users) != 1 or not nd.is_op(users[0], "QuantizeLinear") or g.is_output(value):
        return ""
    users = g.users(users[0].output[0])
    views = [user for user in users if nd.is_op(user, "DequantizeLinear")]
    return views[0].output[0] if views else ""


def _is_vector(g: Graph, name: str, outputs: int) -> bool:
    found = _int32_bias(g, name)
    known = g.const(name) if found is None else found[0]
    if known is None or (found is None and known.dtype != np.float32):
        return False
    return known.size == outputs and known.shape[-1] == outputs


def _int32_bias(g: Graph, name: str) -> tuple[Array, Array] | None:
    """Return the codes and the scale of a bias after a DequantizeLinear."""
    producer = _dequantizer(g, name)
    if producer is None:
        return None
    values, scale = g.const(producer.input[0]), g.const(producer.input[1])
    zero = g.const(producer.input[2]) if given(producer, 2) else None
    if values is None or scale is None or values.dtype != np.int32:
        return None
    return None if zero is not None and zero.any() else (values, scale)


def _dequantizer(g: Graph, name: str) -> NodeProto | None:
    producer = g.producer(name)
    return producer if nd.is_op(producer, "DequantizeLinear") else None
