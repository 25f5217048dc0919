"""The uses of an input's values: through data movement, offsets and subgraphs."""

from __future__ import annotations

from tests.checks import model
from toolkit.feeds.input_uses import scalar, uses_of


def uses(text, name="x"):
    found = uses_of(model(text).graph, name)
    return [(use.node.op_type, use.slot, use.offset) for use in found]


def test_values_are_followed_through_data_movement():
    text = """g (int64[2,3] x, float[9,4] w) => (float[3,2,4] y)
        { t = Transpose <perm = [1, 0]> (x) y = Gather(w, t) }"""
    assert uses(text) == [("Transpose", 0, 0), ("Gather", 1, 0)]


def test_offsets_are_added_up():
    text = """g (int64[2] x, float[9,4] w) => (float[2,4] y) <int64 one = {1}, int64 two = {2}>
        { a = Add(x, two) b = Sub(a, one) y = Gather(w, b) }"""
    assert uses(text)[-1] == ("Gather", 1, 1)


def test_computed_values_are_not_followed():
    text = "g (float[2] x) => (float[2] y) { e = Exp(x) y = Neg(e) }"
    assert uses(text) == [("Exp", 0, 0)]


def test_subgraphs_are_entered_by_capture():
    text = """g (bool c, float[2] x) => (float[2] y) {
        y = If (c) <
            then_branch = t () => (float[2] p) { p = Sqrt(x) },
            else_branch = e () => (float[2] q) { q = Identity(x) }
        >
    }"""
    assert ("Sqrt", 0, 0) in uses(text)


def test_scalar():
    graph = model(
        "g (float[2] x) => (float[2] y) <float s = {3.5}, float[2] v = {1, 2}> { y = Mul(x, s) }"
    ).graph
    assert scalar(graph, "s") == 3.5
    assert scalar(graph, "v") is None
    assert scalar(graph, "x") is None
    assert scalar(graph, "") is None
