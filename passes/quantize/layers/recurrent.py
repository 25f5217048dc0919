"""Quantize LSTM to onnxruntime's DynamicQuantizeLSTM, which quantizes activations at run time.

    DynamicQuantizeLSTM(X, W, R, B, lengths, h0, c0, P, sW, zW, sR, zR)

W and R are transposed, [directions, inputs, 4 hidden], int8, with a scale per output or per
direction. Directions, lengths, initial states, peepholes, activations, clip and coupled gates work
as in LSTM; `layout` is not supported. GRU and RNN have no such operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers.int8_weights import quantize
from passes.quantize.layers.layers import ScaleAxes
from passes.quantize.layers.weight_storage import WeightStore, drop_unused, float_weights
from passes.quantize.schemes.dynamic.int8_writer import put_kernel
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.op_traits import RECURRENT
from toolkit.quantization.number_format import INT8
from toolkit.quantization.plan import Entry
from toolkit.quantization.qparams import QParams, QTensor
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.storage.spill import allocate

_GATES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Recurrent:
    """An LSTM with constant W and R."""

    axes: ClassVar[ScaleAxes] = (1, None)
    kind: ClassVar[str] = "a recurrent layer"
    node: NodeProto
    size: int

    @property
    def weights(self) -> tuple[str, str]:
        return self.node.input[1], self.node.input[2]


def recurrent_of(g: Graph, node: NodeProto) -> Recurrent | None:
    """Return the layer of an LSTM, None if its weights are computed.

    Raise MatchFailure if it must stay float.
    """
    if not nd.is_op(node, *RECURRENT) or not g.is_const(given(node, 1)):
        return None
    if not nd.is_op(node, "LSTM"):
        raise MatchFailure("a recurrent layer without an int8 kernel")
    if nd.attr(node, "layout", 0):
        raise MatchFailure("a recurrent layer with the batch first, which the int8 kernel lacks")
    shapes = [float_weights(g, name, 3, "LSTM's") for name in node.input[1:3]]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    if any(shape[1] % _GATES for shape in known):
        raise MatchFailure("weights that are no LSTM's")
    return Recurrent(node, sum(map(math.prod, known)))


def write_lstm(g: Graph, layer: Recurrent, entry: Entry, store: WeightStore) -> None:
    """Write an LSTM in int8. Raises Unfit for weights that cannot be quantized."""
    node, floats = layer.node, layer.weights
    if not g.begin("quantize-lstm", node):
        return
    axis = None if entry.axis is None else 0
    w, r = (store.weight(g, name, entry, axis, True, _by_direction) for name in floats)
    params = [name for x in (w, r) for name in (store.scale(x), store.zero_point(x))]
    rest = [given(node, slot) for slot in range(3, 8)]
    attributes = {name: value for name, value in nd.attrs(node).items() if name != "layout"}
    inputs = [node.input[0], w.codes, r.codes, *rest, *params]
    put_kernel(g, node, "DynamicQuantizeLSTM", inputs, attributes)
    for name in floats:
        drop_unused(g, name)


def _by_direction(floats: Array, axis: int | None, limit: int, transpose: bool) -> QTensor:
    """Quantize the matrix of each direction, with scales [directions] or [directions, outputs]."""
    codes = allocate((floats.shape[0], floats.shape[2], floats.shape[1]), np.int8)
    scales: list[Array] = []
    for direction, matrix in enumerate(floats):
        found = quantize(matrix, axis, limit, transpose)
        codes[direction] = found.codes
        scales.append(found.params.scale)
    return QTensor(codes, QParams.of(np.stack(scales), INT8.middle, INT8))
