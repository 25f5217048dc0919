"""SiLU between int8 layers as one operator."""

from __future__ import annotations

import pytest

from passes.quantize.schemes.static.ort_fusion_guards import join_silu
from tests.checks import check
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.plan import Entry, Plan

HEADER = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\n'
SIGNATURE = "g (float[N, 4] x) => (float[N, 4] y)"
SILU = f"{HEADER}{SIGNATURE} {{ s = Sigmoid (x) m = Mul (x, s) y = Neg (m) }}"


class Raise:
    """The rewrite as a pass, with a plan."""

    name, tolerance = "raise", None

    def __init__(self, *quantized: str) -> None:
        self.plan = Plan(tuple(Entry(output=o, scheme="static") for o in quantized))

    def run(self, model: Model, ctx: Context) -> None:
        join_silu(model, self.plan)


@pytest.mark.parametrize("factors", ["x, s", "s, x"])
def test_silu_becomes_one_operator_under_its_name(factors: str) -> None:
    text = SILU.replace("x, s", factors)
    changed = check(Raise(), text, f"{HEADER}{SIGNATURE} "
        "{ m = com.microsoft.QuickGelu <alpha = 1.0> (x) y = Neg (m) }")  # fmt: skip
    assert changed.graph.nodes[0].output[0] == "m"


@pytest.mark.parametrize("quantized", ["s", "m"])
def test_integer_operators_are_unchanged(quantized: str) -> None:
    check(Raise(quantized), SILU, near_miss=True)


@pytest.mark.parametrize(
    "nodes",
    [
        "s = Sigmoid (x) m = Mul (s, s) y = Neg (m)",
        "a = Abs (x) s = Sigmoid (a) m = Mul (x, s) y = Neg (m)",
        "s = Tanh (x) m = Mul (x, s) y = Neg (m)",
        "s = Sigmoid (x) m = Add (x, s) y = Neg (m)",
    ],
)
def test_patterns_that_are_not_silu(nodes: str) -> None:
    check(Raise(), f"{HEADER}{SIGNATURE} {{ {nodes} }}", near_miss=True)


def test_gate_with_other_users_stays() -> None:
    text = f"""{HEADER}g (float[N, 4] x) => (float[N, 4] y, float[N, 4] s) {{
        s = Sigmoid (x) y = Mul (x, s)
    }}"""
    changed = check(Raise(), text)
    assert sorted(n.op_type for n in changed.graph.nodes) == ["QuickGelu", "Sigmoid"]


def test_half_precision_weights_stay_float() -> None:
    check(Raise(), SILU.replace("float[", "float16["), near_miss=True)
