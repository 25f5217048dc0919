"""Powers with a constant exponent."""

from __future__ import annotations

import numpy as np
import pytest

from passes.lower import powers
from tests.checks import check
from tests.passes.lower.tables import choice, stays, typed
from toolkit.rewriting.rule import Rules

X = "g (float[N, 4] x) => (float[N, 4] y)"


@pytest.mark.parametrize(
    ("exponent", "name", "after"),
    [
        (2, "mul", "y = Mul (x, x)"),
        (3, "mul", "s = Mul (x, x) y = Mul (s, x)"),
        (4, "mul", "s = Mul (x, x) y = Mul (s, s)"),
        (0.5, "sqrt", "y = Sqrt (x)"),
        (-1, "reciprocal", "y = Reciprocal (x)"),
        (-0.5, "sqrt", "s = Sqrt (x) y = Reciprocal (s)"),
    ],
)
def test_powers_by_name(exponent: float, name: str, after: str) -> None:
    positive = {"x": np.array([[0.5, 1, 2, 100]], np.float32)}
    for kind in ("float", "float[1]", "double"):
        nodes = f"e = Constant <value = {kind} {{{exponent}}}> () y = Pow (x, e)"
        rules = Rules("test", powers.rules(choice(name)))
        check(rules, typed(f"{X} {{ {nodes} }}"), after, inputs=positive)
        slower = Rules("test", powers.rules(choice(name, cost=1.2)))
        check(slower, typed(f"{X} {{ {nodes} }}"), near_miss=True, inputs=positive)


@pytest.mark.parametrize(
    "nodes",
    [
        "e = Constant <value = float {5.0}> () y = Pow (x, e)",
        "e = Constant <value = float {2.5}> () y = Pow (x, e)",
        "e = Constant <value = float[4] {2, 2, 3, 2}> () y = Pow (x, e)",
        "e = Constant <value = float {2.0}> () y = Pow (e, x)",
        # parts that the runtime fuses to LayerNormalization or FastGelu
        "e = Constant <value = float {2.0}> () p = Pow (x, e) m = ReduceMean (p) y = Sub (x, m)",
        "e = Constant <value = float {3.0}> () p = Pow (x, e) y = Mul (p, x)",
    ],
)
@pytest.mark.parametrize("name", ["mul", "sqrt"])
def test_others_stay(nodes: str, name: str) -> None:
    stays(powers.rules, name, X, nodes)


def test_an_exponent_that_raises_the_rank_stays() -> None:
    stays(
        powers.rules,
        "mul",
        "g (float[N] x) => (float[1, N] y)",
        "e = Constant <value = float[1, 1] {2}> () y = Pow (x, e)",
    )


@pytest.mark.parametrize("kind", ["int32", "double", "float16"])
def test_other_types_stay(kind: str) -> None:
    nodes = f"e = Constant <value = {kind} {{2}}> () y = Pow (x, e)"
    stays(powers.rules, "mul", X.replace("float", kind), nodes, run=False)
