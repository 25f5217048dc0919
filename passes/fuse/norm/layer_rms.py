"""Fuse layer norms, rms norms and l2 norms, without scale and bias.

    layer norm   d = x - mean(x),  d / sqrt(mean(d^2) + eps)
                 x * r + (b - mean(x) * r) = d * r + b,  r = w / sqrt(mean(d^2) + eps)
                                                                                    (TensorFlow)
                 variance as mean(x^2) - mean(x)^2                                  (Flax)
    rms norm     x / sqrt(mean(x^2) + eps)
    l2 norm      x / sqrt(sum(x^2) + eps) = rms norm / sqrt(n), with eps / n
                 x / max(sqrt(sum(x^2)), tiny), with tiny^2 for eps                 (torch)

A square is a Mul or a Pow; an inverse root is a Div by Sqrt, a Reciprocal, a Pow of -0.5 or a Sqrt
of a Reciprocal. Constant factors in between are multiplied into the scale.
"""

from __future__ import annotations

import math

from onnx import NodeProto, TensorProto

from passes.analysis.operands import broadcast
from passes.fuse.cast_types import require_type_kept
from passes.fuse.norm.norm_writer import (
    LAYER,
    RMS,
    NormSpec,
    reduced_axes,
    sizes_of,
    write_instance_norm,
    write_norm,
)
from passes.fuse.typed_op import typed_op
from toolkit.ir import Graph, Shape, TensorType, node as nd
from toolkit.pattern import Pattern, const, maybe_cast, number, op, product, total, var
from toolkit.rewriting.rule import Match, MatchFailure, rewrite

x = var("x")
epsilon = number("epsilon", where=lambda eps: eps >= 0)
factor = number("factor")
weight = const("weight")


def square(value: Pattern) -> Pattern:
    return value * value | value**2


def mean(value: Pattern, name: str) -> Pattern:
    return (op.ReduceMean(value, ...) | op.GlobalAveragePool(value)).named(name)


def _roots(spread: Pattern) -> tuple[Pattern, Pattern]:
    """Return the patterns of sqrt(spread) and 1 / sqrt(spread)."""
    root = op.Sqrt(spread) | spread**0.5
    return root, spread**-0.5 | op.Sqrt(op.Reciprocal(spread) | 1 / spread)


def over_root(numerator: Pattern, spread: Pattern) -> tuple[Pattern, ...]:
    """Return the forms of numerator / sqrt(spread), times a number and perhaps a weight."""
    root, inverse = _roots(spread)
    inverse_cast = op.Cast(op.Reciprocal(root) | 1 / root)
    return (
        product(numerator, factor, 1 / maybe_cast(root)),
        product(numerator, factor, maybe_cast(inverse) | inverse_cast),
        product(numerator, factor, weight, 1 / root),
        product(numerator, factor, weight, inverse),
    )


# -- rms norm

_TINY = 1e-8
"""A limit below this only guards against division by zero: no nonzero vector is that short."""

length = op.ReduceL2(x, ...).named("sum")
limit = number("limit", where=lambda limit: 0 < limit <= _TINY)
limited_length = op.Max(length, limit) | op.Clip(length, limit, None) | op.Clip(length, limit)
square_sum = (op.ReduceSum(square(x), ...) | op.ReduceSumSquare(x, ...)).named("sum")
mean_square = mean(square(maybe_cast(x)), "mean_square")


@rewrite(
    *over_root(x, total(mean_square, epsilon)),
    *over_root(x, total(square_sum, epsilon)),
    product(x, factor, 1 / length),
    product(x, factor, 1 / limited_length),
    opset=23,
)
def rms_norm(
    g: Graph,
    x: str,
    factor: float,
    epsilon: float | None,
    limit: float | None,
    weight: str | None,
    mean_square: NodeProto | None,
    sum: NodeProto | None,
    node: NodeProto,
    match: Match,
) -> str:
    """x / sqrt(mean(x^2) + eps), and x / sqrt(sum(x^2) + eps) = rms norm / sqrt(n) with eps / n"""
    require_type_kept(g, x, match)
    axes = reduced_axes(g, x, mean_square, sum)
    if limit is not None and g.dtype(x) != TensorProto.FLOAT:
        raise MatchFailure(f"the square of {limit:g} underflows in the type of '{x}'")
    count = 1 if mean_square is not None else math.prod(sizes_of(g, NormSpec(x, axes, 0)))
    if not count:
        raise MatchFailure("the normalized axes are empty")
    eps = epsilon if limit is None else limit * limit
    norm = NormSpec(x, axes, (eps or 0.0) / count, factor / math.sqrt(count))
    return _weighted(g, write_norm(g, RMS, norm, node), weight, node)


# -- layer norm

difference = x - mean(x, "mean")
other_difference = x - mean(x, "other_mean")
variance = mean(square(other_difference), "variance")
fast_difference = total(mean(square(x), "variance"), -square(mean(x, "other_mean")))
fast_variance = fast_difference | op.Max(fast_difference, 0) | op.Relu(fast_difference)


cast_difference = op.Cast(difference)
cast_variance = mean(square(op.Cast(other_difference)), "variance")


@rewrite(
    *over_root(difference, total(variance, epsilon)),
    *over_root(difference, total(fast_variance, epsilon)),
    *over_root(cast_difference, total(cast_variance, epsilon)),
    opset=17,
)
def layer_norm(
    g: Graph,
    x: str,
    factor: float,
    epsilon: float,
    weight: str | None,
    mean: NodeProto,
    other_mean: NodeProto,
    variance: NodeProto,
    node: NodeProto,
) -> str:
    """(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)"""
    axes = reduced_axes(g, x, mean, other_mean, variance)
    norm = NormSpec(x, axes, epsilon, factor)
    normal = _write_layer_norm(g, norm, _shape_of_scale(g, weight, node), node)
    return _weighted(g, _cast_like_result(g, normal, x, node), weight, node)


bias, rate = var("bias"), var("rate")
shared_mean = mean(x, "mean").shared()


@rewrite(
    total(x * rate, bias, -(shared_mean * rate)),
    total(x * rate, bias, -shared_mean * rate),
    total(x * rate, -(shared_mean * rate)),
    total(x * rate, -shared_mean * rate),
    opset=17,
)
def scaled_difference(
    g: Graph, x: str, rate: str, bias: str | None, mean: NodeProto, node: NodeProto
) -> str:
    """x * r + (b - mean(x) * r) = (x - mean(x)) * r + b"""
    reduced_axes(g, x, mean)  # requires that the mean keeps its axes
    difference = typed_op(g, g.type(x), "Sub", x, mean.output[0], at=node)
    known = TensorType(g.dtype(x), broadcast(g.shape(x), g.shape(rate)))  # `bias` may be larger
    scaled = typed_op(g, known, "Mul", difference, rate, at=node)
    return g.op("Add", scaled, bias, at=node) if bias else scaled


def _write_layer_norm(g: Graph, norm: NormSpec, scale: Shape | None, node: NodeProto) -> str:
    """Write a layer norm, or an instance norm if it is equivalent and scaled per channel."""
    rank = g.rank(norm.x) or 0
    scaled_inside = scale is not None and bool(scale) and scale[-1] != 1
    scaled_by_channel = scale is not None and not scaled_inside and any(s != 1 for s in scale)
    by_channel = scaled_by_channel or (rank > 3 and not scaled_inside)
    written = write_instance_norm(g, norm, node) if by_channel else None
    return written or write_norm(g, LAYER, norm, node)


def _cast_like_result(g: Graph, normal: str, x: str, node: NodeProto) -> str:
    """Cast the norm to the type of the original, if all its users cast it back to that of `x`.

    TorchScript takes the difference in half precision and continues in double.
    """
    before, after = g.dtype(x), g.dtype(node.output[0])
    if before == after:
        return normal
    users = g.users(node.output[0])
    back = all(nd.is_op(user, "Cast") and nd.attr(user, "to") == before for user in users)
    if not before or not after or not back or g.is_output(node.output[0]):
        raise MatchFailure(f"the norm is not used in the type of '{x}'")
    g.learn_type(normal, g.type(x) or TensorType(before, None))
    return g.op("Cast", normal, at=node, to=after)


def _shape_of_scale(g: Graph, weight: str | None, node: NodeProto) -> Shape | None:
    """Return the shape of the constant scale, part of the match or applied by a user."""
    if weight:
        return g.shape(weight)
    for user in g.users(node.output[0]):
        if nd.is_op(user, "Mul"):
            scale = next((value for value in user.input if g.is_const(value)), None)
            return None if scale is None else g.shape(scale)
    return None


def _weighted(g: Graph, norm: str, weight: str | None, node: NodeProto) -> str:
    return g.op("Mul", norm, weight, at=node) if weight else norm


RULES = (scaled_difference, layer_norm, rms_norm)
"""Layer norms come first, since each contains the rms norm of a difference."""
