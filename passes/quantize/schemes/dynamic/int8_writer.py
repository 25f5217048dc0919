"""Write layers with int8 weights in the form that onnxruntime fuses when it loads a model.

    xq, xs, xz = DynamicQuantizeLinear(x)          once for all layers that use x
    y = Cast(MatMulInteger(xq, W, xz)) * (xs * s) + b

If xq has one user, onnxruntime fuses all of it into one DynamicQuantizeMatMul; if it has several,
each becomes a MatMulIntegerToFloat after one DynamicQuantizeLinear. Fusion requires xs as the first
factor, a vector b, and an Add. All operators are standard.

    y = Cast(ConvInteger(xq, W, xz)) * (xs * s) + b        W [O, I / groups, *taps]

A convolution is padded with the code xz, which is zero. The model gets smaller, but onnxruntime's
kernel is several times slower than float.

    y = Cast(T[i]) * s[i]

dequantizes only the gathered rows of a table. A projection tied to a table uses its transpose,
which onnxruntime computes once when it loads the model.

    DynamicQuantizeLSTM(X, W, R, B, lengths, h0, c0, P, sW, zW, sR, zR)      of com.microsoft
    QAttention(xq, W, b, xs, s, mask, xz, z, past)                           of com.microsoft

W and R of an LSTM are transposed, [directions, inputs, 4 hidden], with a scale per output or per
direction; all but `layout` works as in LSTM. Of a packed attention, the projections compute in
int8 (W [inputs, 3 hidden]), the attention itself in float with the same attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import given
from passes.quantize.layers.int8_weights import limit_of, quantize
from passes.quantize.layers.layers import (
    Convolution,
    Layer,
    Linear,
    MatrixLayer,
    Recurrent,
    Table,
    WeightMatrix,
)
from passes.quantize.layers.weight_storage import drop_unused
from toolkit.ir import Array, Graph, node as nd
from toolkit.quantization.number_format import INT8
from toolkit.quantization.plan import Entry
from toolkit.quantization.qparams import QParams, QTensor
from toolkit.storage.spill import allocate

Quantizer = Callable[[Array, int | None, int, bool], QTensor]
"""Quantizes weights; takes the axis of the scales, the largest code, and whether to transpose."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """An int8 weight: its graph, the name of its codes, and its parameters."""

    graph: Graph
    codes: str
    params: QParams


@dataclass(slots=True, eq=False)
class DynamicWriter:
    """Writes layers; weights with several users are stored once."""

    tables: frozenset[tuple[int, str]] = frozenset()
    """Keys of the weights stored by rows, since a Table uses them."""
    _weights: dict[tuple[object, ...], StoredWeight] = field(
        default_factory=dict[tuple[object, ...], StoredWeight]
    )
    _constants: dict[tuple[object, ...], str] = field(default_factory=dict[tuple[object, ...], str])

    def write(self, g: Graph, layer: Layer, entry: Entry) -> None:
        """Write a layer. Raises Unfit for weights that cannot be quantized."""
        node = layer.node
        if not g.begin(layer.rule, node):
            return
        is_matrix = isinstance(layer, MatrixLayer)
        floats = [layer.weight.name] if is_matrix else nd.inputs_of(node)[1:]
        if isinstance(layer, Linear):
            self._linear(g, layer, entry)
        elif isinstance(layer, Table):
            self._table(g, layer, entry)
        elif isinstance(layer, Convolution):
            self._convolution(g, layer, entry)
        elif isinstance(layer, Recurrent):
            self._lstm(g, node, entry)
        else:
            self._attention(g, layer, entry)
        for name in floats:
            drop_unused(g, name)

    def _linear(self, g: Graph, layer: Linear, entry: Entry) -> None:
        node, weight = layer.node, layer.weight
        by_rows = weight.turned and weight.key in self.tables
        stored = self.stored(weight, entry, by_rows=by_rows)
        scale = self.scale(stored, stored.params.scale * np.float32(layer.alpha))
        codes = stored.codes
        if by_rows:
            codes = g.op("Transpose", codes, at=node, perm=[1, 0])
        x, x_scale, x_zero = _activation(g, layer.x)
        sums = g.op("MatMulInteger", x, codes, x_zero, at=node)
        result = _dequantized(g, sums, g.op("Mul", x_scale, scale, at=node), node)
        if layer.bias:
            result = g.op("Add", result, bias_of(g, layer), at=node)
        result = put(g, node, result)
        if not layer.bias:
            _move_bias_to_add(g, result, layer.outputs)

    def _table(self, g: Graph, layer: Table, entry: Entry) -> None:
        node = layer.node
        stored = self.stored(layer.weight, entry, by_rows=True)
        scale = self.scale(stored, stored.params.scale.reshape(-1, 1))
        rows = g.op("Gather", stored.codes, layer.indices, at=node)
        factor = g.op("Gather", scale, layer.indices, at=node)
        put(g, node, _dequantized(g, rows, factor, node))

    def _convolution(self, g: Graph, layer: Convolution, entry: Entry) -> None:
        node, (shape,) = layer.node, layer.shapes
        channels = (shape[0], *(1 for _ in shape[2:]))
        weight = self._weight(g, node.input[1], entry, entry.axis)
        scale = weight.params.scale
        by = self.scale(weight, scale.reshape(channels) if scale.ndim else scale)
        x, x_scale, x_zero = _activation(g, node.input[0])
        sums = g.op("ConvInteger", x, weight.codes, x_zero, at=node, **nd.attrs(node))
        result = _dequantized(g, sums, g.op("Mul", x_scale, by, at=node), node)
        if given(node, 2):
            bias = g.const(node.input[2])
            assert bias is not None
            result = g.op("Add", result, g.constant(bias.reshape(channels), "bias"), at=node)
        put(g, node, result)

    def _lstm(self, g: Graph, node: NodeProto, entry: Entry) -> None:
        axis = None if entry.axis is None else 0
        w, r = (self._weight(g, n, entry, axis, True, _by_direction) for n in node.input[1:3])
        params = [name for x in (w, r) for name in (self.scale(x), self._zero_point(x))]
        rest = [given(node, slot) for slot in range(3, 8)]
        attributes = {name: value for name, value in nd.attrs(node).items() if name != "layout"}
        inputs = [node.input[0], w.codes, r.codes, *rest, *params]
        _put_kernel(g, node, "DynamicQuantizeLSTM", inputs, attributes)

    def _attention(self, g: Graph, layer: Layer, entry: Entry) -> None:
        node = layer.node
        weight = self._weight(g, node.input[1], entry, entry.axis)
        scale, zero = self.scale(weight), self._zero_point(weight)
        bias, mask, past = (given(node, slot) for slot in (2, 3, 4))
        if not bias:
            bias = g.constant(np.zeros(layer.shapes[0][1], np.float32), "bias")
        x, x_scale, x_zero = _activation(g, node.input[0])
        inputs = [x, weight.codes, bias, x_scale, scale, mask, x_zero, zero, past]
        _put_kernel(g, node, "QAttention", inputs, nd.attrs(node))

    def stored(self, weight: WeightMatrix, entry: Entry, by_rows: bool) -> StoredWeight:
        """Store a weight in int8; `by_rows` keeps the layout of a table."""
        transpose = weight.turned and not by_rows
        axis = None
        if by_rows or entry.axis is not None:
            axis = 0 if by_rows or transpose else 1
        return self._weight(weight.graph, weight.name, entry, axis, transpose)

    def _weight(
        self,
        g: Graph,
        name: str,
        entry: Entry,
        axis: int | None,
        transpose: bool = False,
        quantizer: Quantizer = quantize,
    ) -> StoredWeight:
        """Quantize the weight `name` with scales along `axis`. Raises Unfit."""
        scope, floats = g.scope_of(name), g.const(name)
        assert scope is not None, name
        assert floats is not None, name
        key = id(scope), name, axis, entry.reduce_range, transpose
        if key not in self._weights:
            found = quantizer(floats, axis, limit_of(entry.reduce_range), transpose)
            codes = scope.constant(found.codes, f"{name}_int8")
            self._weights[key] = StoredWeight(scope, codes, found.params)
        return self._weights[key]

    def scale(self, weight: StoredWeight, scale: Array | None = None) -> str:
        """Return the name of a weight's scales, or of `scale` instead."""
        return self._constant(weight, weight.params.scale if scale is None else scale, "scale")

    def _zero_point(self, weight: StoredWeight) -> str:
        return self._constant(weight, weight.params.zero_point, "zero")

    def _constant(self, weight: StoredWeight, array: Array, what: str) -> str:
        key = weight.codes, what, array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = weight.graph.constant(array, f"{weight.codes}_{what}")
        return self._constants[key]


def _by_direction(floats: Array, axis: int | None, limit: int, transpose: bool) -> QTensor:
    """Quantize the matrix of each direction, with scales [directions] or [directions, outputs]."""
    codes = allocate((floats.shape[0], floats.shape[2], floats.shape[1]), np.int8)
    scales: list[Array] = []
    for direction, matrix in enumerate(floats):
        found = quantize(matrix, axis, limit, transpose)
        codes[direction] = found.codes
        scales.append(found.params.scale)
    return QTensor(codes, QParams.of(np.stack(scales), INT8.middle, INT8))


def _activation(g: Graph, x: str) -> tuple[str, str, str]:
    """Return x in uint8, with its scale and zero point."""
    users = (user for user in g.users(x) if nd.is_op(user, "DynamicQuantizeLinear"))
    made = next(users, None) or g.add("DynamicQuantizeLinear", [x], 3)
    return made.output[0], made.output[1], made.output[2]


def _dequantized(g: Graph, integers: str, scale: str, at: NodeProto) -> str:
    """Return the integers as float32, times their scale."""
    return g.op("Mul", g.op("Cast", integers, at=at, to=TensorProto.FLOAT), scale, at=at)


def bias_of(g: Graph, layer: Linear) -> str:
    """Return beta b of a Gemm, as a vector if it is the same for all rows; blank without one."""
    known = g.const(layer.bias) if layer.bias else None
    if known is None:
        return layer.bias
    vector = known
    if known.size in (1, layer.outputs) and known.shape[-1:] in ((), (1,), (layer.outputs,)):
        vector = np.broadcast_to(known.reshape(-1), (layer.outputs,))
    if layer.beta == 1 and vector.shape == known.shape:
        return layer.bias
    return g.constant(vector * np.float32(layer.beta), layer.bias)


def _move_bias_to_add(g: Graph, result: str, count: int) -> None:
    """Rewrite the addition of a bias after a MatMul as an Add of a vector."""
    addition, bias, vector = bias_behind(g, result, count)
    if addition is None:
        return
    if nd.is_op(addition, "Sum"):
        g.set_op(addition, "Add")
    if vector and vector != bias:
        g.set_input(addition, list(addition.input).index(bias), vector)


def bias_behind(g: Graph, result: str, count: int) -> tuple[NodeProto | None, str, str]:
    """Return the sole user of `result` if it adds a constant per output, the constant, its vector.

    The vector omits leading axes of size 1; it is blank if they raise the rank of the sum.
    """
    user, rank = g.sole_user(result), g.rank(result)
    if user is None or not nd.is_op(user, "Add", "Sum") or len(user.input) != 2:
        return None, "", ""
    bias = user.input[1 - list(user.input).index(result)]
    known = g.const(bias)
    if known is None or known.size != count or known.shape[-1:] != (count,):
        return None, "", ""
    if known.ndim == 1:
        return user, bias, bias
    fits = rank is not None and known.ndim <= rank
    return user, bias, g.constant(known.reshape(-1), bias) if fits else ""


def _put_kernel(
    g: Graph, node: NodeProto, op: str, inputs: Sequence[str], attributes: Mapping[str, Any]
) -> None:
    """Replace a node by a com.microsoft operator with the same outputs."""
    fresh = [g.fresh(name) if name else "" for name in node.output]
    g.add(op, inputs, fresh, attributes, domain="com.microsoft", at=node)
    for old, new in zip(list(node.output), fresh, strict=True):
        if old:
            g.replace(old, new)
    g.prune(node)


def put(g: Graph, node: NodeProto, result: str) -> str:
    """Replace a node's output by `result`; return its final name."""
    result = g.replace(node.output[0], result)
    g.prune(node)
    return result
