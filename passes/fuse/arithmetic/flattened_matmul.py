"""A product of flattened rows is a MatMul along the last axis.

    Reshape(Reshape(x, [-1, k]) W + b, [..., n])  =  x W + b                        x: [..., k]

That is how exporters write a linear layer whose framework multiplies matrices only: GPT-2's,
PyTorch's attention behind the heads, and all of TensorFlow's. Where x has its heads still apart,
[..., h, d] with h d = k, the Reshape that joins them stays, with the batch left as it is; and
likewise where they are taken apart behind the product.

Before attention, because what is known of batch and length is lost in a flattened row; and with
the linear maps, because fused attention has its heads joined again.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given, reshape, reshape_target
from passes.fuse.linear.affine import Channels, by_channel, use_count
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import Shape, TensorType
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

flat = op.Reshape(var("x"), ...).shared().named("flat")
w = var("w", rank=2)
product = (op.Gemm(flat, w, ...) | op.MatMul(flat, w)).shared().named("product")


@rewrite(op.Reshape(product, ...), op.Reshape(product + const("shift"), ...), opset=7)
def product_of_rows(
    g: Graph,
    x: str,
    flat: NodeProto,
    product: NodeProto,
    w: str,
    shift: str | None,
    node: NodeProto,
) -> str:
    """Reshape(Reshape(x) W + b) = x W + b"""
    if g.rank(flat.output[0]) != 2:
        raise MatchFailure("what it multiplies has more axes than rows and columns")
    inner, columns = _sizes(g, product, w)
    biases = [bias for bias in (given(product, 2), shift) if bias]
    if any(by_channel(g, bias, Channels(2, 1, columns)) is None for bias in biases):
        raise MatchFailure("its bias is not constant, or not the same for all rows")
    after = g.shape(node.output[0])
    rows, leading = _rows(g, x, flat, inner, _leading(after, columns))
    result = g.op("MatMul", rows, _upright(g, product, w), at=product)
    known = TensorType(g.dtype(x), (*leading, columns))
    g.learn_type(result, known)
    for bias, place in ((given(product, 2), product), (shift, node)):
        if bias:
            result = g.op("Add", result, bias, at=place)
            g.learn_type(result, known)
        if place is product and g.use_count(product.output[0]) > 1:
            _flatten_again(g, result, columns, product)
    if known.shape == after:
        return result
    target = reshape_target(known.shape, after)
    if target is None:
        raise MatchFailure("the shape that comes out cannot be told in numbers")
    return reshape(g, result, target, at=node)


def _sizes(g: Graph, product: NodeProto, w: str) -> tuple[int, int]:
    """Inputs and outputs of x W + b; a MatchFailure when a Gemm is anything else."""
    factors = [nd.attr(product, "alpha", 1.0)]
    if given(product, 2):
        factors.append(nd.attr(product, "beta", 1.0))
    if any(factor != 1 for factor in factors) or nd.attr(product, "transA", 0):
        raise MatchFailure("it has factors, or works along the first axis")
    sizes = g.shape(w) or ()
    if nd.attr(product, "transB", 0):
        sizes = sizes[::-1]
    numbers = [size for size in sizes if isinstance(size, int) and size > 0]
    if len(numbers) != 2:
        raise MatchFailure("the size of its weight is not known")
    return numbers[0], numbers[1]


def _leading(shape: Shape | None, columns: int) -> list[Shape]:
    """What may stand before the columns of a product, two axes or more: the longest first."""
    found: list[Shape] = []
    total = 1
    for place in reversed(range(2, len(shape or ()))):
        last = (shape or ())[place]
        if not isinstance(last, int):
            break
        total *= last
        if total == columns:
            found.append((shape or ())[:place])
    return found


def _rows(
    g: Graph, x: str, flat: NodeProto, inner: int, candidates: list[Shape]
) -> tuple[str, Shape]:
    """`x`, or a Reshape of it, with the rows of `flat` along the axes that come out; and those."""
    shape = g.shape(x)
    for leading in candidates:
        wanted = (*leading, inner)
        if shape == wanted:
            return x, leading
        target = reshape_target(shape, wanted)
        if target is not None and g.use_count(flat.output[0]) == 1:
            joined = reshape(g, x, target, at=flat)
            g.learn_type(joined, TensorType(g.dtype(x), wanted))
            return joined, leading
    raise MatchFailure("what is flattened cannot have the axes that come out")


def _flatten_again(g: Graph, result: str, columns: int, product: NodeProto) -> None:
    """Give the product's other readers their rows; most of them are products of rows themselves."""
    if g.is_output(product.output[0]):
        raise MatchFailure("the rows are an output")
    flat = reshape(g, result, [-1, columns], at=product)
    known = g.type(product.output[0])
    if known is not None:
        g.learn_type(flat, known)
    g.replace(product.output[0], flat)


def _upright(g: Graph, product: NodeProto, w: str) -> str:
    """The weight as [inputs, outputs]."""
    if not nd.attr(product, "transB", 0):
        return w
    weight = g.const(w)
    alike = [user for user in g.users(w) if nd.is_op(user, "Gemm") and nd.attr(user, "transB", 0)]
    if weight is None or len(alike) != use_count(g, w):
        raise MatchFailure("its weight is transposed, and not a constant of such products alone")
    return g.constant(np.transpose(weight), w)  # layers that share one: `share` finds the copies


RULES = (product_of_rows,)
