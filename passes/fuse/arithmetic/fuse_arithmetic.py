"""Arithmetic in its plainest form.

    x * (1 / y)               x / y, for values of one shape
    sum(x) / n                mean(x)
    einsum of two matrices    matmul, with transposes around it
    unsqueeze(reduce(x))      the reduction that keeps its axes (or a Reshape)
    exp(x) / sum(exp(x))      softmax(x)
    transpose(a b)            transpose(b) transpose(a), where one is transposed anyway
    product of flattened rows matmul along the last axis

Powers are for the target to spell, see `passes.lower.lower.powers`.
"""

from __future__ import annotations

import math

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import int_operand, permutation, same_shape, transpose
from passes.fuse.arithmetic import einsum, flattened_matmul, one_hot_indices
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.op_traits import REDUCTIONS
from toolkit.ir.tensor_type import FLOATS, TensorType
from toolkit.pattern import const, number, op, product, var
from toolkit.rewriting.rule import MatchFailure, RulePass, rewrite

x, y = var("x"), var("y")


@rewrite(op.Mul(x, op.Reciprocal(y)), op.Mul(x, 1 / y))
def product_with_reciprocal(g: Graph, x: str, y: str, node: NodeProto) -> str:
    """x * (1 / y). For a `y` that is broadcast, few divisions and many products are faster."""
    if not same_shape(g, y, node.output[0]) or g.dtype(y) not in FLOATS:
        raise MatchFailure(f"'{y}' is not of the shape of the result")
    return g.op("Div", x, y, at=node)


_turned = op.Transpose(var()).shared()
_product = (op.MatMul(_turned, y) | op.MatMul(x, _turned)).named("product")
_factor = const("factor", where=lambda array: array.size == 1)


@rewrite(
    op.Transpose(_product),
    op.Transpose(op.Mul(_product, _factor).named("scale")),
    op.Transpose(op.Div(_product, _factor).named("scale")),
)
def transpose_of_product(
    g: Graph, product: NodeProto, factor: str | None, scale: NodeProto | None, node: NodeProto
) -> str:
    """(A B)^T = B^T A^T, for matrices of which one is transposed anyway, and a factor"""
    rank = g.rank(product.output[0])
    if rank is None or rank < 2 or any(g.rank(name) != rank for name in product.input):
        raise MatchFailure("its operands have not as many axes as the product")
    swap = [*range(rank - 2), rank - 1, rank - 2]
    if list(permutation(g, node) or ()) != swap:
        raise MatchFailure("it does more than to turn each matrix")
    left, right = (_turned_by(g, name, swap, product) for name in product.input)
    result = g.op("MatMul", right, left, at=node)
    if scale is None or factor is None:
        return result
    if (g.rank(factor) or 0) > rank:
        raise MatchFailure("its factor adds axes")
    known = g.type(node.output[0])
    if known is not None:
        g.learn_type(result, known)
    return g.op(scale.op_type, result, factor, at=node)


def _turned_by(g: Graph, value: str, swap: list[int], product: NodeProto) -> str:
    """The transpose of each matrix; two Transposes in a row are one, or none."""
    maker = g.producer(value)
    perm = permutation(g, maker) if maker is not None and nd.is_op(maker, "Transpose") else None
    if maker is None or perm is None:
        source, whole = value, swap
    else:
        source, whole = maker.input[0], [perm[axis] for axis in swap]
    if whole == sorted(whole):
        return source
    turned = transpose(g, source, whole, at=product)
    shape = g.shape(value)
    if shape is not None:
        g.learn_type(turned, TensorType(g.dtype(value), tuple(shape[axis] for axis in swap)))
    return turned


# -- reductions


@rewrite(product(op.ReduceSum(x, ...).named("sum"), number("share")))
def sum_as_mean(g: Graph, x: str, share: float, sum: NodeProto, node: NodeProto) -> str:
    """sum(x) / n"""
    shape, axes = g.shape(x), int_operand(g, sum, "axes", 1, absent=[])
    if g.dtype(x) not in FLOATS or shape is None or not axes:
        raise MatchFailure(f"the shape of '{x}' or the axes are not known")
    over = positive_axes(axes, len(shape)) or []
    sizes = [size for size in (shape[axis] for axis in over) if isinstance(size, int)]
    if len(sizes) != len(axes) or not math.isclose(math.prod(sizes) * share, 1, rel_tol=1e-6):
        raise MatchFailure(f"the factor {share:g} is not one by the number of elements")
    return g.op("ReduceMean", *sum.input, at=node, **nd.attrs(sum))


@rewrite(
    op.any("Unsqueeze", "Reshape")(
        op.any(*sorted(REDUCTIONS))(x, ..., keepdims=0).named("reduced"), ...
    )
)
def reduction_that_keeps_axes(g: Graph, x: str, reduced: NodeProto, node: NodeProto) -> str:
    """unsqueeze(reduce(x)) over the same axes"""
    shape = g.shape(x)
    axes = positive_axes(int_operand(g, reduced, "axes", 1), None if shape is None else len(shape))
    if shape is None or not axes:
        raise MatchFailure(f"the shape of '{x}' or the axes are not known")
    if g.shape(node.output[0]) != tuple(1 if i in axes else n for i, n in enumerate(shape)):
        raise MatchFailure("the axes are not put back where they were")
    attributes = nd.attrs(reduced)
    attributes["keepdims"] = 1
    return g.op(reduced.op_type, *reduced.input, at=node, **attributes)


# -- softmax

_exponent = op.Exp(op.Sub(x, op.ReduceMax(x, ...).named("largest")) | x)


@rewrite(op.Div(_exponent, op.ReduceSum(_exponent, ...).named("sum")), opset=13)
def softmax(g: Graph, x: str, largest: NodeProto | None, sum: NodeProto, node: NodeProto) -> str:
    """exp(x - max(x)) / sum(exp(x - max(x))), or without the maximum"""
    reductions = [sum] if largest is None else [sum, largest]
    axes = [positive_axes(int_operand(g, one, "axes", 1), g.rank(x)) for one in reductions]
    if any(found != axes[0] for found in axes) or axes[0] is None or len(axes[0]) != 1:
        raise MatchFailure(
            "the maximum and the sum are not taken along the same axis, and only that"
        )
    if not all(nd.attr(one, "keepdims", 1) for one in reductions) or g.dtype(x) not in FLOATS:
        raise MatchFailure("the maximum or the sum lose their axis")
    return g.op("Softmax", x, at=node, axis=axes[0][0])


RULES = (
    product_with_reciprocal,
    transpose_of_product,
    softmax,
    sum_as_mean,
    reduction_that_keeps_axes,
    *one_hot_indices.RULES,
    *einsum.RULES,
    *flattened_matmul.RULES,
)


class FuseArithmetic(RulePass):
    """Write quotients, means, einsums and products of rows in their plainest form."""

    name = "fuse-arithmetic"
    rules = RULES
