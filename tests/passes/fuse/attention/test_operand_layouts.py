"""Attention on unusual layouts: two axes of heads, channels first, no batch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checks import check
from tests.passes.fuse.attention.test_fuse_attention import HEADER, Fuse, attributes, census, fused

SOFTMAX = "s = Mul (qk, half) p = Softmax <axis = -1> (s)"


def five(key: str = "N, 2, 1, T, 4", body: str = "", inputs: str = "") -> str:
    """Grouped queries [N, 2, 3, S, 4], computed from tokens."""
    return f"""{HEADER}g (float[N, S, 24] x, float[{key}] k, float[{key}] v{inputs})
        => (float[N, 2, 3, S, 4] y)
        <int64[5] groups = {{0, 0, 2, 3, 4}}, float half = {{0.5}}> {{
        x5 = Reshape (x, groups) q = Transpose <perm = [0, 2, 3, 1, 4]> (x5)
        kt = Transpose <perm = [0, 1, 2, 4, 3]> (k) qk = MatMul (q, kt)
        {body or SOFTMAX} y = MatMul (p, v)
    }}"""


@pytest.mark.parametrize("key", ["N, 2, 1, T, 4", "N, 2, 3, T, 4", "N, 1, 1, T, 4"])
def test_heads_along_two_axes(key: str) -> None:
    fused(five(key))


def test_grouped_queries_of_tokens() -> None:
    """Keys are tokens, too: the operator uses both directly."""
    text = five().replace("float[N, 2, 1, T, 4] k", "float[N, T, 8] c")
    text = text.replace("float[N, 2, 1, T, 4] v", "float[N, T, 8] z").replace(
        "kt =",
        """c5 = Reshape (c, ones) k = Transpose <perm = [0, 2, 3, 1, 4]> (c5)
        z5 = Reshape (z, ones) v = Transpose <perm = [0, 2, 3, 1, 4]> (z5) kt =""",
    )
    text = text.replace("float half", "int64[5] ones = {0, 0, 2, 1, 4}, float half")
    _, node = fused(text)
    assert list(node.input) == ["x", "c", "z"]
    assert attributes(node) == {"scale": 0.5, "q_num_heads": 6, "kv_num_heads": 2}


def test_a_mask_for_all_groups() -> None:
    body = "s = Add (qk, m) p = Softmax <axis = -1> (s)"
    fused(five(body=body, inputs=", float[S, T] m"))


@pytest.mark.parametrize(
    ("key", "mask"),
    [("N, 1, 3, T, 4", ""), ("N, 2, 1, T, 4", "float[N, 1, 1, 1, T] m")],
    ids=["keys for each place in a group", "a mask for each of a batch"],
)
def test_groups_in_another_order_than_the_operator_stay(key: str, mask: str) -> None:
    body = "s = Add (qk, m) p = Softmax <axis = -1> (s)" if mask else ""
    check(Fuse(), five(key, body, f", {mask}" if mask else ""), near_miss=True)


TURNED = f"""{HEADER}g (float[N, 4, S] q, float[N, 4, S] k, float[N, 6, S] v) => (float[N, 6, S] y)
    <float half = {{0.5}}> {{
    qt = Transpose <perm = [0, 2, 1]> (q) qk = MatMul (qt, k) {SOFTMAX}
    pt = Transpose <perm = [0, 2, 1]> (p) y = MatMul (v, pt)
}}"""


def test_tokens_along_the_last_axis() -> None:
    """A key that is transposed already, and values as the first operand."""
    result, node = fused(TURNED)
    assert attributes(node)["q_num_heads"] == 1
    assert census(result) == {"Transpose": 4, "Attention": 1}


def test_other_transposes_of_probabilities_stay() -> None:
    text = TURNED.replace("pt = Transpose <perm = [0, 2, 1]> (p)", "pt = Identity (p)")
    check(Fuse(), text, near_miss=True)
    text = TURNED.replace("[N, ", "[S, ").replace(
        "pt = Transpose <perm = [0, 2, 1]> (p)", "pt = Transpose <perm = [1, 2, 0]> (p)"
    )
    check(Fuse(), text, near_miss=True)


def test_heads_of_channels() -> None:
    """[batch, heads * size, pixels], as after a convolution, with split heads."""
    text = f"""{HEADER}g (float[N, 8, 9] q, float[N, 8, 9] k, float[N, 8, 9] v)
        => (float[N, 2, 9, 4] y) <int64[4] heads = {{0, 2, 4, 9}}, float half = {{0.5}}> {{
        q4 = Reshape (q, heads) k4 = Reshape (k, heads) v4 = Reshape (v, heads)
        qt = Transpose <perm = [0, 1, 3, 2]> (q4) vt = Transpose <perm = [0, 1, 3, 2]> (v4)
        qk = MatMul (qt, k4) {SOFTMAX} y = MatMul (p, vt)
    }}"""
    _, node = fused(text)
    assert attributes(node) == {"scale": 0.5, "q_num_heads": 2, "kv_num_heads": 2}


def test_a_single_sequence() -> None:
    text = f"""{HEADER}g (float[S, 8] x, float[T, 8] c, float[T, 8] z) => (float[2, S, 4] y)
        <int64[3] heads = {{0, 2, 4}}, float half = {{0.5}}> {{
        x3 = Reshape (x, heads) q = Transpose <perm = [1, 0, 2]> (x3)
        c3 = Reshape (c, heads) kt = Transpose <perm = [1, 2, 0]> (c3)
        z3 = Reshape (z, heads) v = Transpose <perm = [1, 0, 2]> (z3)
        qk = MatMul (q, kt) {SOFTMAX} y = MatMul (p, v)
    }}"""
    result, node = fused(text)
    assert attributes(node) == {"scale": 0.5, "q_num_heads": 2, "kv_num_heads": 2}
    assert census(result)["Transpose"] == 1


@pytest.mark.parametrize("masked", [False, True])
def test_one_query_for_the_whole_batch(masked: bool) -> None:
    text = f"""{HEADER}g (float[1, 2, 3, 4] q, float[N, 2, T, 4] k, float[N, 2, T, 4] v,
        bool[N, 1, 1, T] keep) => (float[N, 2, 3, 4] y)
        <float half = {{0.5}}, float low = {{-1e38}}> {{
        kt = Transpose <perm = [0, 1, 3, 2]> (k) qk = MatMul (q, kt) {SOFTMAX}
        y = MatMul (p, v)
    }}"""
    given = {
        name: np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        for name, shape in {"q": (1, 2, 3, 4), "k": (3, 2, 5, 4), "v": (3, 2, 5, 4)}.items()
    }
    given["keep"] = np.tril(np.ones((3, 1, 1, 5), bool), 2)
    if masked:
        text = text.replace(
            "p = Softmax <axis = -1> (s)", "w = Where (keep, s, low) p = Softmax (w)"
        )
    result, _ = fused(text, given)
    assert census(result)["Expand"] == 1 + masked


def test_one_head_of_the_query_for_all_keys_is_a_near_miss() -> None:
    text = f"""{HEADER}g (float[1, 1, 3, 4] q, float[N, 2, T, 4] k, float[N, 2, T, 4] v)
        => (float[N, 2, 3, 4] y) <float half = {{0.5}}> {{
        kt = Transpose <perm = [0, 1, 3, 2]> (k) qk = MatMul (q, kt) {SOFTMAX}
        y = MatMul (p, v)
    }}"""
    check(Fuse(), text, near_miss=True)


# -- a bias in another shape of the scores

ROWS = f"""{HEADER}g (float[N, 6, 4] q, float[N, 6, 4] k, float[N, 6, 4] v, float[N, 2, 3, 2] r,
    float[N, 2, 3, 3] c) => (float[N, 6, 4] y)
    <int64[5] pixels = {{-1, 2, 3, 2, 3}}, int64[3] flat = {{-1, 6, 6}}, int64[1] four = {{4}},
     int64[1] three = {{3}}> {{
    kt = Transpose <perm = [0, 2, 1]> (k) qk = MatMul (q, kt) s5 = Reshape (qk, pixels)
    r5 = Unsqueeze (r, four) c5 = Unsqueeze (c, three) BIAS
    s = Reshape (b5, flat) p = Softmax <axis = -1> (s) y = MatMul (p, v)
}}"""


def test_terms_for_rows_and_columns() -> None:
    fused(ROWS.replace("BIAS", "a5 = Add (s5, r5) b5 = Add (a5, c5)"))
    fused(ROWS.replace("BIAS", "a5 = Add (c5, r5) b5 = Add (a5, s5)"))


@pytest.mark.parametrize(
    ("bias", "flat"),
    [("b5 = Add (s5, r5)", "{-1, 6, 6}"), ("a5 = Add (s5, r5) b5 = Add (a5, c5)", "{-1, 4, 9}")],
    ids=["a term for rows alone", "other scores"],
)
def test_terms_smaller_than_the_scores_are_not_a_bias(bias: str, flat: str) -> None:
    text = ROWS.replace("BIAS", bias).replace("{-1, 6, 6}", flat)
    if "9" in flat:
        text = text.replace("float[N, 6, 4] v", "float[N, 9, 4] v").replace(
            "=> (float[N, 6, 4]", "=> (float[N, 4, 4]"
        )
    check(Fuse(), text, near_miss=True)


# -- scores for all heads at once, taken apart for their mask

MERGED = """qm = Reshape ({q}, merged) km = Reshape (k, merged)
    kt = Transpose <perm = [0, 2, 1]> (km) qk = MatMul (qm, kt) s3 = Mul (qk, half)
    s4 = Reshape (s3, apart) s = Add (s4, m) p = Softmax <axis = -1> (s) y = MatMul (p, v)"""


def merged(body: str, heads: str = "2, 3, {}, 4") -> str:
    inputs = ", ".join(f"float[{heads.format(n)}] {x}" for x, n in (("q", 5), ("k", 6), ("v", 6)))
    return f"""{HEADER}g ({inputs}, float[5, 6] m) => (float[2, 3, 5, 4] y)
        <int64[3] merged = {{6, -1, 4}}, int64[4] apart = {{2, 3, 5, 6}}, float half = {{0.5}}> {{
        {body}
    }}"""


def test_scores_reshaped_for_their_mask() -> None:
    result, node = fused(merged(MERGED.format(q="q")))
    assert list(node.input)[:3] == ["q", "k", "v"]
    assert not census(result)["MatMul"]


def test_heads_that_were_merged_in_another_order_are_a_near_miss() -> None:
    turned = "qt = Transpose <perm = [1, 0, 2, 3]> (q) " + MERGED.format(q="qt")
    check(Fuse(), merged(turned), near_miss=True)


def test_scores_reshaped_by_two_views() -> None:
    views = "s5 = Reshape (s3, apart5) s4 = Squeeze (s5, last)"
    text = merged(MERGED.format(q="q").replace("s4 = Reshape (s3, apart)", views))
    more = "int64[5] apart5 = {2, 3, 5, 6, 1}, int64[1] last = {4}, float half"
    result, _ = fused(text.replace("float half", more, 1))
    assert not census(result)["MatMul"]
    turned = more.replace("{2, 3, 5, 6, 1}", "{2, 3, 6, 5, 1}")
    swapped = text.replace("float half", turned, 1).replace("[5, 6] m", "[6, 5] m")
    swapped = swapped.replace("float[2, 3, 6, 4] v", "float[2, 3, 5, 4] v")
    check(Fuse(), swapped.replace("float[2, 3, 5, 4] y", "float[2, 3, 6, 4] y"), near_miss=True)


# -- values for all heads at once, behind scores with their heads apart

TOKENS = f"""{HEADER}g (float[N, S, 12] x, float[N, T, 12] c, float[N, T, 12] z)
    => (float[M, S, 4] y)
    <int64[4] heads = {{0, 0, 3, 4}}, int64[1] any = {{-1}}, int64[1] four = {{4}},
     int64[3] most = {{-1, 7, 4}}, float half = {{0.5}}> {{
    x4 = Reshape (x, heads) q = Transpose <perm = [0, 2, 1, 3]> (x4)
    c4 = Reshape (c, heads) kt = Transpose <perm = [0, 2, 3, 1]> (c4)
    z4 = Reshape (z, heads) v4 = Transpose <perm = [0, 2, 1, 3]> (z4)
    qk = MatMul (q, kt) s = Mul (qk, half) p4 = Softmax <axis = -1> (s)
    sizes = Shape <start = 2, end = 4> (s) merged = Concat <axis = 0> (any, sizes)
    p = Reshape (p4, merged)
    t = Shape <start = 1, end = 2> (z) rows = Concat <axis = 0> (any, t, four)
    v = Reshape (v4, rows) y = MatMul (p, v)
}}"""


def test_values_that_are_merged_after_the_softmax() -> None:
    result, node = fused(TOKENS)
    assert attributes(node)["q_num_heads"] == 3
    assert not census(result)["MatMul"]


def test_values_that_were_merged_in_another_order_are_a_near_miss() -> None:
    turned = TOKENS.replace(
        "v4 = Transpose <perm = [0, 2, 1, 3]>", "v4 = Transpose <perm = [2, 0, 1, 3]>"
    )
    check(Fuse(), turned, near_miss=True)


# -- the mask once more behind the softmax, as Keras has it

TWICE = f"""{HEADER}g (float[N, 2, S, 4] q, float[N, 2, 4, T] kt, float[N, 2, T, 4] v,
    bool[N, 1, S, T] keep, bool[N, 1, S, T] other) => (float[N, 2, S, 4] y)
    <float low = {{-3e38}}, float zero = {{0}}> {{
    qk = MatMul (q, kt) s = Where (keep, qk, low) w = Softmax <axis = -1> (s)
    p = Where (keep, w, zero) y = MatMul (p, v)
}}"""


def kept_rows() -> dict[str, np.ndarray]:
    """Some keys are masked, and all keys of one query."""
    draw = np.random.default_rng(0)
    keep = draw.random((2, 1, 5, 7)) < 0.6
    keep[:, :, 3] = False
    sizes = {"q": (2, 2, 5, 4), "kt": (2, 2, 4, 7), "v": (2, 2, 7, 4)}
    arrays = {name: draw.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    return arrays | {"keep": keep, "other": ~keep}


def test_a_mask_before_and_after_the_softmax() -> None:
    """The result of a fully masked query is 0, not the mean of all values."""
    result, _ = fused(TWICE, kept_rows())
    assert not census(result)["MatMul"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Where (keep, w, zero)", "Where (other, w, zero)"),
        ("Where (keep, w, zero)", "Where (keep, zero, w)"),
        ("Where (keep, qk, low)", "Where (keep, low, qk)"),
        ("Where (keep, qk, low)", "Add (qk, zero)"),
    ],
)
def test_another_where_after_the_softmax_is_a_near_miss(old: str, new: str) -> None:
    check(Fuse(), TWICE.replace(old, new), near_miss=True, inputs=kept_rows())
