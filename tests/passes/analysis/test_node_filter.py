"""Node selection by patterns."""

from __future__ import annotations

from passes.analysis.node_filter import Selection
from tests.checks import model

TEXT = """
g (float[N, 4] x, float[4, 4] w) => (float[N, 4] y) {
  [first] a = MatMul (x, w)
  [second] y = Gemm (a, w)
}
"""


def test_selection_by_operator_name_and_output() -> None:
    first, second = model(TEXT).graph.nodes
    assert Selection().takes(first)
    assert not Selection(exclude=("MatMul",)).takes(first)
    assert Selection(exclude=("MatMul",)).takes(second)
    assert not Selection(exclude=("sec*",)).takes(second)
    assert not Selection(exclude=("y",)).takes(second)
    assert Selection(include=("Gemm",)).takes(second)
    assert not Selection(include=("Gemm",)).takes(first)


def test_patterns_that_no_node_matches() -> None:
    nodes = model(TEXT).graph.nodes
    assert Selection(exclude=("fir*", "firts", "Gemm")).idle(nodes) == ["firts"]
    assert Selection().idle([]) == []
