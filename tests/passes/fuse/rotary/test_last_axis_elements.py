"""Elements of the last axis, followed through slices, concatenations, negations and views."""

from __future__ import annotations

import pytest

from passes.analysis.shapes import Shapes
from passes.fuse.rotary.last_axis_elements import elements_of, source_of
from tests.checks import model
from toolkit.ir.graph import Graph
from toolkit.pass_manager.protocol import Context

CONSTANTS = """int64[1] b0 = {0}, int64[1] b1 = {1}, int64[1] b2 = {2}, int64[1] b6 = {6},
    int64[1] last = {3}, int64[1] step = {2}, int64[5] pairs = {0, 0, 0, 3, 2},
    int64[5] halves = {0, 0, 0, 2, 3}, int64 one = {1}, int64[2] sizes = {2, 4},
    int64[1] end = {-1}, int64[1] heads = {1}"""


def graph(nodes: str) -> Graph:
    header = '<ir_version: 10, opset_import: ["" : 23]>'
    text = f"{header} g (float[N, 2, S, 6] x) => (float[] y) <{CONSTANTS}> {{ {nodes} }}"
    found = model(text)
    Shapes(annotate=False).run(found, Context())
    return found.graph


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Slice (x, b1, b6, last, step)", [2, 4, 6]),
        ("p = Reshape (x, pairs) y = Gather <axis = -1> (p, one)", [2, 4, 6]),
        ("p = Reshape (x, halves) y = Gather <axis = 3> (p, one)", [4, 5, 6]),
        ("a, y = Split <axis = 3> (x, sizes)", [3, 4, 5, 6]),
        ("a, b = Split <axis = 3> (x, sizes) n = Neg (a) y = Concat <axis = 3> (b, n)",
         [3, 4, 5, 6, -1, -2]),
        ("a = Slice (x, b0, b2, last) u = Unsqueeze (a, end) y = Squeeze (u, end)", [1, 2]),
    ],
)  # fmt: skip
def test_elements(nodes: str, expected: list[int]) -> None:
    assert elements_of(graph(nodes), "y", "x") == expected


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Slice (x, b0, b1, heads)",
        "y = Gather <axis = 1> (x, sizes)",
        "y = Relu (x)",
        "y = Transpose <perm = [0, 2, 1, 3]> (x)",
        "a = Exp (x) y = Concat <axis = 3> (x, a)",
    ],
)
def test_other_axes_and_operators_are_not_followed(nodes: str) -> None:
    assert elements_of(graph(nodes), "y", "x") is None


def test_the_source_of_two_parts() -> None:
    g = graph("p = Reshape (x, pairs) a = Gather <axis = 4> (p, one) y = Slice (x, b0, b6, last)")
    assert source_of(g, {"a": [2, 4, 6], "x": [1, 3, 5]}) is None
    g = graph("a, b = Split <axis = 3> (x, sizes) y = Add (a, a)")
    assert source_of(g, {"a": [1, 2], "b": [3, 4, 5, 6]}) == "x"
    assert source_of(g, {"b": [1, 2, 3, 4], "a": [5, 6]}) is None
