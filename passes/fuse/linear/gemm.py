"""Merge a matrix product with its bias and its transposed operands into one Gemm.

    A B + c             =  Gemm(A, B, c)
    Transpose(A) B      =  Gemm(A, B, transA=1)
    alpha A B + beta c  =  A (alpha B) + (beta c)       for constants B and c

Only for matrices: Gemm takes no batch, and a batched MatMul with an Add is as fast.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given, permutation
from passes.fuse.linear.affine import Channels, by_channel, rounded, use_count
from toolkit.ir import FLOATS, Graph, node as nd
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

a = var("a", rank=2, dtype=tuple(FLOATS))
b = var("b", rank=2, dtype=tuple(FLOATS))
transposed = op.Transpose(var(rank=2))


@rewrite((op.MatMul(a, b) | op.Gemm(a, b)).named("product") + const("c"), opset=11)
def bias_into_gemm(g: Graph, a: str, b: str, c: str, product: NodeProto, node: NodeProto) -> str:
    """A B + c = Gemm(A, B, c)"""
    shape, attributes = g.shape(b), nd.attrs(product)
    columns = shape[0 if attributes.get("transB") else 1] if shape is not None else None
    if not isinstance(columns, int) or by_channel(g, c, Channels(2, 1, columns)) is None:
        raise MatchFailure("the bias is not one number per column")
    attributes.pop("beta", None)
    return g.op("Gemm", a, b, c, at=node, **attributes)


@rewrite(
    op.any("MatMul", "Gemm")(transposed, b, ...),
    op.any("MatMul", "Gemm")(a, transposed, ...),
)
def transpose_into_gemm(g: Graph, node: NodeProto) -> str:
    """Transpose(A) B = Gemm(A, B, transA=1), and B likewise"""
    if nd.is_op(node, "MatMul") and g.opset() < 11:
        raise MatchFailure("a Gemm needs a third operand before opset 11")
    inputs, dead = list(node.input), list[NodeProto]()
    flags = {flag: nd.attr(node, flag, 0) for flag in ("transA", "transB")}
    for index, flag in enumerate(flags):
        transpose = g.producer(inputs[index])
        if transpose is None or not nd.is_op(transpose, "Transpose"):
            continue
        if permutation(g, transpose) == (1, 0) and g.use_count(inputs[index]) == 1:
            inputs[index] = transpose.input[0]
            flags[flag] = 1 - flags[flag]
            dead.append(transpose)
    if inputs == list(node.input):
        raise MatchFailure("no operand is a Transpose of rows and columns without other users")
    g.set_op(node, "Gemm")
    for flag, value in flags.items():
        g.set_attr(node, flag, value or None)
    g.set_inputs(node, inputs)
    for transpose in dead:
        g.prune(transpose)
    return node.output[0]


@rewrite(op.Gemm(var("x"), const("w", dtype=tuple(FLOATS)), ...), opset=7)
def factors_of_gemm(g: Graph, node: NodeProto) -> str:
    """alpha A B + beta C = A (alpha B) + (beta C)"""
    inputs = list(node.input)
    for name, index in (("alpha", 1), ("beta", 2)):
        factor = nd.attr(node, name, 1.0)
        value = given(node, index)
        if factor == 1 or not value or use_count(g, value) != 1:
            continue
        array = g.const(value)
        changed = None if array is None else rounded(array.astype(np.float64) * factor, array)
        if changed is not None:
            inputs[index] = g.constant(changed, value)
            g.del_attr(node, name)
    if inputs == list(node.input):
        raise MatchFailure("it has no factor that its own constants could absorb")
    g.set_inputs(node, inputs)
    return node.output[0]


RULES = (bias_into_gemm, transpose_into_gemm, factors_of_gemm)
