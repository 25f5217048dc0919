"""The constants of linear operators, and how they absorb affine maps."""

from __future__ import annotations

import numpy as np
import pytest

from passes.fuse.linear.affine import Affine
from passes.fuse.linear.consecutive import layer_of
from passes.fuse.linear.weights import LinearWeights
from tests.checks import model
from tests.passes.fuse.constants import floats, typed
from toolkit.ir.graph import Graph
from toolkit.rewriting.rule import MatchFailure

CASES = {
    "Conv <group = 2> (x, w, b)": ("float[N, 4, H] x", [6, 2, 3], 4, 6),
    "ConvTranspose <group = 2> (x, w, b)": ("float[N, 4, H] x", [4, 3, 3], 4, 6),
    "Gemm (x, w, b)": ("float[N, 4] x", [4, 6], 4, 6),
    "Gemm <transB = 1> (x, w, b)": ("float[N, 4] x", [6, 4], 4, 6),
    "MatMul (x, w)": ("float[N, S, 4] x", [4, 6], 4, 6),
}


def graph(call: str) -> Graph:
    declared, shape, _, outputs = CASES[call]
    rank = declared.count(",") + 1
    result = ", ".join(f"y{axis}" for axis in range(rank))
    constants = f"{floats('w', *shape)}, {floats('b', outputs)}"
    return model(typed(f"g ({declared}) => (float[{result}] y)", constants, f"y = {call}")).graph


@pytest.mark.parametrize("call", CASES)
def test_channels_of_every_layout(call: str) -> None:
    g = graph(call)
    weights = LinearWeights.of(g, g.nodes[0])
    assert (weights.inputs.count, weights.outputs.count) == CASES[call][2:]
    assert weights.inputs.axis == (1 if "Conv" in call else weights.rank - 1)


@pytest.mark.parametrize("call", CASES)
def test_a_scale_after_multiplies_each_output(call: str) -> None:
    g = graph(call)
    weights = LinearWeights.of(g, g.nodes[0])
    scale = np.arange(1.0, 7.0)
    factors, bias = weights.after(Affine(scale, np.zeros(())))
    scaled = weights.scaled(g, factors)
    assert scaled is not None
    ratio = np.unique((scaled / weights.stored).round(3))
    np.testing.assert_allclose(ratio, scale)
    np.testing.assert_allclose(bias, weights.bias * scale)


@pytest.mark.parametrize("call", CASES)
def test_a_shift_before_goes_through_the_weights(call: str) -> None:
    """A shift of one channel adds the sum of its weights, in the outputs of its group."""
    g = graph(call)
    weights = LinearWeights.of(g, g.nodes[0])
    shift = np.zeros(4)
    shift[0] = 2.0
    factors, bias = weights.before(Affine(np.ones(()), shift))
    assert factors is None
    grouped = weights.by_group[0]
    first = grouped[:, 0] if weights.is_transposed else grouped[0]
    sums = first.reshape(len(first), -1).sum(axis=1)
    expected = np.zeros(6)
    expected[: len(sums)] = 2 * sums
    np.testing.assert_allclose(bias - weights.bias, expected, atol=1e-6)


def test_a_layer_with_its_bias() -> None:
    text = typed(
        "g (float[N, S, 4] x) => (float[N, S, 6] y)",
        f"{floats('w', 4, 6)}, {floats('b', 6)}",
        "c = MatMul (x, w) y = Add (b, c)",
    )
    g = model(text).graph
    layer, bias = layer_of(g, "y")
    assert layer.node is g.nodes[0]
    np.testing.assert_array_equal(bias, g.const("b"))
    with pytest.raises(MatchFailure, match="not a linear layer"):
        layer_of(g, "x")
