"""Adapters for the first opsets: nodes that cannot be converted, and nodes that change little."""

from __future__ import annotations

import pytest

from tests.passes.opset.lifting import lift, model_of

STUCK = {
    "an order that is no integer": (
        1,
        "(float[1,2,4,4] x) => (float[1,2,A,B] y)"
        "{ y = LpPool <p = 2.5, kernel_shape = [2, 2]> (x) }",
        (1, "p=2.5 is not an integer"),
    ),
    "a pool without a kernel": (
        1,
        "(float[1,2,4,4] x) => (float[1,2,A,B] y) { y = LpPool <p = 2.0> (x) }",
        (1, "it has no kernel_shape"),
    ),
    "an unknown element type": (
        1,
        '(float[2] x) => (float[2] y) { y = Cast <to = "DECIMAL"> (x) }',
        (5, "'DECIMAL' is not an element type"),
    ),
    "computed lengths of parts": (
        1,
        "(float[6] x, float[2] lengths) => (float[A] y) { y, z = Split (x, lengths) }",
        (1, "the lengths of the parts are computed"),
    ),
    "computed tiles": (
        1,
        "(float[2,3] x, float t) => (float[2,A] y) <float a = {1.0}> { y = Tile (x, t, a) }",
        (5, "tiles, axis or the rank of the input is not constant"),
    ),
    "a broadcast at an axis of unknown rank": (
        6,
        "(float[2,3] x, float[3] b, int64[M] to) => (float[2,3] y)"
        "{ c = Reshape (b, to) y = Add <broadcast = 1, axis = 0> (x, c) }",
        (6, "axis=0 cannot be converted: the ranks of its inputs are unknown"),
    ),
    "a slope of unknown shape": (
        6,
        "(float[2,3] x, float[3] b, int64[M] to) => (float[2,3] y)"
        "{ s = Reshape (b, to) y = PRelu (x, s) }",
        (6, "the shape of its slope is unknown"),
    ),
    "slopes for an input of unknown rank": (
        6,
        "(float[6] b, float[3] s, int64[M] to) => (float[2,3] y)"
        "{ x = Reshape (b, to) y = PRelu (x, s) }",
        (6, "the rank of its input is unknown"),
    ),
}


@pytest.mark.parametrize("case", STUCK)
def test_a_node_that_cannot_be_converted_ends_the_lift(case: str) -> None:
    opset, text, (reached, reason) = STUCK[case]
    model, notes = lift(model_of(opset, text), 13)
    assert model.opsets[""] == reached
    assert any(reason in note for note in notes), notes
    assert len(model.journal) == 0 or reached > opset


@pytest.mark.parametrize(
    "text",
    [
        "(float[2,3] x, float[3] b) => (float[2,3] y) { y = Add <broadcast = 1, axis = 1> (x, b) }",
        "(float[2,3] x, float[3] b) => (float[2,3] y) { y = Add <broadcast = 1> (x, b) }",
        "(float[2,3] x, float[2,3] b) => (float[2,3] y) { y = Mul <axis = 0> (x, b) }",
        "(float[2,3] x, float[3] b) => (float[2,3] y) { y = PRelu (x, b) }",
        "(float[2,3,4] x, float[1] b) => (float[2,3,4] y) { y = PRelu (x, b) }",
        "(float[2,3,4] x, float[3,4] b) => (float[2,3,4] y) { y = PRelu (x, b) }",
        "(float[M] x, float[3] b) => (float[3] y) { y = PRelu (x, b) }",
    ],
)
def test_operands_that_already_align_are_not_reshaped(text: str) -> None:
    model, _ = lift(model_of(6, text), 9)
    assert model.opsets[""] == 9
    [node] = model.graph.nodes
    assert list(node.input) == ["x", "b"]
    assert not node.attribute
