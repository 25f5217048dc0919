"""`sink_expand`: computing before values are repeated, and near misses."""

from __future__ import annotations

import numpy as np
import pytest

from passes.analysis.shapes import Shapes
from passes.motion import sink_expand
from passes.simplify.dce import RemoveDead
from tests import ort
from tests.checks import check, parse
from tests.passes.lower.tables import HEADER, typed
from toolkit.ir.model import Model
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.rewriting.rule import Rules

RULES = Rules("test", sink_expand.RULES)
SIZES = "s = Constant <value_ints = [1, 1, 16]> ()"
FEATURES = f"{SIZES} e = Expand (x, s)"
X = "g (float[N, 7, 1] x) => (float[N, 7, 16] y)"


def gone(signature: str, nodes: str, after: str) -> None:
    check(RULES, typed(f"{signature} {{ {nodes} }}"), f"{HEADER}{signature} {{ {after} }}")


def kept(signature: str, nodes: str, run: bool = True) -> None:
    check(RULES, typed(f"{signature} {{ {nodes} }}"), near_miss=True, run=run)


# -- one element at a time


@pytest.mark.parametrize("step", ["Sqrt ({})", "Clip ({}, low)", "Clip ({}, , low)", "Neg ({})"])
def test_elementwise(step: str) -> None:
    low = "low = Constant <value = float {0.5}> ()"
    nodes = f"{low} {FEATURES} y = {step.format('e')}"
    after = f"{low} {SIZES} f = {step.format('x')} y = Expand (f, s)"
    inputs = {"x": np.random.default_rng(0).random((2, 7, 1), np.float32)}
    before, wanted = typed(f"{X} {{ {nodes} }}"), f"{HEADER}{X} {{ {after} }}"
    check(RULES, before, wanted, inputs=inputs)


def test_a_cast_keeps_its_type() -> None:
    signature = "g (int64[N, 7, 1] x) => (float[N, 7, 16] y)"
    gone(
        signature,
        f"{FEATURES} y = Cast <to = 1> (e)",
        f"{SIZES} f = Cast <to = 1> (x) y = Expand (f, s)",
    )


def test_an_expand_with_other_users_stays() -> None:
    kept(X.replace("y)", "y, float[N, 7, 16] e)"), f"{FEATURES} y = Sqrt (e)", run=False)
    kept(X.replace("y)", "y, float[N, 7, 16] z)"), f"{FEATURES} y = Neg (e) z = Cos (e)")


def test_other_operators_than_expand_stay() -> None:
    kept(X, "r = Constant <value_ints = [1, 1, 16]> () e = Tile (x, r) y = Neg (e)")


# -- reductions


@pytest.mark.parametrize("kind", ["Sum", "Mean", "Max", "Min", "L2"])
def test_a_reduction_along_another_axis(kind: str) -> None:
    signature = "g (float[N, 7, 1] x) => (float[N, 16] y)"
    axes = "a = Constant <value_ints = [1]> ()"
    gone(
        signature,
        f"{axes} {FEATURES} y = Reduce{kind} <keepdims = 0> (e, a)",
        f"{axes} {SIZES} f = Reduce{kind} <keepdims = 0> (x, a) "
        "k = Constant <value_ints = [0, 2]> () t = Gather <axis = 0> (s, k) y = Expand (f, t)",
    )


def test_a_reduction_that_keeps_its_axes() -> None:
    signature = "g (float[N, 7, 1] x) => (float[1, 7, 16] y)"
    axes = "a = Constant <value_ints = [-3]> ()"
    ones = "o = Constant <value = bool[3] {1, 0, 0}> () i = Constant <value_ints = [1]> ()"
    gone(
        signature,
        f"{axes} {FEATURES} y = ReduceSum (e, a)",
        f"{axes} {SIZES} f = ReduceSum (x, a) {ones} t = Where (o, i, s) y = Expand (f, t)",
    )


SUM = "y = ReduceSum <keepdims = 0> (e, a)"


@pytest.mark.parametrize(
    ("signature", "nodes"),
    [
        pytest.param(
            "g (float[N, 7, 1] x) => (float[N, 7] y)",
            f"a = Constant <value_ints = [2]> () {FEATURES} {SUM}",
            id="the axis that is repeated",
        ),
        pytest.param(
            "g (float[N, 7, 1] x) => (float[N] y)",
            f"a = Constant <value_ints = [1, 2]> () {FEATURES} {SUM}",
            id="that axis among others",
        ),
        pytest.param(
            "g (float[N, 7, 1] x) => (float y)",
            f"{FEATURES} y = ReduceSum <keepdims = 0> (e)",
            id="all axes",
        ),
        pytest.param(
            "g (float[7, 1] x) => (float[3, 16] y)",
            "a = Constant <value_ints = [1]> () s = Constant <value_ints = [3, 7, 16]> () "
            f"e = Expand (x, s) {SUM}",
            id="an Expand that adds axes",
        ),
        pytest.param(
            "g (float[N, S, 1] x, int64[3] s) => (float[A, B] y)",
            f"a = Constant <value_ints = [1]> () e = Expand (x, s) {SUM}",
            id="sizes that only the run knows",
        ),
        pytest.param(
            "g (float[N, 7, 1] x, int64[1] a) => (float[A, B] y)",
            f"{FEATURES} {SUM}",
            id="axes that only the run knows",
        ),
    ],
)
def test_reductions_that_stay(signature: str, nodes: str) -> None:
    kept(signature, nodes, run=False)


# -- all of it


def test_tokens_that_are_averaged() -> None:
    """As sentence-transformers writes it: the mask is never as large as the tokens."""
    text = f"""{HEADER}g (float[N, S, 16] x, int64[N, S] m) => (float[N, 16] y) {{
        a = Constant <value_ints = [1]> () l = Constant <value_ints = [-1]> ()
        tiny = Constant <value = float {{1e-9}}> () u = Unsqueeze (m, l) s = Shape (x)
        e = Expand (u, s) f = Cast <to = 1> (e) w = Mul (x, f)
        t = ReduceSum <keepdims = 0> (w, a) c = ReduceSum <keepdims = 0> (f, a)
        d = Clip (c, tiny) y = Div (t, d) }}"""
    subject = Model.from_proto(parse(text))
    Pipeline([Shapes(annotate=False), RULES, RemoveDead()]).run(subject)
    made = [node.op_type for node in subject.graph.nodes if node.op_type != "Constant"]
    assert made == ["Unsqueeze", "Cast", "Mul", "ReduceSum", "ReduceSum", "Clip", "Div"]
    rng = np.random.default_rng(0)
    for count, length in ((2, 5), (1, 1), (1, 3), (0, 4)):
        feed = {
            "x": rng.standard_normal((count, length, 16)).astype(np.float32),
            "m": rng.integers(0, 2, (count, length)),
        }
        wanted, found = (ort.run(m, feed)[0] for m in (parse(text), subject.to_proto()))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
