"""Multiply the last axis of a tensor instead of its flattened rows.

    Reshape(Reshape(x, [-1, k]) W + b, [..., n])  =  x W + b                        x: [..., k]

Exporters write linear layers like this for frameworks that only multiply matrices: GPT-2's,
PyTorch's after attention, and all of TensorFlow's. If x has separate heads, [..., h, d] with
h d = k, a Reshape that merges them remains and keeps the batch; likewise a Reshape that splits
the heads after the product.

The rule runs before attention, since batch and length are unknown in flattened rows, and again with
the linear layers, since fused attention merges its heads again.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given, reshape, reshape_target
from passes.fuse.linear.affine import Channels, by_channel, use_count
from passes.fuse.typed_op import typed_op
from toolkit.ir import Graph, Shape, TensorType, node as nd
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
        raise MatchFailure("its operand is not flattened to rows and columns")
    inner, columns = _sizes(g, product, w)
    biases = [bias for bias in (given(product, 2), shift) if bias]
    if any(by_channel(g, bias, Channels(2, 1, columns)) is None for bias in biases):
        raise MatchFailure("its bias is not constant, or varies by row")
    after = g.shape(node.output[0])
    rows, leading = _unflattened(g, x, flat, inner, _leading(after, columns))
    known = TensorType(g.dtype(x), (*leading, columns))
    result = typed_op(g, known, "MatMul", rows, _untransposed(g, product, w), at=product)
    for bias, place in ((given(product, 2), product), (shift, node)):
        if bias:
            result = typed_op(g, known, "Add", result, bias, at=place)
        if place is product and g.use_count(product.output[0]) > 1:
            if g.is_output(product.output[0]):
                raise MatchFailure("the product of flattened rows is an output of the graph")
            g.replace(product.output[0], reshape(g, result, [-1, columns], at=product))
    if known.shape == after:
        return result
    target = reshape_target(known.shape, after)
    if target is None:
        raise MatchFailure("no constant target of a Reshape expresses the shape of the result")
    return reshape(g, result, target, at=node)


def _sizes(g: Graph, product: NodeProto, w: str) -> tuple[int, int]:
    """Return the number of inputs and outputs of x W + b; raise MatchFailure for other Gemms."""
    factors = [nd.attr(product, "alpha", 1.0)]
    if given(product, 2):
        factors.append(nd.attr(product, "beta", 1.0))
    if any(factor != 1 for factor in factors) or nd.attr(product, "transA", 0):
        raise MatchFailure("it has a factor alpha or beta, or transposes its operand")
    sizes = g.shape(w) or ()
    if nd.attr(product, "transB", 0):
        sizes = sizes[::-1]
    numbers = [size for size in sizes if isinstance(size, int) and size > 0]
    if len(numbers) != 2:
        raise MatchFailure("the size of its weight is not known")
    return numbers[0], numbers[1]


def _leading(shape: Shape | None, columns: int) -> list[Shape]:
    """Return the leading axes of `shape`, two or more, followed by `columns`; longest first."""
    found: list[Shape] = []
    total = 1
    sizes = shape or ()
    for axis in reversed(range(2, len(sizes))):
        size = sizes[axis]
        if not isinstance(size, int):
            break
        total *= size
        if total == columns:
            found.append(sizes[:axis])
    return found


def _unflattened(
    g: Graph, x: str, flat: NodeProto, inner: int, candidates: list[Shape]
) -> tuple[str, Shape]:
    """Return `x`, reshaped if necessary, as [*leading, inner] for the first possible candidate.

    Also returns that candidate.
    """
    shape = g.shape(x)
    for leading in candidates:
        wanted = (*leading, inner)
        if shape == wanted:
            return x, leading
        target = reshape_target(shape, wanted)
        if target is not None and g.use_count(flat.output[0]) == 1:
            return reshape(g, x, target, at=flat, shape=wanted), leading
    raise MatchFailure("the operand cannot be given the leading axes of the result")


def _untransposed(g: Graph, product: NodeProto, w: str) -> str:
    """Return the weight as [inputs, outputs]."""
    if not nd.attr(product, "transB", 0):
        return w
    weight = g.const(w)
    alike = [user for user in g.users(w) if nd.is_op(user, "Gemm") and nd.attr(user, "transB", 0)]
    if weight is None or len(alike) != use_count(g, w):
        raise MatchFailure(
            "its weight is transposed, and variable or used by other operators as well"
        )
    return g.constant(
        np.transpose(weight), w
    )  # `share` merges the copies of layers that share a weight


RULES = (product_of_rows,)
