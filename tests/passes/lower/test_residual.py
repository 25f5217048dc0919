"""Residual sums before a LayerNormalization: `Sum` where the runtime would fuse an `Add`."""

from __future__ import annotations

import pytest

from passes.lower import residual
from passes.lower.measure import load
from tests.checks import parse
from tests.passes.lower.tables import HEADER, lowered, stays

WEIGHTS = "float[8] w, float[8] b"
NORM = "LayerNormalization <axis = -1> (s, w, b)"


def signature(
    a: str = "N, S, 8", b: str = "N, S, 8", y: str = "N, S, 8", kind: str = "float"
) -> str:
    weights = WEIGHTS.replace("float", kind)
    return f"g ({kind}[{a}] x, {kind}[{b}] r, {weights}) => ({kind}[{y}] y)"


def gone(signature: str, nodes: str, after: str) -> None:
    lowered(residual.rules, "sum", signature, nodes, after)


def kept(signature: str, nodes: str, run: bool = True) -> None:
    stays(residual.rules, "sum", signature, nodes, run)


@pytest.mark.parametrize("axis", [-1, 2])
def test_a_residual_becomes_a_sum(axis: int) -> None:
    norm = NORM.replace("-1", str(axis))
    gone(signature(), f"s = Add (x, r) y = {norm}", f"s = Sum (x, r) y = {norm}")


def test_without_a_bias_and_with_an_epsilon() -> None:
    norm = "y = LayerNormalization <axis = -1, epsilon = 0.001> (s, w)"
    gone(signature(), f"s = Add (x, r) {norm}", f"s = Sum (x, r) {norm}")


def test_the_bias_of_a_linear_layer_stays_with_it() -> None:
    gone(
        signature(),
        f"a = Add (x, b) s = Add (a, r) y = {NORM}",
        f"a = Add (x, b) s = Sum (a, r) y = {NORM}",
    )


def test_a_sum_with_other_users_stays() -> None:
    kept(signature(), f"s = Add (x, r) n = {NORM} y = Mul (n, s)")


def test_a_sum_that_is_an_output_stays() -> None:
    outputs = signature().replace(" y)", " y, float[N, S, 8] s)")
    kept(outputs, f"s = Add (x, r) y = {NORM}")


def test_a_sum_that_a_subgraph_captures_stays() -> None:
    inputs = signature().replace("g (", "g (bool c, ").replace(" y)", " y, float[N, S, 8] z)")
    branches = "then_branch = t () => (float[N, S, 8] p) { p = Neg (s) }"
    branches += ", else_branch = e () => (float[N, S, 8] q) { q = Abs (s) }"
    kept(inputs, f"s = Add (x, r) y = {NORM} z = If (c) <{branches}>")


@pytest.mark.parametrize("shape", ["N, 8", "N, 2, S, 8"])
def test_ranks_that_the_runtime_does_not_fuse_stay(shape: str) -> None:
    kept(signature(shape, shape, shape), f"s = Add (x, r) y = {NORM}")


@pytest.mark.parametrize("other", ["1, S, 8", "S, 8", "8", "N, 1, 8"])
def test_operands_that_broadcast_stay(other: str) -> None:
    kept(signature(b=other), f"s = Add (x, r) y = {NORM}")


def test_a_norm_over_two_axes_stays() -> None:
    inputs = "g (float[N, 2, 4] x, float[N, 2, 4] r, float[2, 4] w) => (float[N, 2, 4] y)"
    kept(inputs, "s = Add (x, r) y = LayerNormalization <axis = 1> (s, w)")


@pytest.mark.parametrize("kind", ["float16", "double"])
def test_other_types_stay(kind: str) -> None:
    kept(signature(kind=kind), f"s = Add (x, r) y = {NORM}", run=False)


def test_an_rms_norm_stays() -> None:
    kept(signature(), "s = Add (x, r) y = RMSNormalization <axis = -1> (s, w)")


def test_a_difference_stays() -> None:
    kept(signature(), f"s = Sub (x, r) y = {NORM}")


# -- what the runtime executes

STATIC = signature("2, 3, 8", "2, 3, 8", "2, 3, 8")


@pytest.mark.parametrize(
    ("inputs", "nodes", "runs"),
    [
        (signature(), f"s = Sum (x, r) y = {NORM}", ["LayerNormalization", "Sum"]),
        (STATIC, f"s = Sum (x, r) y = {NORM}", ["LayerNormalization", "Sum"]),
        (STATIC, f"s = Add (x, r) n = {NORM} y = Mul (n, s)", ["Add", "LayerNormalization", "Mul"]),
    ],
)
def test_the_runtime_does_not_fuse_it(inputs: str, nodes: str, runs: list[str]) -> None:
    _, operators = load(parse(f"{HEADER}{inputs} {{ {nodes} }}"), threads=1)
    assert operators == runs
