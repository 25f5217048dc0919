"""Node selection by patterns."""

from __future__ import annotations

from passes.analysis.node_filter import NodeFilter
from tests.checks import model

TEXT = """
g (float[N, 4] x, float[4, 4] w) => (float[N, 4] y) {
  [first] a = MatMul (x, w)
  [second] y = Gemm (a, w)
}
"""


def test_selection_by_operator_name_and_output() -> None:
    first, second = model(TEXT).graph.nodes
    assert NodeFilter().takes(first)
    assert not NodeFilter(exclude=("MatMul",)).takes(first)
    assert NodeFilter(exclude=("MatMul",)).takes(second)
    assert not NodeFilter(exclude=("sec*",)).takes(second)
    assert not NodeFilter(exclude=("y",)).takes(second)
    assert NodeFilter(include=("Gemm",)).takes(second)
    assert not NodeFilter(include=("Gemm",)).takes(first)


def test_patterns_that_no_node_matches() -> None:
    nodes = model(TEXT).graph.nodes
    assert NodeFilter(exclude=("fir*", "firts", "Gemm")).idle(nodes) == ["firts"]
    assert NodeFilter().idle([]) == []
