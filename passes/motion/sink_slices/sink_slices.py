"""The pass `rows`."""

from __future__ import annotations

from onnx import NodeProto

from passes.motion.sink_slices.find_slices import SELECTING, joined, read
from passes.motion.sink_slices.partial_linear import part_read_by_rows
from passes.motion.sink_slices.region import Region
from toolkit.ir.graph import Graph
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import RulePass, rewrite


def _selects_few(g: Graph, value: str) -> bool:
    node = g.producer(value)
    return node is not None and read(g, node) is not None


@rewrite(op.any(*SELECTING)(var(), ...).when(_selects_few), opset=13)
def selected_rows(g: Graph, node: NodeProto) -> str:
    """f(x)[rows] = f(x[rows])"""
    selected = read(g, node)
    if selected is None:
        raise MatchFailure
    region = Region(g, joined(g, selected))
    if not region.pays:
        raise MatchFailure(
            "; ".join(["no product is computed for its rows alone", *region.stops[:2]])
        )
    return region.move(node)


RULES = (selected_rows, part_read_by_rows)


class Rows(RulePass):
    """Select rows before they are computed, not after."""

    name = "rows"
    rules = RULES
