"""Rewrite QuickGelu, x sigmoid(a x), as a scaled SiLU.

    z = a x:   x sigmoid(a x) = z sigmoid(z) / a

Between two linear layers neither factor remains: a is folded into the weights of the layer that
produces x, and 1 / a into those of the layer that uses the result.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.operands import scalar
from passes.fuse.linear.affine import may_copy
from passes.fuse.linear.consecutive import layer_of
from passes.fuse.linear.weights import LinearWeights, why_unchanged
from passes.fuse.typed_op import typed_op
from toolkit.ir import Graph, node as nd
from toolkit.pattern import number, op, product, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import rewrite

x = var("x")
_MIN_FACTOR, _MAX_FACTOR = 1e-2, 1e2
"""A factor outside this range might make the weights too large or too small for their type."""


@rewrite(
    product(
        x,
        op.Sigmoid(
            product(x, number("a", where=lambda a: _MIN_FACTOR <= a <= _MAX_FACTOR and a != 1))
        ),
    ),
    opset=7,
)
def factor_into_weights(g: Graph, x: str, a: float, node: NodeProto) -> str:
    """(u V + b) sigmoid(a (u V + b)) W = z sigmoid(z) (W / a) with z = u (a V) + a b"""
    user = g.sole_user(node.output[0])
    if g.use_count(x) != 2 or user is None or user.input[0] != node.output[0]:
        raise MatchFailure("its operand or its result has other users")
    if not nd.is_op(user, "MatMul", "Gemm") or nd.attr(user, "transA", 0):
        raise MatchFailure("the user of its result is not a linear layer")
    for layer in (layer_of(g, x)[0], LinearWeights.of(g, user)):
        if not may_copy(g, layer.node.input[1]):
            raise MatchFailure(why_unchanged(g, layer.node))
    return scaled_silu(g, x, a, node)


def scaled_silu(g: Graph, x: str, a: float, node: NodeProto) -> str:
    """x sigmoid(a x) = z sigmoid(z) / a with z = a x"""
    known = g.type(x)
    if known is None:
        raise MatchFailure("its element type is not known")
    z = g.op("Mul", x, scalar(g, a, known.dtype), at=node)
    silu = typed_op(g, known, "Mul", z, g.op("Sigmoid", z, at=node), at=node)
    return g.op("Mul", silu, scalar(g, 1 / a, known.dtype), at=node)
