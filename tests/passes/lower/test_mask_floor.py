"""Masks with a floor: the replacement, and masks where it would change the result."""

from __future__ import annotations

import re

import numpy as np
import pytest

from passes.lower import mask_floor
from tests.checks import check, model, text_of
from tests.passes.lower.mask_cases import (
    CAUSAL,
    HEADS,
    PLAIN,
    QKV,
    SIGNATURE,
    STORED,
    TWO,
    feeds,
    low_at,
)
from tests.passes.lower.tables import HEADER, choice, typed
from toolkit.rewriting.driver import explain
from toolkit.rewriting.rule import Rules

FLOOR = """last = Constant <value = int64[1] {-1}> () depth = Constant <value = float {50.0}> ()
    far = Constant <value = float {-1000.0}> () none = Constant <value = float {-inf}> ()
    top = ReduceMax (m, last) below = Sub (top, depth) whole = Less (top, far)
    low = Where (whole, none, below)"""
FLOORS = Rules("test", mask_floor.rules())
LOW = [-1e4, float(np.finfo(np.float32).min), -np.inf]


# -- replacement


@pytest.mark.parametrize("low", LOW)
def test_one_mask_gets_one_floor(low: float) -> None:
    after = f"{FLOOR} f = Max (m, low) {TWO.replace(', m)', ', f)')}"
    fed = feeds(low_at(CAUSAL, low))
    check(FLOORS, typed(f"{SIGNATURE} {{ {TWO} }}"), after, inputs=fed, atol=1e-6)


@pytest.mark.parametrize("low", LOW)
def test_a_fully_masked_row_stays(low: float) -> None:
    allowed = CAUSAL.copy()
    allowed[1] = False
    check(FLOORS, typed(f"{SIGNATURE} {{ {TWO} }}"), inputs=feeds(low_at(allowed, low)), atol=1e-6)


def test_a_row_that_is_masked_twice_in_parts_stays() -> None:
    """As that of a padding token, which sees padding alone: some of it is masked twice."""
    mask = low_at(CAUSAL, -1e9) + low_at(np.array([0, 0, 1, 1]), -1e9)
    fed = feeds(mask)
    fed["q"] *= 8
    check(FLOORS, typed(f"{SIGNATURE} {{ {TWO} }}"), inputs=fed, atol=1e-6)


def test_biases_beside_what_is_masked_stay() -> None:
    bias = np.random.default_rng(1).uniform(90, 110, (4, 4)).astype(np.float32)
    fed = feeds(bias + low_at(CAUSAL, -1e4))
    check(FLOORS, typed(f"{SIGNATURE} {{ {TWO} }}"), inputs=fed, atol=1e-6)


def test_a_mask_that_is_spread_over_queries_gets_its_floor_before() -> None:
    signature = SIGNATURE.replace("float[4, 4] m", "float[N, 1, 1, 4] m, int64[4] s")
    spread = TWO.replace(", m)", ", e)")
    after = f"{FLOOR} f = Max (m, low) e = Expand (f, s) {spread}"
    before = typed(f"{signature} {{ e = Expand (m, s) {spread} }}")
    fed = feeds(np.array([[[[0, 0, -1e4, -1e4]]], [[[0] * 4]]], np.float32), s=[2, 1, 4, 4])
    check(FLOORS, before, after, inputs=fed | {"s": np.array(fed["s"])}, atol=1e-6)


def test_a_boolean_mask_becomes_numbers() -> None:
    signature = SIGNATURE.replace("float[4, 4] m", "bool[4, 4] b")
    nodes = TWO.replace(", m)", ", b)")
    numbers = f"""zero = Constant <value = float {{0}}> ()
        min = Constant <value = float {{{LOW[1]}}}> () m = Where (b, zero, min)
        {FLOOR} f = Max (m, low) {TWO.replace(", m)", ", f)")}"""
    allowed = CAUSAL.copy()
    allowed[2] = False
    fed = feeds(None, b=allowed)
    del fed["m"]
    check(FLOORS, typed(f"{signature} {{ {nodes} }}"), numbers, inputs=fed, atol=1e-6)


def test_what_is_to_come_becomes_a_mask_for_all_that_are_as_long() -> None:
    signature = PLAIN.replace("N, 4, 8", "N, S, 8").replace("y)", "y, float[N, S, 8] z)")
    causal = TWO.replace("2>", "2, is_causal = 1>").replace(", m)", ")")
    after = f"""depth = Constant <value = float {{50.0}}> () one = Constant <value = int64 {{1}}> ()
        s = Shape <start = 1, end = 2> (q) ss = Concat <axis = 0> (s, s) o = ConstantOfShape (ss)
        f = Sub (o, depth) m = Trilu <upper = 1> (f, one) {TWO}"""
    check(FLOORS, typed(f"{signature} {{ {causal} }}"), after, atol=1e-6)


def test_a_length_that_no_input_has_is_that_of_the_queries() -> None:
    text = """g (float[N, 3, 2, 8] x) => (float[N, 2, T, 8] y, float[N, 2, T, 8] z) {
        q = Resize <mode = "nearest"> (x, , , size) k = Neg (q)
        y = Attention <is_causal = 1> (q, k, q) z = Attention <is_causal = 1> (k, k, q) }"""
    text = text.replace("q = Resize", "turned = Transpose <perm = [0, 2, 1, 3]> (x) q = Resize")
    text = text.replace("(x, , , size)", "(turned, , scales)").replace(
        "z) {", "z) { scales = Constant <value = float[4] {1, 1, 2, 1}> ()"
    )
    changed = check(FLOORS, typed(text), atol=1e-6)
    shapes = [n for n in changed.graph.nodes if n.op_type == "Shape"]
    assert [(n.input[0], [a.i for a in n.attribute]) for n in shapes] == [
        ("q", [2, 3]),
        ("k", [2, 3]),
    ]


def test_a_stored_mask_stays_stored_once() -> None:
    signature = f"{SIGNATURE.replace(', float[4, 4] m', '')} <{STORED}>"
    changed = check(FLOORS, typed(f"{signature} {{ {TWO} }}"), atol=1e-6)
    operators = [node.op_type for node in changed.graph.nodes]
    assert operators == ["ReduceMax", "Less", "Sub", "Where", "Max", "Attention", "Attention"]


def test_a_branch_has_its_own_floor() -> None:
    text = f"""g ({QKV}, float[4, 4] m, bool c) => (float[N, 4, 8] y) {{
        y = If (c) <then_branch = t () => (float[N, 4, 8] a)
            {{ a = Attention <{HEADS}> (q, k, v, m) }},
            else_branch = e () => (float[N, 4, 8] b) {{ b = Neg (q) }}> }}"""
    fed = feeds(low_at(CAUSAL, -1e4), c=np.array(True))
    check(FLOORS, typed(text), inputs=fed, atol=1e-6)


# -- near misses


@pytest.mark.parametrize(
    ("signature", "nodes"),
    [
        (PLAIN, f"y = Attention <{HEADS}> (q, k, v)"),
        (SIGNATURE, f"y = Attention <{HEADS}, softcap = 5.0> (q, k, v, m) z = Neg (y)"),
        (SIGNATURE, f"y = Attention <{HEADS}, is_causal = 1> (q, k, v, m) z = Neg (y)"),
        # there may be more keys than queries
        (
            PLAIN.replace("[N, 4, 8] q", "[N, S, 8] q").replace("[N, 4, 8] y", "[N, S, 8] y"),
            f"y = Attention <{HEADS}, is_causal = 1> (q, k, v)",
        ),
        (
            SIGNATURE.replace("[N, 4, 8] z", "[N, 2, 4, 4] z"),
            f"y, pk, pv, z = Attention <{HEADS}, qk_matmul_output_mode = 1> (q, k, v, m)",
        ),
        (SIGNATURE.replace("float", "float16"), TWO),
        # shallow as it is
        (
            PLAIN + " <float[4, 4] m = {0,-9,0,0, 0,0,0,0, 7,0,0,0, 0,0,-50,0}>",
            f"y = Attention <{HEADS}> (q, k, v, m)",
        ),
        # keys beyond the real ones may be the only ones that are not masked
        (
            SIGNATURE.replace("float[4, 4] m", "float[4, 4] m, int64[N] n"),
            f"y = Attention <{HEADS}> (q, k, v, m, , , n) z = Neg (y)",
        ),
        # a floor of 2 heads for one attention
        (
            SIGNATURE.replace("float[4, 4] m", "float[N, 2, 4, 4] m"),
            f"y = Attention <{HEADS}> (q, k, v, m) z = Neg (y)",
        ),
        (
            PLAIN + " <float[4, 4] m = {nan,-9,0,0, 0,0,0,0, 7,0,0,0, 0,0,-50,0}>",
            f"y = Attention <{HEADS}> (q, k, v, m)",
        ),
        # behind a cache
        (
            f"g ({QKV}, float[N, 2, P, 4] a, float[N, 2, P, 4] b) => (float[N, 4, 8] y)",
            f"y, pk, pv = Attention <{HEADS}, is_causal = 1> (q, k, v, , a, b)",
        ),
    ],
)
def test_other_attention_stays(signature: str, nodes: str) -> None:
    check(FLOORS, typed(f"{signature} {{ {nodes} }}"), near_miss=True, run=False)


def test_where_it_does_not_pay_it_stays() -> None:
    slow = Rules("test", mask_floor.rules(choice("finite", cost=1.0)))
    check(slow, typed(f"{SIGNATURE} {{ {TWO} }}"), near_miss=True, run=False)


def test_one_mask_of_all_heads_for_several_attentions() -> None:
    signature = SIGNATURE.replace("float[4, 4] m", "float[N, 2, 4, 4] m")
    fed = feeds(np.tile(low_at(CAUSAL, -1e4), (2, 2, 1, 1)))
    check(FLOORS, typed(f"{signature} {{ {TWO} }}"), inputs=fed, atol=1e-6)


BIASED = f"g ({QKV}, float[M, 1, 1, 4] m) => (float[N, 4, 8] y, float[N, 4, 8] z)"
TABLE = "float[5, 2] t = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}"
BUCKETS = "int64[4, 4] b = {0,1,2,3, 1,2,3,4, 0,0,1,1, 2,2,3,3}"


def test_a_bias_added_to_the_mask_stays() -> None:
    """As relative positions are written: the part that masks is small, and it gets the floor."""
    low = "float lowest = {-3.4e38}"
    bias = "p = Gather (t, b) h = Transpose <perm = [2, 0, 1]> (p)"
    reads = TWO.replace(", m)", ", c)")
    before = f"{bias} s = Add (m, h) c = Max (s, lowest) {reads}"
    after = f"{bias} {FLOOR} f = Max (m, low) s = Add (f, h) c = Max (s, lowest) {reads}"
    constants = f"<{TABLE}, {BUCKETS}, {low}>"
    fed = feeds(np.array([[[[0, 0, -1e4, -1e4]]], [[[0] * 4]]], np.float32))
    check(
        FLOORS,
        typed(f"{BIASED} {constants} {{ {before} }}"),
        f"{HEADER}{BIASED} {constants} {{ {after} }}",
        inputs=fed,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    "bias",
    [
        TABLE.replace("10}", "100}"),  # masks, maybe
        TABLE.replace("10}", "-inf}"),
    ],
)
def test_what_may_mask_is_no_bias(bias: str) -> None:
    nodes = f"p = Gather (t, b) h = Transpose <perm = [2, 0, 1]> (p) s = Add (m, h) {TWO}"
    text = f"{BIASED} <{bias}, {BUCKETS}> {{ {nodes.replace(', m)', ', s)')} }}"
    fed = feeds(np.array([[[[0, 0, -1e4, -1e4]]], [[[0] * 4]]], np.float32))
    changed = check(FLOORS, typed(text), inputs=fed, atol=1e-6)
    (floor,) = (node for node in changed.graph.nodes if node.op_type == "ReduceMax")
    assert floor.input[0] == "s"


def test_windows_that_are_stored_and_spread() -> None:
    """As in Swin: the same windows for every image, plus a bias per head."""
    bias = "float[2, 4, 4] h = {" + ", ".join(str(i % 5) for i in range(32)) + "}"
    constants = f"<{STORED.replace('[4, 4]', '[1, 1, 1, 4, 4]')}, {bias}>"
    nodes = f"""e = Expand (m, s) v = Reshape (e, r) a = Add (v, h)
        y = Attention <{HEADS}> (q, q, q, a)"""
    signature = "g (float[W, 4, 8] q, int64[5] s, int64[4] r) => (float[W, 4, 8] y)"
    text = typed(f"{signature} {constants} {{ {nodes} }}")
    text = re.sub(r"float\[[^]]*\] v\b", "float[W, 1, 4, 4] v", text)
    fed = {
        "q": np.random.default_rng(0).standard_normal((3, 4, 8)).astype(np.float32),
        "s": np.array([3, 1, 1, 4, 4]),
        "r": np.array([3, 1, 4, 4]),
    }
    changed = check(FLOORS, text, inputs=fed, atol=1e-6)
    (floor,) = (node for node in changed.graph.nodes if node.op_type == "ReduceMax")
    assert floor.input[0] == "m", text_of(changed)


def test_a_view_that_makes_other_rows() -> None:
    signature = SIGNATURE.replace("float[4, 4] m", "float[2, 8] m")
    nodes = f"r = Constant <value = int64[2] {{4, 4}}> () w = Reshape (m, r) {TWO}"
    text = typed(f"{signature} {{ {nodes.replace(', m)', ', w)')} }}")
    fed = feeds(low_at(CAUSAL, -1e4).reshape(2, 8))
    changed = check(FLOORS, text, inputs=fed, atol=1e-6)
    (floor,) = (node for node in changed.graph.nodes if node.op_type == "ReduceMax")
    assert floor.input[0] == "w"


@pytest.mark.parametrize(
    "nodes",
    [
        "o = ReduceMax <keepdims = 0> (m) f = Sub (o, depth) w = Less (o, far)"
        " l = Where (w, none, f) g = Max (m, l)",  # of all rows
        "a = Constant <value = int64[1] {0}> () o = ReduceMax (m, a) f = Sub (o, depth)"
        " w = Less (o, far) l = Where (w, none, f) g = Max (m, l)",
        "o = ReduceMax (m, last) f = Add (o, depth) w = Less (o, far) l = Where (w, none, f)"
        " g = Max (m, l)",
        "f = Sub (m, depth) k1 = Constant <value = int64 {1}> () g = Trilu <upper = 1> (f, k1)",
    ],
)
def test_what_is_no_floor(nodes: str) -> None:
    given = """last = Constant <value = int64[1] {-1}> () depth = Constant <value = float {9}> ()
        far = Constant <value = float {-1000}> () none = Constant <value = float {-inf}> ()"""
    reads = TWO.replace(", m)", ", g)")
    fed = feeds(low_at(CAUSAL, -1e4))
    changed = check(FLOORS, typed(f"{SIGNATURE} {{ {given} {nodes} {reads} }}"), inputs=fed)
    assert sum(node.op_type == "ReduceMax" for node in changed.graph.nodes) >= 1


def test_numbers_of_another_type_are_not_taken_for_these() -> None:
    signature = SIGNATURE.replace("float[4, 4] m", "bool[4, 4] b").replace(
        "z)", "z, double[4, 4] w)"
    )
    stored = f"double zero = {{0}}, double low = {{{LOW[1]}}}"
    nodes = f"w = Where (b, zero, low) {TWO.replace(', m)', ', b)')}"
    fed = feeds(None, b=CAUSAL)
    del fed["m"]
    check(FLOORS, typed(f"{signature} <{stored}> {{ {nodes} }}"), inputs=fed, atol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("(q, k, v)", "no scores are masked"),
        ("(q, k, v, m)", "masked-attention is not faster here as 'finite'"),
    ],
)
def test_the_reason_of_a_match_failure(nodes: str, said: str) -> None:
    text = typed(f"{SIGNATURE} {{ y = Attention <{HEADS}> {nodes} z = Neg (y) }}")
    found = explain(model(text), mask_floor.rules(choice("finite", cost=1.0), only=()))
    assert [miss.reason for miss in found] == [said]
