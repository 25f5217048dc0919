"""Keep the runtime from fusing the bias into a Gelu where two nodes are faster.

At load time the runtime fuses Add + Gelu to BiasGelu (FastGelu for the tanh form). On some
processors the two kernels are faster apart on one thread; `Sum` is not fused.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from passes.lower.cost_query import CostQuery
from toolkit.ir import Graph, node as nd
from toolkit.pattern import const, op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import Rule, rewrite


def rules(costs: CostQuery) -> tuple[Rule, ...]:
    @rewrite(op.Gelu(op.Add(var("x"), const("bias", rank=1)).named("add"), ...), opset=20)
    def bias_gelu_apart(g: Graph, x: str, add: NodeProto, node: NodeProto) -> str:
        """Gelu(x + bias) as Gelu(Sum(x, bias)).

        The runtime fuses the bias into a MatMul of known shape first, as a Gemm: faster still.
        """
        total = add.output[0]
        if g.dtype(total) != TensorProto.FLOAT:
            raise MatchFailure("Sum has kernels for float and double only")
        known = g.type(x)
        if nd.is_op(g.producer(x), "MatMul") and (
            known is None or known.static is not None or known.rank == 2
        ):
            raise MatchFailure("the runtime fuses the MatMul and the bias to a Gemm")
        tanh = nd.attr(node, "approximate", "none") == "tanh"
        costs.require("bias-gelu-tanh" if tanh else "bias-gelu", "sum", g, total)
        g.set_op(add, "Sum")
        return node.output[0]

    return (bias_gelu_apart,)
