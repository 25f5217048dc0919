"""Keep the runtime from fusing a residual sum into a LayerNormalization.

At load time the runtime fuses Add + LayerNormalization to SkipLayerNormalization, whose kernel is
several times as slow. It does not fuse `Sum`, which is as fast as `Add`.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from passes.lower.cost_query import CostQuery
from toolkit.ir import Graph, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import Rule, rewrite


def rules(costs: CostQuery) -> tuple[Rule, ...]:
    @rewrite(op.LayerNormalization(op.Add(var("a"), var("b")).named("add"), ...), opset=17)
    def residual_sum(g: Graph, a: str, b: str, add: NodeProto, node: NodeProto) -> str:
        """LayerNormalization(a + b) as LayerNormalization(Sum(a, b)).

        The runtime fuses only sums of rank 3 without broadcasting and other users (as in pre-norm
        blocks), normalized along the last axis.
        """
        total = add.output[0]
        if TensorProto.FLOAT not in (g.dtype(total), g.dtype(node.input[1])):
            raise MatchFailure("the runtime fuses float32 only")
        if g.rank(total) not in (3, None) or nd.attr(node, "axis", -1) not in (-1, 2):
            raise MatchFailure("the runtime fuses only rank 3, normalized along the last axis")
        shapes = g.shape(a), g.shape(b)
        if None not in shapes and shapes[0] != shapes[1]:
            raise MatchFailure("the runtime does not fuse a sum that broadcasts")
        costs.require("residual-layernorm", "sum", g, total)
        g.set_op(add, "Sum")
        return node.output[0]

    return (residual_sum,)
