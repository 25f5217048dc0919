"""Masks of an attention: conditions that are always true are removed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checks import check
from tests.passes.fuse.attention.test_fuse_attention import Fuse, census, feeds, fused, graph

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


def test_a_condition_that_is_always_true_is_dropped() -> None:
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
    """Fully masked rows have equal weights: the mask stays."""
    text = masked("unused = Not (m) keep = Less (rows, far)")
    _, node = fused(text, FEEDS)
    assert len(node.input) == 4


def test_an_expanded_condition_is_used_without_its_expand() -> None:
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


# -- rows that are masked as a whole

HIGHEST = "3.4028234663852886e+38"
HALF = '<ir_version: 10, opset_import: ["" : 23]>\n'
KEEP = np.tril(np.ones((5, 7), bool))[None, None].repeat(2, axis=0)
KEEP[0, :, 2] = False
SOFTMAX = "p = Softmax <axis = -1> (s2) y = MatMul (p, v)"
SCORES = "qk = MatMul (q, kt) s = Mul (qk, half)"
INVERTED = "n = Not (keep) f = Cast <to = 1> (n)"


@pytest.mark.parametrize(
    "mask",
    [
        "m = Mul (f, high) s2 = Sub (s, m)",
        "h = Mul (f, high) m = Neg (h) s2 = Add (s, m)",
        "h = Where (keep, zero, high) m = Add (h, f) s2 = Sub (s, m)",
    ],
)
def test_the_largest_number_may_be_subtracted(mask: str) -> None:
    """The result is the mean of all values, as for adding the lowest number."""
    body = f"{SCORES} {INVERTED} {mask} {SOFTMAX}"
    text = graph(body, "bool[N, 1, S, T] keep", weights=f", float high = {{{HIGHEST}}}")
    fused(text, feeds(keep=KEEP))


def test_a_mask_input_may_be_subtracted() -> None:
    mask = np.where(KEEP, 0, float(HIGHEST)).astype(np.float32)
    text = graph(f"{SCORES} s2 = Sub (s, m) {SOFTMAX}", "float[N, 1, S, T] m")
    fused(text, feeds(m=mask))


def test_a_guard_takes_minus_infinity_alone_for_masked() -> None:
    """In a mask input, the lowest number results in the mean, and -inf in 0."""
    mask = np.where(KEEP, 0, np.finfo(np.float32).min).astype(np.float32)
    mask[1, :, 3] = -np.inf
    body = f"""{SCORES} s2 = Add (s, m) p0 = Softmax <axis = -1> (s2) n = IsNaN (p0)
        p = Where (n, zero, p0) y = MatMul (p, v)"""
    fused(graph(body, "float[N, 1, S, T] m"), feeds(m=mask))


@pytest.mark.parametrize(
    "mask",
    [
        "a = Where (keep, s, low) s2 = Where (n, a, lower)",
        "a = Where (keep, zero, low) b = Where (n, zero, lower) d = Add (s, a) s2 = Add (d, b)",
    ],
)
def test_of_two_low_numbers_the_higher_one_counts(mask: str) -> None:
    text = graph(
        f"{SCORES} n = Not (keep) {mask} {SOFTMAX}",
        "bool[N, 1, S, T] keep",
        weights=", float low = {-2e38}, float lower = {-3.4e38}",
    )
    fused(text, feeds(keep=KEEP))


@pytest.mark.parametrize("low", [-65504, -1000])
def test_the_lowest_number_of_half_precision_replaces_scores(low: float) -> None:
    bits = int(np.float16(low).view(np.uint16))
    text = f"""{HALF}g (float16[N, 2, S, 4] q, float16[N, 2, 4, T] kt, float16[N, 2, T, 4] v,
        bool[N, 1, S, T] keep) => (float16[N, 2, S, 4] y) <float16 low = {{{bits}}}> {{
        s = MatMul (q, kt) s2 = Where (keep, s, low) {SOFTMAX}
    }}"""
    random = np.random.default_rng(0)
    shapes = {"q": (2, 2, 5, 4), "kt": (2, 2, 4, 7), "v": (2, 2, 7, 4)}
    given = {n: random.standard_normal(s).astype(np.float16) for n, s in shapes.items()}
    given["keep"] = KEEP
    if low == -65504:
        fused(text, given, atol=1e-2)
    else:  # a fully masked row would keep the differences of its scores
        check(Fuse(), text, inputs=given, near_miss=True, atol=1e-2)


LOWEST = "-3.4028234663852886e+38"


@pytest.mark.parametrize("limit", ["Max (s1, low)", "Max (low, s1)", "Clip (s1, low)"])
def test_scores_limited_to_the_lowest_number(limit: str) -> None:
    """The sum of two masks is -inf; with a lower bound it is as low as one mask."""
    mask = "a = Where (keep, zero, low) b = Add (s, a) s1 = Add (b, a)"
    text = graph(
        f"{SCORES} {mask} s2 = {limit} {SOFTMAX}",
        "bool[N, 1, S, T] keep",
        weights=f", float low = {{{LOWEST}}}",
    )
    fused(text, feeds(keep=KEEP))


def test_scores_limited_to_a_number_that_they_reach() -> None:
    body = f"{SCORES} s2 = Max (s, low) {SOFTMAX}"
    check(Fuse(), graph(body, weights=", float low = {-10.0}"), near_miss=True)


def test_scores_limited_before_the_last_bias() -> None:
    body = f"{SCORES} l = Max (s, low) s2 = Add (l, m) {SOFTMAX}"
    text = graph(body, "float[N, 1, S, T] m", weights=f", float low = {{{LOWEST}}}")
    mask = np.where(KEEP, 0, -3).astype(np.float32)
    check(Fuse(), text, near_miss=True, inputs=feeds(m=mask))


def test_the_lowest_number_of_half_precision_is_added_in_full() -> None:
    """onnxruntime keeps the scores of a masked row in bits that half precision lacks."""
    bits = int(np.float16(-65504).view(np.uint16))
    text = f"""{HALF}g (float16[N, 2, S, 4] q, float16[N, 2, 4, T] kt, float16[N, 2, T, 4] v,
        bool[N, 1, S, T] keep) => (float16[N, 2, S, 4] y)
        <float16 low = {{{bits}}}, float16 zero = {{0}}> {{
        s = MatMul (q, kt) m = Where (keep, zero, low) s2 = Add (s, m) {SOFTMAX}
    }}"""
    random = np.random.default_rng(0)
    shapes = {"q": (2, 2, 5, 4), "kt": (2, 2, 4, 7), "v": (2, 2, 7, 4)}
    given = {n: 2 * random.standard_normal(s).astype(np.float16) for n, s in shapes.items()}
    result, _ = fused(text, {**given, "keep": KEEP}, atol=2e-2)
    assert census(result)["Cast"] == 4
    # -inf is the same in all precisions.
    infinite = text.replace(f"{{{bits}}}", f"{{{int(np.float16(-np.inf).view(np.uint16))}}}")
    given["keep"] = np.tril(np.ones((2, 1, 5, 7), bool))
    result, _ = fused(infinite, given, atol=2e-2)
    assert census(result)["Cast"] == 0
