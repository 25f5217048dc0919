"""Replace a Gather of consecutive elements by a Slice, which copies blocks."""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import int_vector, ints
from passes.lower.cost_query import CostQuery
from toolkit.ir import Graph, node as nd
from toolkit.pattern import const, op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import Rule, rewrite


def rules(costs: CostQuery) -> tuple[Rule, ...]:
    @rewrite(op.Gather(var("x"), const("at", rank=1)), opset=10)
    def gather_of_a_range(g: Graph, x: str, at: str, node: NodeProto) -> str:
        """Gather(x, [a, a + 1, ... b]) = Slice(x, a, b + 1)."""
        shape = g.shape(x)
        axes = positive_axes([nd.attr(node, "axis", 0)], g.rank(x))
        indices = ints(g, at)
        if shape is None or axes is None or not indices:
            raise MatchFailure("the axis or the indices are unknown")
        size = shape[axes[0]]
        first, last = indices[0], indices[-1]
        if indices != list(range(first, last + 1)) or (first < 0 <= last):
            raise MatchFailure("the indices are not consecutive")
        if not isinstance(size, int) or not -size <= first <= last < size:
            raise MatchFailure("an index may be out of range; a Slice would not fail")
        if axes[0] != len(shape) - 1 and len(indices) == 1:
            raise MatchFailure("a Gather of one index along an outer axis copies a block already")
        costs.require("half-split", "slice", g, x)
        first, last = first % size, last % size
        return g.op(
            "Slice",
            x,
            *(int_vector(g, [value], "slice") for value in (first, last + 1, axes[0])),
            at=node,
        )

    return (gather_of_a_range,)
