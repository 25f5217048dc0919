"""Masks of an attention: what a condition depends on is kept, what is true everywhere goes."""

from __future__ import annotations

import numpy as np

from tests.passes.fuse.test_attention import census, fused, graph

MASKED = """qk = MatMul (q, kt) s = Mul (qk, half) sm = Where (keep, s, low)
    p = Softmax <axis = -1> (sm) y = MatMul (p, v)"""
CONSTANTS = """, float low = {-1e38}, int64 one = {1}, int64 nought = {0}, int64[1] first = {0},
    int64[2] both = {1, 2}, int64[3] column = {0, 1, 3}, int64 far = {-5}"""
RANGES = """xs = Shape (x) l = Gather (xs, one) range = Range (nought, l, one)
    rows = Unsqueeze (range, column)"""
MASK = "bool[N, T] m"
FEEDS = {
    "x": np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32),
    "c": np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32),
    "z": np.random.default_rng(2).standard_normal((2, 5, 8)).astype(np.float32),
    "m": np.array([[True, True, True, False, False], [True] * 5]),
}


def masked(condition: str) -> str:
    return graph(f"{RANGES} {condition} {MASKED}", inputs=MASK, weights=CONSTANTS)


def test_a_term_that_is_always_true_is_dropped() -> None:
    text = masked("u = Unsqueeze (m, both) t = GreaterOrEqual (rows, nought) keep = And (t, u)")
    result, node = fused(text, FEEDS)
    assert not census(result).keys() & {"And", "GreaterOrEqual", "Range"}
    assert len(node.input) == 4


def test_a_condition_that_is_always_true_is_no_mask() -> None:
    text = masked("unused = Not (m) keep = Greater (rows, far)")
    result, node = fused(text, FEEDS)
    assert len(node.input) == 3
    assert "Where" not in census(result)


def test_a_term_that_may_be_false_stays() -> None:
    text = masked("u = Unsqueeze (m, both) t = Greater (rows, nought) keep = And (t, u)")
    result, node = fused(text, FEEDS)
    assert census(result)["And"] == 1
    assert len(node.input) == 4


def test_a_condition_that_is_always_false_masks_everything() -> None:
    """Rows that are masked as a whole attend to everything alike: the mask stays."""
    text = masked("unused = Not (m) keep = Less (rows, far)")
    _, node = fused(text, FEEDS)
    assert len(node.input) == 4


def test_an_expanded_condition_is_read_before_it_was_expanded() -> None:
    condition = """u = Unsqueeze (m, both) ls = Unsqueeze (l, first) ts = Shape (c)
        ones = Slice (heads, first, first) n = Shape <start = 0, end = 1> (x)
        t = Shape <start = 1, end = 2> (c) o = Shape (half4)
        to = Concat <axis = 0> (n, o, ls, t) keep = Expand (u, to)"""
    condition = condition.replace("ones = Slice (heads, first, first) ", "")
    text = masked(condition).replace("float low", "float[1] half4 = {1}, float low")
    result, node = fused(text, FEEDS)
    where = [n for n in result.graph.nodes if n.op_type == "Where"]
    assert len(where) == 1
    assert result.graph.shape(where[0].input[0])[2] == 1  # pyright: ignore[reportOptionalSubscript]
    assert len(node.input) == 4
