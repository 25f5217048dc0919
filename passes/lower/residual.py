"""LayerNormalization of a residual sum.

The runtime makes Add + LayerNormalization one SkipLayerNormalization when it loads the model, and
that kernel costs several times the two. It does not look for `Sum`, which adds as fast as `Add`.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from passes.lower.cost_query import Choice
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import Rule, rewrite


def rules(choice: Choice) -> tuple[Rule, ...]:
    @rewrite(op.LayerNormalization(op.Add(var("a"), var("b")).named("add"), ...), opset=17)
    def residual_sum(g: Graph, a: str, b: str, add: NodeProto, node: NodeProto) -> str:
        """LayerNormalization(a + b) as LayerNormalization(Sum(a, b)).

        Where the sum is read elsewhere, as in pre-norm blocks, the runtime leaves Add alone, and
        so it does with any rank but 3, an axis but the last, and operands that broadcast.
        """
        total = add.output[0]
        if TensorProto.FLOAT not in (g.dtype(total), g.dtype(node.input[1])):
            raise MatchFailure("the runtime fuses 32-bit floats, and has a Sum for them")
        if g.rank(total) not in (3, None) or nd.attr(node, "axis", -1) not in (-1, 2):
            raise MatchFailure("the runtime fuses sums of rank 3, normalized along the last axis")
        shapes = g.shape(a), g.shape(b)
        if None not in shapes and shapes[0] != shapes[1]:
            raise MatchFailure("the runtime does not fuse a sum that broadcasts")
        choice.require("residual-layernorm", "sum", g, total)
        g.set_op(add, "Sum")
        return node.output[0]

    return (residual_sum,)
