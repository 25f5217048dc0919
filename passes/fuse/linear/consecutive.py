"""Linear maps in a row, with constant weights and nothing between them but a bias: one map.

    (x A + a) B + b  =  x (A B) + (a B + b)             A: [n, k], B: [k, m]

That is a gain only where the product is no larger than its factors, n m <= n k + k m, and where it
takes their place: A has no other reader, nor has B, unless the product is no larger than A alone.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.fuse.linear.affine import by_channel, only_reader, read_from, source_of, use_count
from passes.fuse.linear.dense import Dense, add_behind, gemm, matmul, put_gemm, put_matmul
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.rewriting.rule import Miss, rewrite


@rewrite(matmul, gemm, opset=7)
def consecutive_linear(g: Graph, node: NodeProto) -> str:
    """(x A + a) B + b = x (A B) + (a B + b)"""
    second = Dense.of(g, node)
    first, bias = _before(g, node)
    _require_gain(g, first, second)
    inner, outer = (dense.matrix.astype(np.float64) * dense.alpha for dense in (first, second))
    product = second.store(inner @ outer)
    shift = np.broadcast_to(bias, inner.shape[1:]) @ outer
    source = first.node.input[0]
    if nd.is_op(node, "MatMul"):
        vector = second.vector(shift)
        if product is None or vector is None:
            raise Miss("its element type cannot hold the product")
        put_matmul(g, second, product)
        read_from(g, node, source)
        return add_behind(g, node, vector) if bias.any() else node.output[0]
    if product is None or not put_gemm(g, second, product, second.bias(g) + shift):
        raise Miss("its element type cannot hold the product")
    if nd.attr(node, "alpha") is not None:
        g.del_attr(node, "alpha")
    return read_from(g, node, source)


def _before(g: Graph, node: NodeProto) -> tuple[Dense, Array]:
    """The linear map that `node` alone reads, and its bias."""
    bias = np.zeros(())
    value = node.input[0]
    maker = g.producer(value) if only_reader(g, value) is not None else None
    added = None
    if maker is not None and nd.is_op(maker, "Add"):
        added, value = maker, source_of(g, maker)
        maker = g.producer(value) if only_reader(g, value) is not None else None
    if maker is None or not nd.is_op(maker, "MatMul", "Gemm"):
        raise Miss("what it reads is no linear map, or is read elsewhere")
    if nd.attr(maker, "transA", 0) or nd.attr(node, "transA", 0):
        raise Miss("one of the two works along the first axis")
    first = Dense.of(g, maker)
    if nd.is_op(maker, "Gemm"):
        bias = first.bias(g)
    if added is not None:
        other = added.input[1] if added.input[0] == value else added.input[0]
        numbers = by_channel(g, other, first.outputs)
        if numbers is None:
            raise Miss("what is added between is not one number for each channel")
        bias = bias + numbers
    return first, bias


def _require_gain(g: Graph, first: Dense, second: Dense) -> None:
    (n, k), m = first.matrix.shape, second.matrix.shape[1]
    if second.matrix.shape[0] != k:
        raise Miss("the sizes of the two are at odds")
    if n * m > n * k + k * m:
        raise Miss("one matrix would be larger than the two")
    if use_count(g, first.node.input[1]) != 1:
        raise Miss("the first weight has other readers")
    if use_count(g, second.node.input[1]) != 1 and n * m > n * k:
        raise Miss("the second weight has other readers")


RULES = (consecutive_linear,)
