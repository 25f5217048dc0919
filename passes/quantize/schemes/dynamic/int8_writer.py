"""Write layers with int8 weights in the form that onnxruntime fuses when it loads a model.

    xq, xs, xz = DynamicQuantizeLinear(x)          once for all layers that use x
    y = Cast(MatMulInteger(xq, W, xz)) * (xs * s) + b

If xq has one user, onnxruntime fuses all of it into one DynamicQuantizeMatMul; if it has several,
each becomes a MatMulIntegerToFloat after one DynamicQuantizeLinear. Fusion requires xs as the first
factor, a vector b, and an Add. All operators are standard.

    y = Cast(T[i]) * s[i]

dequantizes only the gathered rows of a table. A projection tied to a table uses its transpose,
which onnxruntime computes once when it loads the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from passes.quantize.layers.layers import Linear, Table, WeightMatrix
from passes.quantize.layers.weight_storage import StoredWeight, WeightStore, drop_unused
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.quantization.plan import Entry


@dataclass(slots=True, eq=False)
class DynamicWriter:
    """Writes linear layers and tables with the weights of one store."""

    tables: frozenset[tuple[int, str]] = frozenset()
    """Keys of the weights that are stored by rows because a Table uses them."""
    store: WeightStore = field(default_factory=WeightStore)

    def linear(self, g: Graph, layer: Linear, entry: Entry) -> None:
        """Write a linear layer. Raises Unfit for weights that cannot be quantized."""
        node, weight = layer.node, layer.weight
        if not g.begin("quantize-linear", node):
            return
        by_rows = weight.turned and weight.key in self.tables
        stored = self.stored(weight, entry, by_rows=by_rows)
        scale = self.store.scale(stored, stored.params.scale * np.float32(layer.alpha))
        codes = stored.codes
        if by_rows:
            codes = g.op("Transpose", codes, at=node, perm=[1, 0])
        x, x_scale, x_zero = activation(g, layer.x)
        sums = g.op("MatMulInteger", x, codes, x_zero, at=node)
        result = dequantized(g, sums, g.op("Mul", x_scale, scale, at=node), node)
        if layer.bias:
            result = g.op("Add", result, bias_of(g, layer), at=node)
        result = put(g, node, result)
        if not layer.bias:
            _move_bias_to_add(g, result, layer.outputs)
        drop_unused(weight.graph, weight.name)

    def table(self, g: Graph, layer: Table, entry: Entry) -> None:
        """Write a table. Raises Unfit for one that cannot be quantized."""
        node, weight = layer.node, layer.weight
        if not g.begin("quantize-table", node):
            return
        stored = self.stored(weight, entry, by_rows=True)
        scale = self.store.scale(stored, stored.params.scale.reshape(-1, 1))
        rows = g.op("Gather", stored.codes, layer.indices, at=node)
        factor = g.op("Gather", scale, layer.indices, at=node)
        put(g, node, dequantized(g, rows, factor, node))
        drop_unused(weight.graph, weight.name)

    def stored(self, weight: WeightMatrix, entry: Entry, by_rows: bool) -> StoredWeight:
        """Store a weight in int8; `by_rows` keeps the layout of a table."""
        transpose = weight.turned and not by_rows
        axis = None
        if by_rows or entry.axis is not None:
            axis = 0 if by_rows or transpose else 1
        return self.store.weight(weight.graph, weight.name, entry, axis, transpose)


def activation(g: Graph, x: str) -> tuple[str, str, str]:
    """Return x in uint8, with its scale and zero point."""
    for user in g.users(x):
        if nd.is_op(user, "DynamicQuantizeLinear"):
            return user.output[0], user.output[1], user.output[2]
    made = g.add("DynamicQuantizeLinear", [x], 3)
    return made.output[0], made.output[1], made.output[2]


def dequantized(g: Graph, integers: str, scale: str, at: NodeProto) -> str:
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
    found = bias_behind(g, result, count)
    if found is None:
        return
    addition, bias = found
    if nd.is_op(addition, "Sum"):
        g.set_op(addition, "Add")
    vector = as_vector(g, bias, result)
    if vector is not None and vector != bias:
        g.set_input(addition, list(addition.input).index(bias), vector)


def bias_behind(g: Graph, result: str, count: int) -> tuple[NodeProto, str] | None:
    """Return the sole user of `result` and its bias if it adds one constant per output."""
    user = g.sole_user(result)
    if user is None or not nd.is_op(user, "Add", "Sum") or len(user.input) != 2:
        return None
    bias = user.input[1 - list(user.input).index(result)]
    known = g.const(bias)
    if known is None or known.size != count or known.shape[-1:] != (count,):
        return None
    return user, bias


def as_vector(g: Graph, bias: str, result: str) -> str | None:
    """Return a bias without leading axes of size 1; None if they add axes to the sum."""
    known, rank = g.const(bias), g.rank(result)
    if known is None or known.ndim <= 1:
        return bias
    if rank is None or known.ndim > rank:
        return None
    return g.constant(known.reshape(-1), bias)


def put_kernel(
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
