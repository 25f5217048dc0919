"""The selection of nodes that compute in float16."""

from __future__ import annotations

import numpy as np
import pytest

from passes.analysis.shapes import Shapes
from passes.precision.half_selection import HalfNodes, select_nodes, unfit
from passes.precision.half_writer import converted
from tests.checks import model
from toolkit.calibrate.statistics import Range
from toolkit.pass_manager.protocol import Context


def selected(nodes: str, **ranges: Range) -> tuple[HalfNodes, list[str]]:
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[4] x) => (float[4] y) <float big = {{100000}}> {{ {nodes} }}"""
    found = model(text)
    Shapes(annotate=False).run(found, Context())
    choice = select_nodes(found, (), ranges or None)
    return choice, [n.op_type for n in found.graph.nodes if id(n) in choice.halves]


def test_a_large_constant_keeps_its_node_and_the_next() -> None:
    choice, halves = selected("a = Relu (x) b = Mul (a, big) c = Neg (b) d = Tanh (c) y = Abs (d)")
    assert halves == ["Relu", "Abs"]
    assert [reason for _, reason in choice.kept] == [
        "a constant beyond 65504",
        "its values may exceed 65504",
        "its values may exceed 65504",
    ]


def test_calibration_ranges_replace_the_estimate() -> None:
    nodes = "a = Exp (x) b = Neg (a) y = Relu (b)"
    assert selected(nodes)[1] == []
    small = {name: Range(-1.0, 1.0) for name in "xaby"}
    assert selected(nodes, **small)[1] == ["Neg", "Relu"]


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ([1.0, -65504.0, np.inf], ""),
        ([1.0, 70000.0], "beyond 65504"),
        ([1e-12], "that underflows in 16 bits"),
        ([1e-12, *[1.0] * 199], ""),
        ([1e-12] * 100, "with too much underflow"),
    ],
)
def test_constants_that_do_not_fit(numbers: list[float], reason: str) -> None:
    assert unfit(np.array(numbers, np.float32)) == reason


def test_conversion_rounds_to_the_nearest() -> None:
    floats = np.linspace(-3, 3, 1001, dtype=np.float32).reshape(7, 11, 13)
    np.testing.assert_array_equal(converted(floats, np.float16), floats.astype(np.float16))
