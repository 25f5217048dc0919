"""Writing layers with int8 weights, in the spelling that onnxruntime fuses when it loads a model.

    xq, xs, xz = DynamicQuantizeLinear(x)          once for all layers that read x
    y = Cast(MatMulInteger(xq, W, xz)) * (xs * s) + b

With one reader of xq this becomes one DynamicQuantizeMatMul; with several, each becomes a
MatMulIntegerToFloat behind one DynamicQuantizeLinear. For that, xs is the first factor, b a vector,
and its sum an Add. All operators are standard ones.

    y = Cast(T[i]) * s[i]

dequantizes the rows that were taken, and never the table. A projection that is tied to the table
reads its transpose, which the runtime computes once, when it loads the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto

from passes.fuse.linear.affine import only_reader
from passes.quantize.layers.int8_weights import limit_of, quantize
from passes.quantize.layers.layers import Linear, Table, Weight
from passes.quantize.layers.weight_storage import drop_unused
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.quantization.plan import Entry


@dataclass(slots=True, eq=False)
class Writer:
    """Writes layers one by one; a weight that several read is quantized and stored once."""

    tables: frozenset[tuple[int, str]] = frozenset()
    """Keys of the weights that are stored by rows, because a Table reads them."""
    _stored: dict[tuple[object, ...], tuple[str, Array]] = field(
        default_factory=dict[tuple[object, ...], tuple[str, Array]]
    )
    _scales: dict[tuple[object, ...], str] = field(default_factory=dict[tuple[object, ...], str])

    def linear(self, g: Graph, layer: Linear, entry: Entry) -> None:
        """Write a linear layer. Raises Unfit for weights that cannot be quantized."""
        node, weight = layer.node, layer.weight
        if not g.begin("quantize-linear", node):
            return
        by_rows = weight.turned and weight.key in self.tables
        values, numbers = self.stored(weight, entry, by_rows=by_rows)
        scale = self.scale(weight.graph, values, numbers * np.float32(layer.alpha))
        if by_rows:
            values = g.op("Transpose", values, at=node, perm=[1, 0])
        x, x_scale, x_zero = activation(g, layer.x)
        product = g.op("MatMulInteger", x, values, x_zero, at=node)
        factor = g.op("Mul", x_scale, scale, at=node)
        exact = g.op("Cast", product, at=node, to=TensorProto.FLOAT)
        result = g.op("Mul", exact, factor, at=node)
        if layer.bias:
            result = g.op("Add", result, bias_of(g, layer), at=node)
        result = put(g, node, result)
        if not layer.bias:
            _settle_bias(g, result, layer.outputs)
        drop_unused(weight.graph, weight.name)

    def table(self, g: Graph, layer: Table, entry: Entry) -> None:
        """Write a table. Raises Unfit for one that cannot be quantized."""
        node, weight = layer.node, layer.weight
        if not g.begin("quantize-table", node):
            return
        values, numbers = self.stored(weight, entry, by_rows=True)
        scale = self.scale(weight.graph, values, numbers.reshape(-1, 1))
        rows = g.op("Gather", values, layer.indices, at=node)
        factor = g.op("Gather", scale, layer.indices, at=node)
        exact = g.op("Cast", rows, at=node, to=TensorProto.FLOAT)
        put(g, node, g.op("Mul", exact, factor, at=node))
        drop_unused(weight.graph, weight.name)

    def stored(self, weight: Weight, entry: Entry, by_rows: bool) -> tuple[str, Array]:
        """Name of the int8 weight, and its scales; `by_rows` keeps the layout of a table."""
        limit = limit_of(entry.reduce_range)
        turned = weight.turned and not by_rows
        axis = None
        if by_rows or entry.axis is not None:
            axis = 0 if by_rows or turned else 1
        key = (*weight.key, axis, limit, turned)
        if key not in self._stored:
            floats = weight.graph.const(weight.name)
            assert floats is not None, weight.name
            found = quantize(floats, axis, limit, turned)
            name = weight.graph.constant(found.values, f"{weight.name}_int8")
            self._stored[key] = name, found.scale
        return self._stored[key]

    def scale(self, g: Graph, values: str, numbers: Array) -> str:
        """Name of these scales of a stored weight."""
        key = values, numbers.shape, numbers.tobytes()
        if key not in self._scales:
            self._scales[key] = g.constant(numbers, f"{values}_scale")
        return self._scales[key]


def activation(g: Graph, x: str) -> tuple[str, str, str]:
    """x as unsigned bytes, with its scale and zero point."""
    for user in g.users(x):
        if nd.is_op(user, "DynamicQuantizeLinear"):
            return user.output[0], user.output[1], user.output[2]
    made = g.add("DynamicQuantizeLinear", [x], 3)
    return made.output[0], made.output[1], made.output[2]


def bias_of(g: Graph, layer: Linear) -> str:
    """beta b of a Gemm, as a vector where it is the same for all rows."""
    known = g.const(layer.bias)
    if known is None:
        return layer.bias
    vector = known
    if known.size in (1, layer.outputs) and known.shape[-1:] in ((), (1,), (layer.outputs,)):
        vector = np.broadcast_to(known.reshape(-1), (layer.outputs,))
    if layer.beta == 1 and vector.shape == known.shape:
        return layer.bias
    return g.constant(vector * np.float32(layer.beta), layer.bias)


def _settle_bias(g: Graph, result: str, count: int) -> None:
    """Make what adds a bias behind a MatMul an Add of a vector."""
    found = bias_behind(g, result, count)
    if found is None:
        return
    adding, bias = found
    if nd.is_op(adding, "Sum"):
        g.set_op(adding, "Add")
    vector = as_vector(g, bias, result)
    if vector is not None and vector != bias:
        g.set_input(adding, list(adding.input).index(bias), vector)


def bias_behind(g: Graph, result: str, count: int) -> tuple[NodeProto, str] | None:
    """The node that adds a constant for each of `count` outputs, and alone reads `result`."""
    reader = only_reader(g, result)
    if reader is None or not nd.is_op(reader, "Add", "Sum") or len(reader.input) != 2:
        return None
    bias = reader.input[1 - list(reader.input).index(result)]
    known = g.const(bias)
    if known is None or known.size != count or known.shape[-1:] != (count,):
        return None
    return reader, bias


def as_vector(g: Graph, bias: str, result: str) -> str | None:
    """The bias of `result` without axes of size 1; None where those may be axes of the sum."""
    known, rank = g.const(bias), g.rank(result)
    if known is None or known.ndim <= 1:
        return bias
    if rank is None or known.ndim > rank:
        return None
    return g.constant(known.reshape(-1), bias)


def put_node(g: Graph, node: NodeProto, made: NodeProto) -> None:
    """Let `made` take the place of a node, output by output; blank ones are not there."""
    for old, new in list(zip(node.output, made.output, strict=True)):
        if old:
            g.replace(old, new)
    g.prune(node)


def put(g: Graph, node: NodeProto, result: str) -> str:
    """Let `result` take the place of what the node computes; its name from now on."""
    result = g.replace(node.output[0], result)
    g.prune(node)
    return result
