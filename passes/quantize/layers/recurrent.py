"""LSTM in int8, for onnxruntime: its own operator quantizes activations and states as they come.

    DynamicQuantizeLSTM(X, W, R, B, lengths, h0, c0, P, sW, zW, sR, zR)

W and R are transposed, [directions, inputs, 4 hidden], signed, with a scale for each of the 4
hidden outputs of a direction, or one for the direction. Everything else is as in LSTM: directions,
lengths, initial states, peepholes, activations, clip and coupled gates are computed the same. Only
`layout` is not known to it; and there is no such operator for GRU and RNN.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers.int8_weights import limit_of, quantize
from passes.quantize.layers.weight_storage import drop_unused, require_float32
from passes.quantize.schemes.dynamic.int8_writer import put_node
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.quantization.plan import Entry
from toolkit.rewriting.match_failure import Miss
from toolkit.storage.spill import allocate

_GATES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Recurrent:
    """An LSTM with constant W and R."""

    node: NodeProto
    size: int

    @property
    def weights(self) -> tuple[str, str]:
        return self.node.input[1], self.node.input[2]


def recurrent_of(g: Graph, node: NodeProto) -> Recurrent | None:
    """The layer that an LSTM is; None if its weights are computed; Miss for what must stay."""
    if not nd.is_op(node, "LSTM", "GRU", "RNN") or not g.is_const(given(node, 1)):
        return None
    if not nd.is_op(node, "LSTM"):
        raise Miss("a recurrent layer for which there is no int8 kernel")
    if nd.attr(node, "layout", 0):
        raise Miss("a recurrent layer with the batch first, which the int8 kernel does not know")
    size = 0
    for name in node.input[1:3]:
        tensor = g.tensor(name)
        if tensor is None:
            return None
        require_float32(tensor)
        if len(tensor.dims) != 3 or not all(tensor.dims) or tensor.dims[1] % _GATES:
            raise Miss("weights that no LSTM has")
        size += int(np.prod(tensor.dims))
    return Recurrent(node, size)


@dataclass(slots=True, eq=False)
class RecurrentWriter:
    """Writes LSTMs; a weight that several read is quantized and stored once."""

    _stored: dict[tuple[object, ...], tuple[str, str, str]] = field(
        default_factory=dict[tuple[object, ...], tuple[str, str, str]]
    )

    def write(self, g: Graph, layer: Recurrent, entry: Entry) -> None:
        """Write an LSTM in int8. Raises Unfit for weights that cannot be quantized."""
        node = layer.node
        if not g.begin("quantize-lstm", node):
            return
        (w, *w_how), (r, *r_how) = (self._quantized(g, name, entry) for name in layer.weights)
        rest = [given(node, place) for place in range(3, 8)]
        attributes = {name: value for name, value in nd.attrs(node).items() if name != "layout"}
        made = g.add(
            "DynamicQuantizeLSTM",
            [node.input[0], w, r, *rest, *w_how, *r_how],
            [g.fresh(name) if name else "" for name in node.output],
            attributes,
            domain="com.microsoft",
            at=node,
        )
        floats = layer.weights
        put_node(g, node, made)
        for name in floats:
            drop_unused(g, name)

    def _quantized(self, g: Graph, name: str, entry: Entry) -> tuple[str, str, str]:
        """Names of the int8 weight, its scales and its zeros."""
        scope = g.scope_of(name)
        floats = g.const(name)
        assert scope is not None, name
        assert floats is not None, name
        key = id(scope), name, entry.axis, entry.reduce_range
        if key not in self._stored:
            limit = limit_of(entry.reduce_range)
            values = allocate((floats.shape[0], floats.shape[2], floats.shape[1]), np.int8)
            scales: list[Array] = []
            for direction, matrix in enumerate(floats):
                found = quantize(matrix, None if entry.axis is None else 0, limit, turned=True)
                values[direction] = found.values
                scales.append(found.scale)
            scale = np.stack(scales)
            zero = np.zeros(scale.shape, np.int8)
            self._stored[key] = (
                scope.constant(values, f"{name}_int8"),
                scope.constant(scale, f"{name}_scale"),
                scope.constant(zero, f"{name}_zero"),
            )
        return self._stored[key]
