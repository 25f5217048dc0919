"""Replace powers with a constant exponent, for which the kernel calls `std::pow` per element."""

from __future__ import annotations

from onnx import NodeProto

from passes.lower.cost_query import CostQuery, require_float
from toolkit.ir import Graph, node as nd
from toolkit.pattern import number, op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import Rule, rewrite

_CANDIDATES = {2: "mul", 3: "mul", 4: "mul", 0.5: "sqrt", -1: "reciprocal", -0.5: "sqrt"}


def rules(costs: CostQuery) -> tuple[Rule, ...]:
    @rewrite(op.Pow(var("x"), number("exponent", where=_CANDIDATES.__contains__)), opset=7)
    def pow_by_name(g: Graph, x: str, exponent: float, node: NodeProto) -> str:
        """x^2, x^3, x^4 as products, x^0.5 as Sqrt, x^-1 as Reciprocal, x^-0.5 as both.

        Only (-inf)^0.5 and (-inf)^-0.5 differ: the square root is NaN.
        """
        require_float(g, x)
        if _is_in_runtime_fusion(g, node.output[0], exponent):
            raise MatchFailure("the runtime may fuse it into a norm or a GELU")
        costs.require(f"pow{exponent:g}", _CANDIDATES[exponent], g, x)
        if exponent == -1:
            return g.op("Reciprocal", x, at=node)
        if exponent in (0.5, -0.5):
            root = g.op("Sqrt", x, at=node)
            return root if exponent == 0.5 else g.op("Reciprocal", root, at=node)
        square = g.op("Mul", x, x, at=node)
        if exponent == 2:
            return square
        return g.op("Mul", square, x if exponent == 3 else square, at=node)

    return (pow_by_name,)


def _is_in_runtime_fusion(g: Graph, power: str, exponent: float) -> bool:
    """Whether a power may be the variance of an unfused norm, or the cube of an unfused GELU."""
    if exponent not in (2, 3):
        return False
    fused_with = "ReduceMean" if exponent == 2 else "Mul"
    return any(nd.is_op(user, fused_with) for user in g.users(power))
