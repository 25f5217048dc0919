"""A Gemm on flattened rows is a MatMul along the last axis.

    Reshape(Gemm(Reshape(x, [-1, k]), W, b), [..., m])  =  x W + b          x: [..., k]

That is how exporters write a linear layer whose framework multiplies matrices only (GPT-2's, and
PyTorch's attention behind the heads). Where x has its heads still apart, [..., h, d] with h d = k,
the Reshape that joins them stays, with the batch left as it is.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.fuse.affine import Channels, by_channel, use_count
from passes.operands import given, reshape, reshape_target
from toolkit import nodes as nd
from toolkit.graph import Graph
from toolkit.pattern import op, var
from toolkit.rules import Miss, rewrite
from toolkit.types import Shape

flat = op.Reshape(var("x"), ...).shared().named("flat")


@rewrite(op.Reshape(op.Gemm(flat, var("w", rank=2), ...).named("product"), ...), opset=7)
def gemm_of_rows(
    g: Graph, x: str, flat: NodeProto, product: NodeProto, w: str, node: NodeProto
) -> str:
    """Reshape(Gemm(Reshape(x), W, b)) = x W + b"""
    rows, columns = _sizes(g, product, w)
    result = g.shape(node.output[0])
    if result is None or len(result) < 3 or result[-1] != columns:
        raise Miss("the columns of the product are not the last axis of what is made of it")
    bias = given(product, 2)
    if bias and by_channel(g, bias, Channels(2, 1, columns)) is None:
        raise Miss("its bias is not constant, or not the same for all rows")
    source = _rows(g, x, flat, (*result[:-1], rows))
    made = g.op("MatMul", source, _upright(g, product, w), at=product)
    return g.op("Add", made, bias, at=node) if bias else made


def _sizes(g: Graph, product: NodeProto, w: str) -> tuple[int, int]:
    """Inputs and outputs of x W + b; a Miss when a Gemm is anything else."""
    factors = [nd.attr(product, "alpha", 1.0)]
    if given(product, 2):
        factors.append(nd.attr(product, "beta", 1.0))
    if any(factor != 1 for factor in factors) or nd.attr(product, "transA", 0):
        raise Miss("it has factors, or works along the first axis")
    sizes = g.shape(w) or ()
    if nd.attr(product, "transB", 0):
        sizes = sizes[::-1]
    numbers = [size for size in sizes if isinstance(size, int) and size > 0]
    if len(numbers) != 2:
        raise Miss("the size of its weight is not known")
    return numbers[0], numbers[1]


def _rows(g: Graph, x: str, flat: NodeProto, wanted: Shape) -> str:
    """`x`, or a Reshape of it, with the rows that `flat` has in the shape of the result."""
    shape = g.shape(x)
    if shape == wanted:
        return x
    target = reshape_target(shape, wanted)
    if target is None or g.use_count(flat.output[0]) != 1:
        raise Miss("what is flattened has another shape than what comes out")
    return reshape(g, x, target, at=flat)


def _upright(g: Graph, product: NodeProto, w: str) -> str:
    """The weight as [inputs, outputs]."""
    if not nd.attr(product, "transB", 0):
        return w
    weight = g.const(w)
    if weight is None or use_count(g, w) != 1:
        raise Miss("its weight is transposed, and not its own constant")
    return g.constant(np.transpose(weight), w)


RULES = (gemm_of_rows,)
