"""Constants are dropped with their last user."""

from __future__ import annotations

import pytest

from passes.quantize.layers.weight_storage import drop_unused
from tests.checks import model

STORED = "float[2] w = {1, 2}, uint8[2] q = {1, 2}, float s = {0.5}, uint8 z = {1}"


def left(nodes: str, value: str, signature: str = "g (float[2] x) => (float[2] y)") -> set[str]:
    """Return the constants, and the operators, that dropping `value` leaves."""
    subject = model(f"{signature} <{STORED}> {{ {nodes} }}")
    drop_unused(subject.graph, value)
    return {*subject.graph.initializers, *(node.op_type for node in subject.graph.nodes)}


def test_an_unused_constant_is_dropped() -> None:
    assert left("y = Relu (x)", "w") == {"q", "s", "z", "Relu"}


def test_a_constant_with_a_user_stays() -> None:
    assert left("y = Add (x, w)", "w") == {"w", "q", "s", "z", "Add"}


def test_a_dequantized_constant_is_dropped_with_its_scale() -> None:
    assert left("d = DequantizeLinear (q, s, z) y = Relu (x)", "d") == {"w", "Relu"}


def test_a_scale_with_another_user_stays() -> None:
    nodes = "d = DequantizeLinear (q, s, z) y = Mul (x, s)"
    assert left(nodes, "d") == {"w", "s", "Mul"}


@pytest.mark.parametrize("value", ["d", "gone"])
def test_outputs_and_unknown_values_stay(value: str) -> None:
    nodes = "d = DequantizeLinear (q, s, z) y = Relu (x)"
    signature = "g (float[2] x) => (float[2] y, float[2] d)"
    assert left(nodes, value, signature) == {"w", "q", "s", "z", "DequantizeLinear", "Relu"}


def test_a_constant_that_a_feed_may_replace_stays() -> None:
    signature = "g (float[2] x, float[2] w) => (float[2] y)"
    assert "w" in left("y = Relu (x)", "w", signature)


def test_a_constant_that_only_a_subgraph_uses_stays() -> None:
    nodes = """y = If (on) <then_branch = t () => (a) { a = Add (x, w) },
                           else_branch = e () => (n) { n = Neg (x) }>"""
    assert "w" in left(nodes, "w", "g (float[2] x, bool on) => (float[2] y)")
