"""A bias and a Gelu, kept apart by `Sum` where that is faster."""

from __future__ import annotations

import pytest

from passes.lower import bias_gelu
from passes.lower.measure import load
from tests.checks import parse
from tests.passes.lower.tables import HEADER, lowered, stays

BIAS = "<float[4] bias = {1, 2, 3, 4}, float[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>"
ANY = f"g (float[N, S, 4] x) => (float[N, S, 4] y) {BIAS}"
STATIC = f"g (float[2, 3, 4] x) => (float[2, 3, 4] y) {BIAS}"


@pytest.mark.parametrize("gelu", ["Gelu (s)", 'Gelu <approximate = "tanh"> (s)'])
def test_bias_and_gelu_are_kept_apart(gelu: str) -> None:
    lowered(
        bias_gelu.rules,
        "sum",
        ANY,
        f"m = MatMul (x, w) s = Add (bias, m) y = {gelu}",
        f"m = MatMul (x, w) s = Sum (bias, m) y = {gelu}",
    )


@pytest.mark.parametrize(
    ("signature", "nodes"),
    [
        (STATIC, "m = MatMul (x, w) s = Add (m, bias) y = Gelu (s)"),  # becomes a Gemm
        (ANY.replace("[N, S, 4]", "[N, 4]"), "m = MatMul (x, w) s = Add (m, bias) y = Gelu (s)"),
        (ANY, "s = Add (x, x) y = Gelu (s)"),
        (ANY, "s = Mul (x, bias) y = Gelu (s)"),
        (ANY, "s = Add (x, bias) t = Gelu (s) y = Mul (s, t)"),
        (ANY.replace("y) <", "y, float[N, S, 4] s) <"), "s = Add (x, bias) y = Gelu (s)"),
    ],
)
def test_others_stay(signature: str, nodes: str) -> None:
    stays(bias_gelu.rules, "sum", signature, nodes)


def test_other_types_stay() -> None:
    stays(
        bias_gelu.rules,
        "sum",
        "g (double[N, S, 4] x) => (double[N, S, 4] y) <double[4] bias = {1, 2, 3, 4}>",
        "s = Add (x, bias) y = Gelu (s)",
        run=False,
    )


def test_the_runtime_keeps_them_apart() -> None:
    nodes = "m = MatMul (x, w) s = Sum (m, bias) y = Gelu (s)"
    _, operators = load(parse(f"{HEADER}{ANY} {{ {nodes} }}"), threads=1)
    assert operators == ["Gelu", "MatMul", "Sum"]
