"""Gelu of a biased value: one BiasGelu, or the two apart.

The runtime makes Add + Gelu one BiasGelu (FastGelu for the tanh form) when it loads the model. On
some processors the two apart are faster on one thread; `Sum` keeps them apart.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from passes.lower.cost_query import Choice
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.pattern import const, op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import Rule, rewrite


def rules(choice: Choice) -> tuple[Rule, ...]:
    @rewrite(op.Gelu(op.Add(var("x"), const("bias", rank=1)).named("add"), ...), opset=20)
    def bias_gelu_apart(g: Graph, x: str, add: NodeProto, node: NodeProto) -> str:
        """Gelu(x + bias) as Gelu(Sum(x, bias)).

        A MatMul of known shape takes the bias in, as a Gemm, before anybody sees the Gelu: that
        is better still.
        """
        total = add.output[0]
        if g.dtype(total) != TensorProto.FLOAT:
            raise MatchFailure("Sum has a kernel for float and double alone")
        known = g.type(x)
        if nd.is_op(g.producer(x), "MatMul") and (
            known is None or known.static is not None or known.rank == 2
        ):
            raise MatchFailure("the runtime makes a Gemm of the MatMul and the bias")
        tanh = nd.attr(node, "approximate", "none") == "tanh"
        choice.require("bias-gelu-tanh" if tanh else "bias-gelu", "sum", g, total)
        g.set_op(add, "Sum")
        return node.output[0]

    return (bias_gelu_apart,)
