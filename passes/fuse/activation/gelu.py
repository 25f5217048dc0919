"""Fuse GELU, in all its forms.

    exact   x * Phi(x),  Phi(x) = (1 + erf(x / sqrt 2)) / 2
    tanh    x * (1 + tanh(u)) / 2 = x * sigmoid(2u),  u = sqrt(2 / pi) * (x + 0.044715 x^3)

Factors come in any order; the half is distributed or not; a cube is a Pow or a product. Models in
half precision may compute the inner part in float between two Casts: the fused operator then works
on the outer type. x * sigmoid(1.702 x) has no standard operator and is left alone.
"""

from __future__ import annotations

import math

from onnx import NodeProto, TensorProto

from passes.fuse.cast_types import require_type_kept
from toolkit.ir import Graph, node as nd
from toolkit.pattern import Pattern, maybe_cast, op, product, total, var
from toolkit.rewriting.rule import Match, rewrite

x = var("x")
inner = maybe_cast(x)
"""The operand `x` of the inner part, with or without a Cast to float."""

_K = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def _times_half_of_one_plus(f: Pattern, of_minus: Pattern) -> tuple[Pattern, ...]:
    """Return the forms of x (1 + f(u)) / 2 for an odd function f, or with -f(-u) for f(u)."""
    half = product(x, 0.5)
    return (
        product(x, 0.5, maybe_cast((f + 1) | (1 - of_minus))),
        product(x, op.Cast(product(f + 1, 0.5))),
        product(x, maybe_cast(total(product(f, 0.5), 0.5) | total(0.5, -product(of_minus, 0.5)))),
        total(product(x, 0.5), product(x, 0.5, f)),
        total(half, half * f),
    )


def _argument(scale: float) -> Pattern:
    """Return the pattern of scale * u / sqrt(2 / pi), with the cube in any form."""
    square = product(inner, inner) | inner**2
    cube = inner**3 | product(inner, inner, inner) | product(inner, inner**2)
    return (
        product(scale, total(inner, product(_CUBIC, cube)))
        | product(scale, inner, total(product(_CUBIC, square), 1))
        | total(product(scale, inner), product(scale * _CUBIC, cube))
    )


@rewrite(
    *_times_half_of_one_plus(
        op.Erf(product(inner, math.sqrt(0.5))), op.Erf(product(inner, -math.sqrt(0.5)))
    ),
    opset=20,
)
def gelu(g: Graph, x: str, node: NodeProto, match: Match) -> str:
    """0.5 x (1 + erf(x / sqrt 2))"""
    require_type_kept(g, x, match)
    return g.op("Gelu", x, at=node)


@rewrite(
    *_times_half_of_one_plus(op.Tanh(_argument(_K)), op.Tanh(_argument(-_K))),
    product(x, maybe_cast(op.Sigmoid(_argument(2 * _K)))),
    opset=20,
)
def gelu_by_tanh(g: Graph, x: str, node: NodeProto, match: Match) -> str:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))"""
    require_type_kept(g, x, match)
    return g.op("Gelu", x, at=node, approximate="tanh")


@rewrite(op.Cast(op.Gelu(op.Cast(x).shared()).named("gelu")), opset=20)
def gelu_in_half(g: Graph, x: str, gelu: NodeProto, node: NodeProto) -> str | None:
    """Cast(Gelu(Cast(x))) = Gelu(x) for x in half precision"""
    if g.dtype(x) != TensorProto.FLOAT16 or nd.attr(node, "to") != TensorProto.FLOAT16:
        return None
    return g.op("Gelu", x, at=node, approximate=nd.attr(gelu, "approximate"))


RULES = (gelu, gelu_by_tanh, gelu_in_half)
