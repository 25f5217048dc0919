"""Powers with a constant exponent, which the runtime computes one by one with `std::pow`."""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from passes.lower.cost_query import Choice
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.pattern import number, op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import Rule, rewrite

_SPELLINGS = {2: "mul", 3: "mul", 4: "mul", 0.5: "sqrt", -1: "reciprocal", -0.5: "sqrt"}


def rules(choice: Choice) -> tuple[Rule, ...]:
    @rewrite(op.Pow(var("x"), number("exponent", where=_SPELLINGS.__contains__)), opset=7)
    def pow_by_name(g: Graph, x: str, exponent: float, node: NodeProto) -> str:
        """x^2, x^3, x^4 as products, x^0.5 as Sqrt, x^-1 as Reciprocal, x^-0.5 as both.

        Only -inf^0.5 and -inf^-0.5 differ, where a square root is not a number.
        """
        if g.dtype(x) != TensorProto.FLOAT:
            raise MatchFailure("its costs are known for 32-bit floats alone")
        if _runtime_looks_for_it(g, node.output[0], exponent):
            raise MatchFailure("the runtime fuses what this is a part of, and looks for a Pow")
        choice.require(f"pow{exponent:g}", _SPELLINGS[exponent], g, x)
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


def _runtime_looks_for_it(g: Graph, power: str, exponent: float) -> bool:
    """A variance that was not raised to a norm, or the cube in a tanh GELU that was not."""
    readers = g.users(power)
    if exponent == 2:
        return any(nd.is_op(reader, "ReduceMean") for reader in readers)
    return exponent == 3 and any(nd.is_op(reader, "Mul") for reader in readers)
