"""Loops whose number of iterations is known and small are unrolled."""

from __future__ import annotations

import numpy as np
import pytest
from checks import check

from passes.simplify.control_flow.branches import InlineBranches

FED = {"x": np.ones((1, 2), np.float32), "on": np.array(True), "n": np.array(3)}
ADD = "b (int64 i, bool c, float[1, 2] v) => (bool c1, float[1, 2] v1, float[1, 2] v1)"
AGAIN = "c1 = Identity (c)"
COUNT = "k = Cast <to = 1> (i) v1 = Add (v, k)"


def loop(limit: str, condition: str, body: str, results: str = "y, s") -> str:
    return f"""
        g (float[1, 2] x, bool on, int64 n) => (float[1, 2] y, float[m, 1, 2] s)
        <int64 zero = {{0}}, int64 one = {{1}}, int64 three = {{3}}, int64 many = {{40}},
         bool yes = {{1}}, bool no = {{0}}>
        {{ {results} = Loop ({limit}, {condition}, x) <body = {body}> }}"""


@pytest.mark.parametrize("condition", ["yes", ""])
@pytest.mark.parametrize("counter", ["int64 i", "int64[1] i"])
def test_one_iteration_becomes_the_subgraph(condition: str, counter: str) -> None:
    body = f"{ADD.replace('int64 i', counter)} {{ {AGAIN} {COUNT} }}"
    model = check(InlineBranches(), loop("one", condition, body), inputs=FED)
    assert [n.op_type for n in model.graph.nodes if n.op_type != "Identity"] == [
        *("Cast", "Add"),
        "Unsqueeze",
    ]


def test_one_iteration_does_not_need_its_own_condition() -> None:
    body = f"{ADD} {{ z = ReduceSum <keepdims = 0> (v) c1 = Greater (z, z) {COUNT} }}"
    model = check(InlineBranches(), loop("one", "yes", body), inputs=FED)
    assert "Loop" not in [n.op_type for n in model.graph.nodes]


def test_several_iterations_are_concatenated() -> None:
    model = check(
        InlineBranches(), loop("three", "yes", f"{ADD} {{ {AGAIN} {COUNT} }}"), inputs=FED
    )
    kinds = [n.op_type for n in model.graph.nodes]
    assert kinds.count("Add") == 3
    assert kinds.count("Concat") == 1


@pytest.mark.parametrize("limit", ["n", "many", ""])
def test_a_condition_that_turns_false_ends_the_loop(limit: str) -> None:
    body = f"{ADD} {{ c1 = Identity (no) {COUNT} }}".replace("Identity (no)", "Not (c)")
    near = {"": False, "many": False, "n": True}[limit]
    constant = f"{ADD} <bool c1 = {{0}}> {{ {COUNT} }}"
    check(InlineBranches(), loop(limit, "yes", constant), near_miss=near, inputs=FED)
    check(InlineBranches(), loop(limit, "yes", body), near_miss=True, inputs=FED)
    check(InlineBranches(), loop("three", "", constant), near_miss=True, inputs=FED)


@pytest.mark.parametrize(("limit", "condition"), [("zero", "on"), ("n", "no"), ("zero", "")])
def test_without_an_iteration_the_initial_values_remain(limit: str, condition: str) -> None:
    model = check(
        InlineBranches(), loop(limit, condition, f"{ADD} {{ {AGAIN} {COUNT} }}"), inputs=FED
    )
    assert {n.op_type for n in model.graph.nodes} <= {"Identity"}


@pytest.mark.parametrize(
    ("limit", "condition"), [("n", "yes"), ("three", "on"), ("many", "yes"), ("one", "on")]
)
def test_unknown_or_many_iterations_stay(limit: str, condition: str) -> None:
    body = f"{ADD} {{ {AGAIN} {COUNT} }}"
    check(InlineBranches(), loop(limit, condition, body), near_miss=True, inputs=FED)


def test_several_iterations_that_may_end_early_stay() -> None:
    body = f"{ADD} {{ z = ReduceSum <keepdims = 0> (v) c1 = Greater (z, z) {COUNT} }}"
    check(InlineBranches(), loop("three", "yes", body), near_miss=True, inputs=FED)


def test_random_numbers_are_not_drawn_from_copies_of_one_seed() -> None:
    draw = "r = RandomNormalLike <seed = 1.0> (v) v1 = Add (v, r)"
    body = f"{ADD} {{ {AGAIN} {draw} }}"
    check(InlineBranches(), loop("three", "yes", body), near_miss=True, run=False)
    check(InlineBranches(), loop("one", "yes", body), run=False)


def test_rows_of_unknown_size_are_not_written_for_no_iteration() -> None:
    free = ADD.replace("1, 2", "a, b")
    text = loop("zero", "yes", f"{free} {{ {AGAIN} {COUNT} }}").replace("1, 2", "a, b")
    check(InlineBranches(), text, near_miss=True, run=False)


def test_a_loop_in_a_loop_and_a_branch_in_it() -> None:
    inner = """b (int64 i, bool c, float[1, 2] v) => (bool c1, float[1, 2] v1, float[1, 2] v1) {
        c1 = Identity (c)
        first = Equal (i, zero)
        w = If (first) <then_branch = t () => (float[1, 2] p) { p = Neg (v) },
                        else_branch = e () => (float[1, 2] q) { q = Identity (v) }>
        v1 = Loop (one, c, w) <body = d (int64 j, bool f, float[1, 2] a)
            => (bool f1, float[1, 2] a1) { f1 = Identity (f) a1 = Add (a, x) }> }"""
    model = check(InlineBranches(), loop("three", "yes", inner), inputs=FED)
    assert "Loop" not in [n.op_type for n in model.nodes()]


def test_shapes_of_a_branch_decide_the_next_condition() -> None:
    text = """g (float[1, 2] x) => (float[i, j, k] y)
        <bool yes = {1}, int64[1] at = {0}, int64 two = {2}> {
        w = If (yes) <then_branch = t () => (float[1, 1, 2] p) { p = Unsqueeze (x, at) },
                      else_branch = e () => (float[1, 2] q) { q = Identity (x) }>
        dims = Shape (w) rank = Size (dims) flat = Equal (rank, two)
        y = If (flat) <then_branch = t2 () => (float[i, j, k] p2) { p2 = Neg (w) },
                       else_branch = e2 () => (float[i, j, k] q2) { q2 = Abs (w) }> }"""
    model = check(InlineBranches(), text)
    assert [n.op_type for n in model.graph.nodes if n.op_type in ("Abs", "Neg", "If")] == ["Abs"]
