"""Scales and zero points: exactly what the formulas say, zero among the numbers, and ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from passes.quantize.schemes.static.range_narrowing import needed_range
from passes.quantize.schemes.static.shared_scales import Ties, qparams_of
from tests.checks import model
from toolkit.calibrate.statistics import Range
from toolkit.errors import UsageError
from toolkit.quantization.number_format import FORMATS, UINT8
from toolkit.quantization.plan import ActivationType, TensorEntry
from toolkit.quantization.qparams import QParams


@pytest.mark.parametrize(
    ("low", "high", "dtype", "symmetric", "scale", "zero"),
    [
        (0.0, 255.0, "uint8", False, 1.0, 0),
        (-1.0, 1.0, "uint8", False, 2 / 255, 127),  # s is rounded up: -1 / s is less than 127.5
        (-128.0, 127.0, "int8", False, 1.0, 0),
        (0.0, 255.0, "int8", False, 1.0, -128),
        (-255.0, 0.0, "uint8", False, 1.0, 255),
        (-2.0, 127.0, "int8", True, 1.0, 0),
        (-127.0, 3.0, "uint8", True, 1.0, 128),
        (3.0, 255.0, "uint8", False, 1.0, 0),  # zero belongs to it
        (-255.0, -9.0, "uint8", False, 1.0, 255),
        (0.0, 0.0, "uint8", False, 1 / 255, 0),  # nothing but zeros
        (0.0, 1e-45, "int8", True, 1 / 127, 0),
    ],
)
def test_parameters_of_a_range(
    low: float, high: float, dtype: ActivationType, symmetric: bool, scale: float, zero: int
) -> None:
    found = QParams.from_range(low, high, FORMATS[dtype], symmetric)
    assert found == QParams.of(scale, zero, FORMATS[dtype])


_NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)


@given(_NUMBERS, _NUMBERS, st.sampled_from(["uint8", "int8"]), st.booleans())
def test_a_range_is_covered_and_zero_is_exact(
    one: float, other: float, dtype: Any, symmetric: bool
) -> None:
    params = QParams.from_range(min(one, other), max(one, other), FORMATS[dtype], symmetric)
    scale = float(params.scale)
    half = scale * 0.5001
    seen = Range.around(min(one, other), max(one, other))
    assert params.low <= seen.low + half
    assert params.high >= seen.high - half
    assert params.quantize(np.zeros(1, np.float32))[0] == params.zero_point
    numbers = np.linspace(max(seen.low, params.low), min(seen.high, params.high), 50)
    back = (
        params.quantize(numbers.astype(np.float32)).astype(np.float64) - params.zero_point
    ) * scale
    assert np.all(np.abs(back - numbers) <= scale * 0.501)


def test_tied_tensors_have_the_range_of_all() -> None:
    entries = [
        TensorEntry("a", low=-1, high=2),
        TensorEntry("b", low=0, high=4),
        TensorEntry("c", low=-9, high=9),
        TensorEntry("d", low=-3, high=1),
    ]
    ties = Ties()
    ties.tie(["a", "b"])
    ties.tie(["d", "a"])
    params = qparams_of(entries, ties)
    assert params["a"] == params["b"] == params["d"] == QParams.from_range(-3, 4)
    assert params["c"] == QParams.from_range(-9, 9)


def test_a_scale_that_is_given_wins() -> None:
    ties = Ties()
    ties.tie(["a", "b"])
    given_ = TensorEntry("b", scale=0.5, zero=3)
    params = qparams_of([TensorEntry("a", low=-1, high=2), given_], ties)
    assert params["a"] == params["b"] == QParams.of(0.5, 3, UINT8)
    with pytest.raises(UsageError, match="'b' and 'a' are tied, but differ in scale"):
        qparams_of([given_, TensorEntry("a", scale=0.25, zero=3)], ties)
    with pytest.raises(UsageError, match="'b' and 'a' are tied, but differ in dtype"):
        qparams_of([given_, TensorEntry("a", "int8", low=0, high=1)], ties)


SEEN = Range(-40.0, 12.0)


@pytest.mark.parametrize(
    ("nodes", "low", "high"),
    [
        ("y = Relu (x)", 0, 12),
        ("y = HardSwish (x)", -3, 12),
        ("y = HardSigmoid <alpha = 0.25, beta = 0.5> (x)", -2, 2),
        ("y = Sigmoid (x)", -np.log(509), np.log(509)),
        ("y = Tanh (x)", -40, 12),
        ("a = Relu (x) b = Tanh (x) y = Add (a, b)", -40, 12),
        ("a = HardSwish (x) b = Relu (x) y = Add (a, b)", -3, 12),
        ("a = Identity (x) y = HardSwish (a)", -3, 12),
        ("a = Identity (x) b = Neg (a) c = HardSwish (a) y = Add (b, c)", -40, 12),
        ("c = Constant <value_floats = [1.0, 2.0]> () a = Add (x, c) y = HardSwish (a)", -5, 12),
        ("c = Constant <value_floats = [-9.0]> () a = Add (c, x) y = Relu (a)", 0, 12),
        ("c = Constant <value_floats = [1.0]> () a = Mul (x, c) y = HardSwish (a)", -40, 12),
        (
            " ".join(f"a{i + 1} = Identity (a{i})" for i in range(9)).replace("a0", "x")
            + " y = Relu (a9)",
            -40,
            12,
        ),
    ],
)
def test_distinguishable_ranges(nodes: str, low: float, high: float) -> None:
    graph = model(f"g (float[N] x) => (float[N] y) {{ {nodes} }}").graph
    found = needed_range(graph, "x", SEEN)
    assert (found.low, found.high) == pytest.approx((low, high))


@pytest.mark.parametrize("nodes", ["s = Sigmoid (x) y = Mul (s, x)", "y = Gelu (x)"])
def test_clipping_before_silu_and_gelu_costs_less_than_half_a_step(nodes: str) -> None:
    graph = model(f"g (float[N] x) => (float[N] y) {{ {nodes} }}").graph
    found = needed_range(graph, "x", SEEN)
    assert -7 < found.low < -2
    assert found.high == 12
    lost = -found.low / (1 + np.exp(-found.low))
    assert lost <= (found.high - found.low) / 255 / 2 or "Gelu" in nodes
    assert needed_range(graph, "x", Range(-1.5, 12)) == Range(-1.5, 12)


def test_operand_that_is_not_moved_keeps_its_range() -> None:
    """A shape that is computed is no value that goes on."""
    text = """g (float[N] x, int64[1] s) => (float[M] y)
              { i = Cast <to = 7> (x) r = Reshape (x, i) y = Relu (r) }"""
    graph = model(text).graph
    assert needed_range(graph, "x", SEEN) == SEEN


def test_graph_output_counts_as_a_user() -> None:
    text = "g (float[N] x) => (float[N] y, float[N] h) { h = Neg (x) y = Relu (h) }"
    assert needed_range(model(text).graph, "h", SEEN) == SEEN
    gated = """g (float[N] x) => (float[N] y, float[N] z)
               { s = Sigmoid (x) y = Mul (s, x) z = Exp (s) }"""
    found = needed_range(model(gated).graph, "x", SEEN)
    assert found.low == pytest.approx(-np.log(509))
