"""Activations as vectorized operators: the formulas, their limits, and near misses."""

from __future__ import annotations

import numpy as np
import pytest

from passes.lower import activations
from tests.checks import check
from tests.passes.lower.tables import choice, lowered, stays, typed
from toolkit.rewriting.rule import Rules

X = "g (float[N, 4] x) => (float[N, 4] y)"
ONE, TWO, ZERO = (f"Constant <value = float {{{n}}}> ()" for n in ("1.0", "2.0", "0.0"))

MISH = f"""two = {TWO} most = Constant <value = float {{20.0}}> ()
    c = Min (x, most) e = Exp (c) e2 = Add (e, two) n = Mul (e, e2)
    d = Add (n, two) q = Div (n, d) y = Mul (x, q)"""
SOFTPLUS = f"""one = {ONE} a = Abs (x) n = Neg (a) e = Exp (n) p = Add (e, one)
    l = Log (p) r = Relu (x) y = Add (r, l)"""
ELU = f"zero = {ZERO} one = {ONE} n = Min (x, zero) e = Exp (n) m = Sub (e, one) y = Max (x, m)"
QUICK = "k = Constant <value = float {1.702}> () z = Mul (k, x) s = Sigmoid (z) y = Mul (s, x)"
SILU = """k = Constant <value = float {1.702}> () back = Constant <value = float {0.5875440658}> ()
    z = Mul (x, k) s = Sigmoid (z) q = Mul (z, s) y = Mul (q, back)"""

CASES = [
    ("rational", "y = Mish (x)", MISH),
    ("exp", "y = Softplus (x)", SOFTPLUS),
    ("exp", "y = Elu (x)", ELU),
    ("silu", QUICK, SILU),
]


@pytest.mark.parametrize(("name", "before", "after"), CASES)
def test_by_vectorized_operators(name: str, before: str, after: str) -> None:
    lowered(activations.rules, name, X, before, after)


@pytest.mark.parametrize(("name", "before", "after"), CASES)
def test_far_from_zero(name: str, before: str, after: str) -> None:
    far = np.array([[-1e4, -120, -88, -20], [-1e-6, 0, 1e-6, 3], [20, 30, 88, 1e4]], np.float32)
    rules = Rules("test", activations.rules(choice(name)))
    check(rules, typed(f"{X} {{ {before} }}"), inputs={"x": far}, atol=2e-6)


@pytest.mark.parametrize(("name", "before", "after"), CASES)
def test_other_types_stay(name: str, before: str, after: str) -> None:
    wide = X.replace("float", "double")
    stays(activations.rules, name, wide, before.replace("float {", "double {"), run=False)


def test_an_alpha_below_one() -> None:
    alpha = "a = Constant <value = float {0.5}> ()"
    after = ELU.replace("y = Max (x, m)", f"{alpha} t = Mul (m, a) y = Max (x, t)")
    lowered(activations.rules, "exp", X, "y = Elu <alpha = 0.5> (x)", after)


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 1.5])
def test_other_alphas_stay(alpha: float) -> None:
    stays(activations.rules, "exp", X, f"y = Elu <alpha = {alpha}> (x)")


@pytest.mark.parametrize(
    "nodes",
    [
        QUICK.replace("1.702", "1.0"),
        QUICK.replace("1.702", "1.5"),
        QUICK.replace("Sigmoid", "Tanh"),
        QUICK.replace("y = Mul (s, x)", "y = Mul (s, z)"),
        QUICK.replace("y = Mul (s, x)", "t = Add (s, z) y = Mul (t, x)"),
    ],
)
def test_near_misses_of_quick_gelu_stay(nodes: str) -> None:
    stays(activations.rules, "silu", X, nodes)


# -- PRelu

SLOPES = X + " <float[4] slope = {0.1, 0.5, 1, 0.25}>"


def test_slopes_up_to_one() -> None:
    lowered(
        activations.rules,
        "max",
        SLOPES,
        "y = PRelu (x, slope)",
        "m = Mul (x, slope) y = Max (x, m)",
    )


def test_one_slope() -> None:
    for slope in ("float[1] slope = {2}", "float slope = {2}", "float[4] slope = {2, 2, 2, 2}"):
        lowered(
            activations.rules,
            "leaky-relu",
            f"{X} <{slope}>",
            "y = PRelu (x, slope)",
            "y = LeakyRelu <alpha = 2.0> (x)",
        )


@pytest.mark.parametrize("slopes", ["0.1, -0.5, 1, 0", "0.1, 0.5, 1.5, 3", "0, 0.5, 1, 1"])
def test_any_slopes(slopes: str) -> None:
    signature = f"{X} <float[4] slope = {{{slopes}}}>"
    after = f"zero = {ZERO} r = Relu (x) n = Min (x, zero) m = Mul (n, slope) y = Add (r, m)"
    lowered(activations.rules, "relu", signature, "y = PRelu (x, slope)", after)
    stays(activations.rules, "max", signature, "y = PRelu (x, slope)")


@pytest.mark.parametrize("name", ["max", "relu", "leaky-relu"])
def test_slopes_that_are_computed_stay(name: str) -> None:
    signature = "g (float[N, 4] x, float[4] slope) => (float[N, 4] y)"
    stays(activations.rules, name, signature, "y = PRelu (x, slope)")


@pytest.mark.parametrize("name", ["max", "relu", "leaky-relu"])
def test_slopes_of_another_type_stay(name: str) -> None:
    signature = SLOPES.replace("float[", "double[")
    stays(activations.rules, name, signature, "y = PRelu (x, slope)", run=False)
