"""Fuse formulas of elementwise arithmetic, reductions and products into fewer operators.

    x * (1 / y)               x / y, for values of one shape
    sum(x) / n                mean(x)
    einsum of two matrices    MatMul, with Transposes around it
    Unsqueeze(reduce(x))      the reduction with keepdims=1 (or of a Reshape)
    exp(x) / sum(exp(x))      Softmax(x)
    Transpose(A B)            Transpose(B) Transpose(A), where A or B is a Transpose
    product of flattened rows MatMul along the last axis

`passes.lower.lower.powers` chooses between the forms of powers.
"""

from __future__ import annotations

import math

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import int_operand, permutation, same_shape, transpose, whole
from passes.fuse.arithmetic import einsum, flattened_matmul, one_hot_indices
from passes.fuse.typed_op import typed_op
from toolkit.ir import FLOATS, Graph, node as nd
from toolkit.ir.op_traits import REDUCTIONS
from toolkit.pattern import const, number, op, product, var
from toolkit.rewriting.rule import MatchFailure, RulePass, rewrite

x, y = var("x"), var("y")


@rewrite(op.Mul(x, op.Reciprocal(y)), op.Mul(x, 1 / y))
def product_with_reciprocal(g: Graph, x: str, y: str, node: NodeProto) -> str:
    """x * (1 / y). For a broadcast `y`, few divisions and many products are faster."""
    if not same_shape(g, y, node.output[0]) or g.dtype(y) not in FLOATS:
        raise MatchFailure(f"'{y}' is not a float with the shape of the result")
    return g.op("Div", x, y, at=node)


_transposed = op.Transpose(var()).shared()
_product = (op.MatMul(_transposed, y) | op.MatMul(x, _transposed)).named("product")
_factor = const("factor", where=lambda array: array.size == 1)


@rewrite(
    op.Transpose(_product),
    op.Transpose(op.Mul(_product, _factor).named("scale")),
    op.Transpose(op.Div(_product, _factor).named("scale")),
)
def transpose_of_product(
    g: Graph, product: NodeProto, factor: str | None, scale: NodeProto | None, node: NodeProto
) -> str:
    """(A B)^T = B^T A^T, where A or B is transposed already, with an optional scalar factor"""
    rank = g.rank(product.output[0])
    if rank is None or rank < 2 or any(g.rank(name) != rank for name in product.input):
        raise MatchFailure("its operands differ in rank from the product")
    swap = [*range(rank - 2), rank - 1, rank - 2]
    if list(permutation(g, node) or ()) != swap:
        raise MatchFailure("it does more than transpose each matrix")
    left, right = (_transposed_by(g, name, swap, product) for name in product.input)
    result = typed_op(g, g.type(node.output[0]), "MatMul", right, left, at=node)
    if scale is None or factor is None:
        return result
    if (g.rank(factor) or 0) > rank:
        raise MatchFailure("its factor has a larger rank than the product")
    return g.op(scale.op_type, result, factor, at=node)


def _transposed_by(g: Graph, value: str, perm: list[int], at: NodeProto) -> str:
    """Transpose a value; merge with the Transpose that produces it, if any."""
    producer = g.producer(value)
    if producer is not None and nd.is_op(producer, "Transpose"):
        first = permutation(g, producer) or ()
        value, perm = producer.input[0], [first[axis] for axis in perm]
    return value if perm == sorted(perm) else transpose(g, value, perm, at=at)


# -- reductions


@rewrite(product(op.ReduceSum(x, ...).named("sum"), number("share")))
def sum_as_mean(g: Graph, x: str, share: float, sum: NodeProto, node: NodeProto) -> str:
    """sum(x) / n"""
    shape, axes = g.shape(x), int_operand(g, sum, "axes", 1, absent=[])
    if g.dtype(x) not in FLOATS or shape is None or not axes:
        raise MatchFailure(f"the shape of '{x}' or the axes are not known")
    sizes = whole([shape[axis] for axis in positive_axes(axes, len(shape)) or ()])
    if not sizes or not math.isclose(math.prod(sizes) * share, 1, rel_tol=1e-6):
        raise MatchFailure(f"the factor {share:g} is not 1 / n for n summed elements")
    return g.op("ReduceMean", *sum.input, at=node, **nd.attrs(sum))


@rewrite(
    op.any("Unsqueeze", "Reshape")(
        op.any(*sorted(REDUCTIONS))(x, ..., keepdims=0).named("reduced"), ...
    )
)
def reduction_that_keeps_axes(g: Graph, x: str, reduced: NodeProto, node: NodeProto) -> str:
    """Unsqueeze(reduce(x)) = reduce(x, keepdims=1), for the same axes"""
    shape = g.shape(x)
    axes = positive_axes(int_operand(g, reduced, "axes", 1), None if shape is None else len(shape))
    if shape is None or not axes:
        raise MatchFailure(f"the shape of '{x}' or the axes are not known")
    if g.shape(node.output[0]) != tuple(1 if i in axes else n for i, n in enumerate(shape)):
        raise MatchFailure("the reduced axes are not restored in place")
    attributes = {**nd.attrs(reduced), "keepdims": 1}
    return g.add(reduced.op_type, reduced.input, 1, attributes, at=node).output[0]


# -- softmax

_exponent = op.Exp(op.Sub(x, op.ReduceMax(x, ...).named("largest")) | x)


@rewrite(op.Div(_exponent, op.ReduceSum(_exponent, ...).named("sum")), opset=13)
def softmax(g: Graph, x: str, largest: NodeProto | None, sum: NodeProto, node: NodeProto) -> str:
    """exp(x - max(x)) / sum(exp(x - max(x))), or without the maximum"""
    reductions = [sum] if largest is None else [sum, largest]
    axes = [positive_axes(int_operand(g, one, "axes", 1), g.rank(x)) for one in reductions]
    if any(found != axes[0] for found in axes) or axes[0] is None or len(axes[0]) != 1:
        raise MatchFailure("the maximum and the sum are not over the same single axis")
    if not all(nd.attr(one, "keepdims", 1) for one in reductions) or g.dtype(x) not in FLOATS:
        raise MatchFailure("the maximum or the sum drops its axis, or the type is not float")
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
    """Fuse arithmetic, including Einsum, into quotients, means, Softmax and MatMul."""

    name = "fuse-arithmetic"
    rules = RULES
