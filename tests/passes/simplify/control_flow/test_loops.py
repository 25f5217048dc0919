"""Loop-invariant values are captured instead of carried."""

from __future__ import annotations

import numpy as np
import pytest
from checks import check

from passes.quantize.layers.find_layers import weighted_in
from passes.simplify.control_flow.branches import InlineBranches

FED = {"x": np.ones((1, 2), np.float32), "n": np.array(3), "v": np.ones((2, 2), np.float32)}


def loop(outputs: str, carried: str, body: str, around: str = "", declared: str = "") -> str:
    return f"""
        g (float[1, 2] x, int64 n, float[2, 2] v) => ({declared or "float[1, 2] y"})
        <bool on = {{1}}, float[2, 2] w = {{1, 2, 3, 4}}>
        {{ {outputs} = Loop (n, on, {carried}) <body = {body}> {around} }}"""


ONE = "b (int64 i, bool c, float[1, 2] a) => (bool c1, float[1, 2] a1)"
TWO = "b (int64 i, bool c, float[1, 2] a, float[2, 2] k) => (bool c1, float[1, 2] a1, {})"


@pytest.mark.parametrize("passed", ["k", "k1"])
def test_carried_weights_become_captured_constants(passed: str) -> None:
    by_identity = "k1 = Identity (k)" if passed == "k1" else ""
    before = TWO.format(f"float[2, 2] {passed}")
    steps = "{ c1 = Identity (c) a1 = MatMul (a, K) }"
    model = check(
        InlineBranches(),
        loop("y, u", "x, w", before + steps.replace("K", "k").replace("}", by_identity + "}")),
        loop("y", "x", ONE + steps.replace("K", "w")),
        inputs=FED,
    )
    [layer] = [item.layer for item in weighted_in(model)]
    assert layer is not None, "it can be quantized now"


def test_a_loop_invariant_result_is_the_initial_value() -> None:
    steps = "{ c1 = Identity (c) a1 = MatMul (a, k) }"
    check(
        InlineBranches(),
        loop("s, u", "x, v", TWO.format("float[2, 2] k") + steps, "y = MatMul (s, u)"),
        loop("s", "x", ONE + steps.replace("k", "v"), "y = MatMul (s, v)"),
        inputs=FED,
    )


@pytest.mark.parametrize("initial", ["w", "v"])
def test_an_output_of_the_model_keeps_its_name(initial: str) -> None:
    steps = "{ c1 = Identity (c) a1 = MatMul (a, k) }"
    model = check(
        InlineBranches(),
        loop(
            "y, u",
            f"x, {initial}",
            TWO.format("float[2, 2] k") + steps,
            declared="float[1, 2] y, float[2, 2] u",
        ),
        inputs=FED,
    )
    assert model.graph.outputs == ["y", "u"]


def test_through_a_loop_in_a_loop() -> None:
    inner = """c1 = Identity (c)
        a1, k1 = Loop (n, on, a, k) <body = d (int64 j, bool e, float[1, 2] f, float[2, 2] h)
          => (bool e1, float[1, 2] f1, float[2, 2] h) { e1 = Identity (e) f1 = MatMul (f, h) }>"""
    nested = """c1 = Identity (c)
        a1 = Loop (n, on, a) <body = d (int64 j, bool e, float[1, 2] f)
          => (bool e1, float[1, 2] f1) { e1 = Identity (e) f1 = MatMul (f, w) }>"""
    check(
        InlineBranches(),
        loop("y, u", "x, w", TWO.format("float[2, 2] k1") + f"{{ {inner} }}"),
        loop("y", "x", f"{ONE} {{ {nested} }}"),
        inputs=FED,
    )


@pytest.mark.parametrize(
    "steps",
    [
        "k1 = Neg (k)",
        "k1 = Transpose (k)",
        "k1 = MatMul (k, k)",
    ],
)
def test_a_value_that_changes_stays_carried(steps: str) -> None:
    body = f"{TWO.format('float[2, 2] k1')} {{ c1 = Identity (c) a1 = MatMul (a, k) {steps} }}"
    check(InlineBranches(), loop("y, u", "x, w", body), near_miss=True, inputs=FED)


def test_a_value_that_is_also_a_scan_output_stays_carried() -> None:
    body = """b (int64 i, bool c, float[1, 2] a) => (bool c1, float[1, 2] a, float[1, 2] a)
        { c1 = Identity (c) }"""
    declared = "float[1, 2] y, float[n, 1, 2] z"
    check(InlineBranches(), loop("y, z", "x", body, declared=declared), near_miss=True, inputs=FED)
