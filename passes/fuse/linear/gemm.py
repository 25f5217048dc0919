"""Products of two matrices as one Gemm: with the bias behind it, and the transposes before it.

    A B + c             =  Gemm(A, B, c)
    Transpose(A) B      =  Gemm(A, B, transA=1)
    alpha A B + beta c  =  A (alpha B) + (beta c)       for constants B and c

Only for matrices: a Gemm takes no batch of them, and a MatMul of a batch with an Add is as fast.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given, permutation
from passes.fuse.linear.affine import Channels, by_channel, rounded, use_count
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import FLOATS
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import Miss, rewrite

a = var("a", rank=2, dtype=tuple(FLOATS))
b = var("b", rank=2, dtype=tuple(FLOATS))
turned = op.Transpose(var(rank=2))


@rewrite(op.MatMul(a, b) + const("c"), opset=11)
def bias_makes_gemm(g: Graph, a: str, b: str, c: str, node: NodeProto) -> str:
    """A B + c = Gemm(A, B, c)"""
    _require_bias(g, b, c)
    return g.op("Gemm", a, b, c, at=node)


@rewrite(op.Gemm(a, b).named("product") + const("c"), opset=11)
def bias_into_gemm(g: Graph, a: str, b: str, c: str, product: NodeProto, node: NodeProto) -> str:
    """Gemm(A, B) + c = Gemm(A, B, c)"""
    _require_bias(g, b, c, bool(nd.attr(product, "transB", 0)))
    attributes = {name: nd.attr(product, name) for name in ("alpha", "transA", "transB")}
    return g.op("Gemm", a, b, c, at=node, **attributes)


def _require_bias(g: Graph, b: str, c: str, is_turned: bool = False) -> None:
    """A bias that is the same for all rows, so that it makes the result no larger."""
    shape = g.shape(b)
    columns = shape[0 if is_turned else 1] if shape is not None else None
    if not isinstance(columns, int) or by_channel(g, c, Channels(2, 1, columns)) is None:
        raise Miss("what is added is not one number for each column")


@rewrite(op.MatMul(turned, b), op.MatMul(a, turned), opset=11)
def transpose_makes_gemm(g: Graph, node: NodeProto) -> str:
    """Transpose(A) B = Gemm(A, B, transA=1), and B likewise"""
    sources = [_untransposed(g, name) for name in node.input]
    if g.dtype(node.input[0]) not in FLOATS and g.dtype(node.input[1]) not in FLOATS:
        raise Miss("its element type is not known to be a float")
    if not any(sources):
        raise Miss(_NO_TRANSPOSE)
    inputs = [source or name for source, name in zip(sources, node.input, strict=True)]
    flags = [1 if source else None for source in sources]
    return g.op("Gemm", *inputs, at=node, transA=flags[0], transB=flags[1])


@rewrite(op.Gemm(turned, b, ...), op.Gemm(a, turned, ...))
def transpose_into_gemm(g: Graph, node: NodeProto) -> str:
    """Gemm(Transpose(A), B, C) = Gemm(A, B, C, transA=1), and B likewise"""
    inputs = list(node.input)
    for place, flag in enumerate(("transA", "transB")):
        source = _untransposed(g, node.input[place])
        if source:
            inputs[place] = source
            g.set_attr(node, flag, None if nd.attr(node, flag, 0) else 1)
    if inputs == list(node.input):
        raise Miss(_NO_TRANSPOSE)
    g.set_inputs(node, inputs)
    return node.output[0]


_NO_TRANSPOSE = "no Transpose that is made for it alone swaps rows and columns"


def _untransposed(g: Graph, value: str) -> str:
    """What `value` is the transpose of, if nothing else reads it; else blank."""
    node = g.producer(value)
    if node is None or not nd.is_op(node, "Transpose") or g.use_count(value) != 1:
        return ""
    return node.input[0] if permutation(g, node) == (1, 0) else ""


@rewrite(op.Gemm(var("x"), const("w", dtype=tuple(FLOATS)), ...), opset=7)
def factors_of_gemm(g: Graph, node: NodeProto) -> str:
    """alpha A B + beta C = A (alpha B) + (beta C)"""
    inputs = list(node.input)
    for name, place in (("alpha", 1), ("beta", 2)):
        factor = nd.attr(node, name, 1.0)
        value = given(node, place)
        if factor == 1 or not value or use_count(g, value) != 1:
            continue
        array = g.const(value)
        changed = None if array is None else rounded(array.astype(np.float64) * factor, array)
        if changed is not None:
            inputs[place] = g.constant(changed, value)
            g.del_attr(node, name)
    if inputs == list(node.input):
        raise Miss("it has no factor that constants of its own could take")
    g.set_inputs(node, inputs)
    return node.output[0]


RULES = (
    bias_makes_gemm,
    bias_into_gemm,
    transpose_makes_gemm,
    transpose_into_gemm,
    factors_of_gemm,
)
