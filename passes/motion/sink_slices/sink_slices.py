"""The pass `rows`."""

from __future__ import annotations

from onnx import NodeProto

from passes.motion.sink_slices.find_slices import SELECTING, find_slice, merge_entries
from passes.motion.sink_slices.partial_linear import part_with_selected_rows
from passes.motion.sink_slices.region import SlicedRegion
from toolkit.ir.graph import Graph
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import RulePass, rewrite


def _selects_few(g: Graph, value: str) -> bool:
    node = g.producer(value)
    return node is not None and find_slice(g, node) is not None


@rewrite(op.any(*SELECTING)(var(), ...).when(_selects_few), opset=13)
def selected_rows(g: Graph, node: NodeProto) -> str:
    """f(x)[rows] = f(x[rows])"""
    found = find_slice(g, node)
    if found is None:
        raise MatchFailure
    region = SlicedRegion(g, merge_entries(g, found))
    if not region.saves_products:
        raise MatchFailure("; ".join(["no product is saved", *region.obstacles[:2]]))
    return region.move(node)


RULES = (selected_rows, part_with_selected_rows)


class Rows(RulePass):
    """Select rows before they are computed, not after."""

    name = "rows"
    rules = RULES
