"""Attention: all forms become one operator, and near misses stay."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from passes.analysis.shapes import Shapes
from passes.fuse.attention.fuse_attention import RULES, FuseAttention
from tests.checks import check, model
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.rewriting.rule import explain

HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'


@dataclass(frozen=True, slots=True)
class Fuse:
    """The pass, after shape inference."""

    def run(self, model: Model, ctx: Context) -> None:
        Shapes(annotate=False).run(model, ctx)
        FuseAttention().run(model, ctx)


def graph(
    body: str, inputs: str = "", output: str = "float[N, 2, S, 4] y", weights: str = ""
) -> str:
    """Query [N, 2, S, 4], key and value [N, 2, T, 4] with separate heads, then `body`."""
    more = f", {inputs}" if inputs else ""
    return f"""{HEADER}g (float[N, S, 8] x, float[N, T, 8] c, float[N, T, 8] z{more}) => ({output})
        <int64[4] heads = {{0, 0, 2, 4}}, float root = {{0.70710678}}, float half = {{0.5}},
         float zero = {{0}}, float two = {{2}}{weights}> {{
        x4 = Reshape (x, heads)  q = Transpose <perm = [0, 2, 1, 3]> (x4)
        c4 = Reshape (c, heads)  k = Transpose <perm = [0, 2, 1, 3]> (c4)
        kt = Transpose <perm = [0, 1, 3, 2]> (k)
        z4 = Reshape (z, heads)  v = Transpose <perm = [0, 2, 1, 3]> (z4)
        {body}
    }}"""


PLAIN = "qk = MatMul (q, kt) s = Mul (qk, half) p = Softmax <axis = -1> (s) y = MatMul (p, v)"


def census(subject: Model) -> Counter[str]:
    return Counter(node.op_type for node in subject.graph.nodes)


def fused(text: str, inputs: dict[str, Any] | None = None, atol: float = 1e-5) -> Any:
    """Return the fused model and its only Attention."""
    result = check(Fuse(), text, inputs=inputs, atol=atol)
    found = [node for node in result.graph.nodes if node.op_type == "Attention"]
    assert len(found) == 1
    assert "Softmax" not in census(result)
    return result, found[0]


def attributes(node: Any) -> dict[str, Any]:
    return {a.name: (a.f if a.type == 1 else a.i) for a in node.attribute}


def feeds(**more: Any) -> dict[str, Any]:
    """Two sequences, five queries, seven keys."""
    random = np.random.default_rng(0)
    shapes = {"x": (2, 5, 8), "c": (2, 7, 8), "z": (2, 7, 8)}
    given = {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    return {**given, **more}


def test_attention_takes_tokens_and_the_number_of_heads() -> None:
    result, node = fused(graph(PLAIN))
    assert list(node.input) == ["x", "c", "z"]
    assert attributes(node) == {"scale": 0.5, "q_num_heads": 2, "kv_num_heads": 2}
    assert census(result)["MatMul"] == 0


@pytest.mark.parametrize(
    "body",
    [
        "a = Mul (q, root) b = Mul (kt, root) s = MatMul (a, b) p = Softmax <axis = -1> (s)",
        "a = Div (q, two) s = MatMul (a, kt) p = Softmax <axis = -1> (s)",
        "b = Mul (half, k) bt = Transpose <perm = [0, 1, 3, 2]> (b) s = MatMul (q, bt)"
        " p = Softmax <axis = -1> (s)",
        "qk = MatMul (q, kt) s = Div (qk, two) p = Softmax <axis = 3> (s)",
    ],
    ids=["square roots", "on the query", "on the key", "on the scores"],
)
def test_the_scale_may_stand_anywhere(body: str) -> None:
    _, node = fused(graph(f"{body} y = MatMul (p, v)"))
    assert attributes(node)["scale"] == pytest.approx(0.5)


def test_a_scale_of_the_value_moves_to_the_result() -> None:
    body = PLAIN.replace("MatMul (p, v)", "MatMul (p, w)")
    result, _ = fused(graph("w = Mul (v, two) " + body))
    assert census(result)["Mul"] == 1


# -- masks and biases

ADDED = "s2 = Add (s, m) p = Softmax <axis = -1> (s2) y = MatMul (p, v)"
SCORES = "qk = MatMul (q, kt) s = Mul (qk, half) "


@pytest.mark.parametrize("shape", ["N, 1, 1, T", "1, 1, S, T", "N, 2, S, T", "S, T", "1, 1, 1, T"])
def test_additive_masks_of_any_shape(shape: str) -> None:
    sizes = {"N": 2, "S": 5, "T": 7}
    mask = np.zeros([sizes.get(s, int(s) if s.isdigit() else 0) for s in shape.split(", ")])
    mask[..., 3:] = -3.0
    fused(graph(SCORES + ADDED, f"float[{shape}] m"), feeds(m=mask.astype(np.float32)))


LOWEST = "-3.4028234663852886e+38"


@pytest.mark.parametrize("low", ["-inf", LOWEST, "-10000.0"])
@pytest.mark.parametrize("guarded", [False, True])
def test_fully_masked_rows(low: str, guarded: bool) -> None:
    """-inf before a guard results in 0; finite mask values in a softmax."""
    guard = "n = IsNaN (p0) p = Where (n, zero, p0)" if guarded else "p = Identity (p0)"
    body = f"""{SCORES} m = Where (keep, zero, low) s2 = Add (s, m)
        p0 = Softmax <axis = -1> (s2) {guard} y = MatMul (p, v)"""
    keep = np.ones((2, 1, 5, 7), bool)
    keep[..., 4:] = False
    if low != "-inf" or guarded:
        keep[0, :, 2] = False
    text = graph(body, "bool[N, 1, S, T] keep", weights=f", float low = {{{low}}}")
    if guarded:
        fused(text, feeds(keep=keep))
        return
    # `cleanup` runs before and removes an Identity between softmax and product.
    text = text.replace("p = Identity (p0)", "").replace("p0 =", "p =")
    fused(text, feeds(keep=keep))


def test_the_lowest_number_inside_of_a_sum_of_masks() -> None:
    body = f"""{SCORES} w = Where (keep, zero, low) m = Add (w, r) s2 = Add (s, m)
        p = Softmax <axis = -1> (s2) y = MatMul (p, v)"""
    keep = np.ones((2, 1, 1, 7), bool)
    keep[0] = False
    weights = f", float low = {{{LOWEST}}}, float[1, 2, 1, 1] r = {{0.5, 0.25}}"
    result, _ = fused(graph(body, "bool[N, 1, 1, T] keep", weights=weights), feeds(keep=keep))
    assert census(result)["Max"] == 1


@pytest.mark.parametrize("inverted", [False, True])
def test_masks_that_select_the_scores(inverted: bool) -> None:
    pair = "low, s" if inverted else "s, low"
    body = f"""{SCORES} s2 = Where (keep, {pair}) p = Softmax <axis = -1> (s2)
        y = MatMul (p, v)"""
    keep = np.tril(np.ones((5, 7), bool))
    keep[3] = False
    keep = ~keep if inverted else keep
    weights = f", float low = {{{LOWEST}}}"
    fused(graph(body, "bool[S, T] keep", weights=weights), feeds(keep=keep))


def test_a_mask_value_that_scores_can_reach_is_a_near_miss() -> None:
    body = f"{SCORES} s2 = Where (keep, s, low) p = Softmax <axis = -1> (s2) y = MatMul (p, v)"
    text = graph(body, "bool[S, T] keep", weights=", float low = {-10.0}")
    check(Fuse(), text, near_miss=True, inputs=feeds(keep=np.ones((5, 7), bool)))


def test_a_bias_before_the_scale_is_scaled() -> None:
    body = "qk = MatMul (q, kt) b = Add (qk, m) s = Mul (b, half) p = Softmax <axis = -1> (s)"
    mask = np.random.default_rng(1).standard_normal((2, 2, 5, 7)).astype(np.float32)
    fused(graph(f"{body} y = MatMul (p, v)", "float[N, 2, S, T] m"), feeds(m=mask))


def test_a_cap() -> None:
    body = f"{SCORES} d = Div (s, two) t = Tanh (d) u = Mul (t, two) p = Softmax <axis = -1> (u)"
    _, node = fused(graph(f"{body} y = MatMul (p, v)"))
    assert attributes(node)["softcap"] == pytest.approx(2.0)


def test_biases_whose_sizes_are_not_known_to_be_equal() -> None:
    body = f"""{SCORES} a = Add (s, m) b = Add (a, n) p = Softmax <axis = -1> (b)
        y = MatMul (p, v)"""
    random = np.random.default_rng(1)
    given = feeds(
        m=random.standard_normal((1, 1, 5, 7)).astype(np.float32),
        n=random.standard_normal((1, 2, 1, 7)).astype(np.float32),
    )
    fused(graph(body, "float[1, 1, S, T] m, float[1, 2, J, K] n"), given)


def test_a_scale_for_each_head() -> None:
    body = f"""{SCORES} h = Mul (s, each) b = Add (h, m) p = Softmax <axis = -1> (b)
        y = MatMul (p, v)"""
    weights = ", float[2, 1, 1] each = {0.5, 3.0}"
    mask = np.random.default_rng(1).standard_normal((2, 1, 5, 7)).astype(np.float32)
    text = graph(body, "float[N, 1, S, T] m", weights=weights)
    fused(text, feeds(m=mask))
    other = text.replace("h = Mul (s, each) b = Add (h, m)", "h = Add (s, m) b = Mul (h, each)")
    check(Fuse(), other, near_miss=True, inputs=feeds(m=mask))
    rows = text.replace("float[2, 1, 1] each = {0.5, 3.0}", "float[7] each = {1, 2, 3, 4, 5, 6, 7}")
    check(Fuse(), rows, near_miss=True, inputs=feeds(m=mask))


def test_a_mask_for_each_window_of_an_image() -> None:
    """Scores [images * windows, heads, 4, 4], with a mask [1, windows, 1, 4, 4] of rank 5."""
    text = f"""{HEADER}g (float[M, 2, 4, 8] q, float[M, 2, 4, 8] k, float[M, 2, 4, 8] v)
        => (float[M, 2, 4, 8] y)
        <int64[5] apart = {{-1, 3, 2, 4, 4}}, int64[4] together = {{-1, 2, 4, 4}},
         float[1, 3, 1, 4, 4] mask = {{{", ".join(str(i % 5 - 2) for i in range(48))}}}> {{
        kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, kt)
        w = Reshape (s, apart) m = Add (w, mask) b = Reshape (m, together)
        p = Softmax <axis = -1> (b) y = MatMul (p, v)
    }}"""
    random = np.random.default_rng(0)
    fused(text, {n: random.standard_normal((6, 2, 4, 8)).astype(np.float32) for n in "qkv"})


def test_a_second_product_is_a_bias() -> None:
    body = """qk = MatMul (q, kt) r = MatMul (x4t, pt) s = Add (qk, r) p = Softmax <axis = -1> (s)
        y = MatMul (p, v)"""
    positions = np.random.default_rng(1).standard_normal((2, 2, 4, 7)).astype(np.float32)
    text = graph("x4t = Transpose <perm = [0, 2, 1, 3]> (x4) " + body, "float[N, 2, 4, T] pt")
    result, _ = fused(text, feeds(pt=positions))
    assert census(result)["MatMul"] == 1


# -- heads


def test_repeated_heads_are_left_to_the_operator() -> None:
    """Grouped queries: each of 2 heads of keys and values serves 2 heads of queries."""
    text = f"""{HEADER}g (float[N, S, 16] x, float[N, T, 8] c, float[N, T, 8] z)
        => (float[N, 4, S, 4] y)
        <int64[4] four = {{0, 0, 4, 4}}, int64[4] two = {{0, 0, 2, 4}}, int64[1] axis = {{2}},
         int64[5] twice = {{1, 1, 2, 1, 1}}, int64[4] all = {{0, 4, -1, 4}}, float s = {{0.5}}> {{
        x4 = Reshape (x, four) q = Transpose <perm = [0, 2, 1, 3]> (x4)
        c4 = Reshape (c, two) k2 = Transpose <perm = [0, 2, 1, 3]> (c4)
        k5 = Unsqueeze (k2, axis) k6 = Expand (k5, twice) k = Reshape (k6, all)
        z4 = Reshape (z, two) v2 = Transpose <perm = [0, 2, 1, 3]> (z4)
        v5 = Unsqueeze (v2, axis) v6 = Expand (v5, twice) v = Reshape (v6, all)
        kt = Transpose <perm = [0, 1, 3, 2]> (k)
        qk = MatMul (q, kt) sc = Mul (qk, s) p = Softmax <axis = -1> (sc) y = MatMul (p, v)
    }}"""
    _, node = fused(text)
    assert attributes(node) | {"scale": 0} == {"scale": 0, "q_num_heads": 4, "kv_num_heads": 2}
    # Repeated as a whole, head 1 would be used by queries 1 and 3: another order.
    other = text.replace("int64[1] axis = {2}", "int64[1] axis = {1}").replace(
        "int64[5] twice = {1, 1, 2, 1, 1}", "int64[5] twice = {1, 2, 1, 1, 1}"
    )
    _, node = fused(other)
    assert attributes(node) == {"scale": 0.5}  # on the repeated values, with separate heads


def test_one_broadcast_key_head() -> None:
    text = f"""{HEADER}g (float[N, 2, S, 4] q, float[N, 1, T, 4] k, float[N, 1, T, 4] v)
        => (float[N, 2, S, 4] y) {{
        kt = Transpose <perm = [0, 1, 3, 2]> (k)
        s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v)
    }}"""
    fused(text)


def test_a_broadcast_batch_is_a_near_miss() -> None:
    text = f"""{HEADER}g (float[3, 2, S, 4] q, float[1, 2, T, 4] k, float[1, 2, T, 4] v)
        => (float[3, 2, S, 4] y) {{
        kt = Transpose <perm = [0, 1, 3, 2]> (k)
        s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v)
    }}"""
    check(Fuse(), text, near_miss=True)


def test_matrices_without_heads() -> None:
    """[batch * heads, sequence, size], as in old exports."""
    text = f"""{HEADER}g (float[M, S, 4] q, float[M, T, 4] k, float[M, T, 4] v, float[M, 1, T] m)
        => (float[M, S, 4] y) {{
        kt = Transpose <perm = [0, 2, 1]> (k)
        s = MatMul (q, kt) b = Add (s, m) p = Softmax <axis = -1> (b) y = MatMul (p, v)
    }}"""
    _, node = fused(text)
    assert attributes(node)["q_num_heads"] == 1


def test_merged_batch_and_heads_with_a_bias_each() -> None:
    text = f"""{HEADER}g (float[N, S, 8] x, float[N, T, 8] c, float[N, T, 8] z, float[M, 1, T] m)
        => (float[M, S, 4] y)
        <int64[4] heads = {{0, 0, 2, 4}}, int64[1] from = {{-1}}, int64[1] size = {{4}}> {{
        sq = Shape <start = 1, end = 2> (x) sk = Shape <start = 1, end = 2> (c)
        tq = Concat <axis = 0> (from, sq, size) tk = Concat <axis = 0> (from, sk, size)
        x4 = Reshape (x, heads) x5 = Transpose <perm = [0, 2, 1, 3]> (x4) q = Reshape (x5, tq)
        c4 = Reshape (c, heads) c5 = Transpose <perm = [0, 2, 1, 3]> (c4) k = Reshape (c5, tk)
        z4 = Reshape (z, heads) z5 = Transpose <perm = [0, 2, 1, 3]> (z4) v = Reshape (z5, tk)
        kt = Transpose <perm = [0, 2, 1]> (k)
        s = MatMul (q, kt) b = Add (s, m) p = Softmax <axis = -1> (b) y = MatMul (p, v)
    }}"""
    mask = np.random.default_rng(1).standard_normal((4, 1, 7)).astype(np.float32)
    with pytest.raises(AssertionError, match="nothing changed"):
        check(Fuse(), text, inputs=feeds(m=mask))  # M is not known to be 2 N
    same = text.replace("float[M, 1, T] m", "float[N, 2, 1, T] n").replace(
        "s = MatMul (q, kt) b",
        "tm = Concat <axis = 0> (from, one, sk) m = Reshape (n, tm) s = MatMul (q, kt) b",
    )
    same = same.replace("int64[1] size = {4}", "int64[1] size = {4}, int64[1] one = {1}")
    _, node = fused(same, feeds(n=mask.reshape(2, 2, 1, 7)))
    assert attributes(node)["q_num_heads"] == 2


# -- near misses


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("<axis = -1> (s)", "<axis = 2> (s)", "is along axis 2"),
        ("s = Mul (qk, half)", "s = Relu (qk)", "Relu"),
        ("s = Mul (qk, half)", "s = Mul (qk, qk)", "by a constant"),
        ("qk = MatMul (q, kt)", "qk = Add (m4, m4)", "to a product"),
    ],
)
def test_near_misses_and_their_reasons(old: str, new: str, reason: str) -> None:
    text = graph(PLAIN.replace(old, new), "float[N, 2, S, T] m4")
    mask = np.zeros((2, 2, 5, 7), np.float32)
    check(Fuse(), text, near_miss=True, inputs=feeds(m4=mask))
    subject = model(text)
    Shapes(annotate=False).run(subject, Context())
    reasons = [miss.reason for miss in explain(subject, RULES)]
    assert any(reason in text for text in reasons), reasons


def test_probabilities_that_are_an_output_stay() -> None:
    text = graph(PLAIN, output="float[N, 2, S, 4] y, float[N, 2, S, T] p")
    check(Fuse(), text, near_miss=True)


def test_double_precision_has_no_kernel() -> None:
    text = graph(PLAIN).replace("float", "double")
    check(Fuse(), text, near_miss=True)


def test_half_precision_with_a_softmax_in_float() -> None:
    text = f"""{HEADER}g (float16[N, 2, S, 4] q, float16[N, 2, T, 4] k, float16[N, 2, T, 4] v)
        => (float16[N, 2, S, 4] y) {{
        kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, kt) w = Cast <to = 1> (s)
        p1 = Softmax <axis = -1> (w) p = Cast <to = 10> (p1) y = MatMul (p, v)
    }}"""
    fused(text, atol=1e-2)


def test_a_value_that_is_widened_for_the_product() -> None:
    text = f"""{HEADER}g (float16[N, 2, S, 4] q, float16[N, 2, T, 4] k, float16[N, 2, T, 4] v)
        => (float[N, 2, S, 4] y) {{
        kt = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul (q, kt) w = Cast <to = 1> (s)
        p = Softmax <axis = -1> (w) v32 = Cast <to = 1> (v) y = MatMul (p, v32)
    }}"""
    fused(text, atol=1e-2)


def test_an_older_opset_has_no_attention() -> None:
    check(Fuse(), graph(PLAIN).replace('"" : 23', '"" : 22'), near_miss=True)


# -- sizes and numbers that do not fit

APART = f"""{HEADER}g (float[N, 2, S, 4] q, float[N, 2, 4, T] kt, float[N, 2, T, 4] v, MORE)
    => (float[A, B, C, D] y) <float low = {{-1e9}}, float zero = {{0}}, float scale = {{2}}> {{
    qk = MatMul (q, kt) BODY p = Softmax <axis = -1> (s) y = MatMul (p, v)
}}"""


def apart(body: str, more: str, *sizes: tuple[str, str]) -> str:
    text = APART
    for old, new in sizes:
        text = text.replace(old, new)
    return text.replace("BODY", body).replace("MORE", more)


def random_apart(**more: tuple[int, ...]) -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {"q": (3, 2, 5, 4), "kt": (3, 2, 4, 7), "v": (3, 2, 7, 4), **more}
    return {name: random.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


@pytest.mark.parametrize(
    ("body", "more", "old", "new", "shapes"),
    [
        (
            "s = Add (qk, m)",
            "float[M, 1, 1, T] m",
            "[N,",
            "[1,",
            {"q": (1, 2, 5, 4), "kt": (1, 2, 4, 7), "v": (1, 2, 7, 4), "m": (3, 1, 1, 7)},
        ),
        (
            "s = Add (qk, m)",
            "float[1, 1, R, T] m",
            "S, 4] q",
            "1, 4] q",
            {"q": (3, 2, 1, 4), "m": (1, 1, 5, 7)},
        ),
        (
            "s = Add (qk, m)",
            "float[1, 1, S, T] m",
            "4, T] kt",
            "4, 1] kt",
            {"kt": (3, 2, 4, 1), "m": (1, 1, 5, 7)},
        ),
        (
            "s = Mul (qk, m)",
            "float[M, 2, 1, 1] m",
            "[N,",
            "[1,",
            {"q": (1, 2, 5, 4), "kt": (1, 2, 4, 7), "v": (1, 2, 7, 4), "m": (3, 2, 1, 1)},
        ),
    ],
    ids=["batch", "rows", "columns", "scale of a batch"],
)
def test_a_bias_that_makes_the_scores_larger_is_a_near_miss(
    body: str, more: str, old: str, new: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    check(Fuse(), apart(body, more, (old, new)), near_miss=True, inputs=random_apart(**shapes))


@pytest.mark.parametrize(
    "body",
    [
        "a = Where (m, qk, low) s = Where (n, a, low)",
        "b = Where (m, zero, low) a = Add (qk, b) s = Where (n, a, low)",
    ],
)
def test_a_mask_replaces_an_earlier_mask(body: str) -> None:
    """A fully masked row, partly by one mask and partly by two: all keys have equal weights."""
    keep = np.ones((3, 1, 1, 7), bool)
    keep[..., 3:] = False
    other = np.ones((5, 7), bool)
    other[2, :5] = False
    text = apart(body, "bool[N, 1, 1, T] m, bool[S, T] n")
    fused(text, random_apart() | {"m": keep, "n": other})


@pytest.mark.parametrize("scale", ["-0.5", "1e-40"])
def test_a_scale_that_the_operator_does_not_take(scale: str) -> None:
    text = apart("s = Mul (qk, scale)", "float[1] m").replace("scale = {2}", f"scale = {{{scale}}}")
    check(Fuse(), text, near_miss=True, inputs=random_apart(m=(1,)))


def test_masks_below_the_range_of_half_precision() -> None:
    """-1e9 in a float32 part stays finite: a fully masked row has equal weights."""
    body = """w = Cast <to = 1> (qk) f = Cast <to = 1> (m) g = Mul (f, low) a = Add (w, g)
        b = Softmax <axis = -1> (a) p = Cast <to = 10> (b)"""
    text = apart(body, "bool[N, 1, S, T] m").replace("p = Softmax <axis = -1> (s)", "")
    text = text.replace("float[", "float16[")
    masked = np.zeros((3, 1, 5, 7), bool)
    masked[..., 3:] = True
    masked[:, :, 2] = True
    given = {name: value.astype(np.float16) for name, value in random_apart().items()}
    fused(text, given | {"m": masked}, atol=5e-3)


def test_operands_with_fewer_axes_are_a_near_miss() -> None:
    """[3, T, 4] is per head, not per batch, although both have size 3."""
    text = f"""{HEADER}g (float[3, S, 1, 4] x, float[3, T, 1, 4] c, float[3, T, 4] v)
        => (float[3, 3, S, 4] y) {{
        q = Transpose <perm = [0, 2, 1, 3]> (x) kt = Transpose <perm = [0, 2, 3, 1]> (c)
        s = MatMul (q, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v)
    }}"""
    check(Fuse(), text, near_miss=True)


REGROUPED = f"""{HEADER}g (float[4, 5, 2, 4] x, float[4, 7, 2, 4] c, float[4, 7, 2, 4] z,
    float[1, 4, 5, 7] m) => (float[2, 4, 5, 4] y)
    <int64[4] qs = {{2, 4, 5, 4}}, int64[4] ks = {{2, 4, 7, 4}}> {{
    x4 = Transpose <perm = [0, 2, 1, 3]> (x) q = Reshape (x4, qs)
    c4 = Transpose <perm = [0, 2, 1, 3]> (c) k = Reshape (c4, ks)
    z4 = Transpose <perm = [0, 2, 1, 3]> (z) v = Reshape (z4, ks)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    qk = MatMul (q, kt) s = Add (qk, m) p = Softmax <axis = -1> (s) y = MatMul (p, v)
}}"""


@pytest.mark.parametrize("bias", ["s = Add (qk, m)", "s = Identity (qk)"])
def test_two_heads_of_two_halves_seen_as_four(bias: str) -> None:
    """As tokens they would have two heads, and another batch."""
    text = REGROUPED.replace("s = Add (qk, m)", bias)
    if "Identity" in bias:  # `cleanup` removes it
        text = text.replace("s = Identity (qk)", "").replace("(s)", "(qk)")
    _, node = fused(text)
    assert attributes(node) == {"scale": 1.0}


def test_one_query_of_some_heads() -> None:
    """Heads along the axis of the sequence, which has length 1: the result keeps its shape."""
    text = f"""{HEADER}g (float[1, 3, 8] q, float[3, 1, 8] k, float[3, 1, 8] v)
        => (float[1, 3, 1, 8] y)
        <int64[4] apart = {{1, 3, 1, 8}}, int64[4] turned = {{1, 3, 8, 1}}> {{
        q4 = Reshape (q, apart) kt = Reshape (k, turned) v4 = Reshape (v, apart)
        s = MatMul (q4, kt) p = Softmax <axis = -1> (s) y = MatMul (p, v4)
    }}"""
    check(Fuse(), text)


@pytest.mark.parametrize("shape", ["T", "1", ""])
def test_a_mask_of_one_axis_for_one_query(shape: str) -> None:
    text = apart("s = Add (qk, m)", f"float[{shape}] m", ("S, 4] q", "1, 4] q"))
    text = text if shape else text.replace("float[] m", "float m")
    sizes = {"T": (7,), "1": (1,), "": ()}[shape]
    given = random_apart(q=(3, 2, 1, 4)) | {"m": np.full(sizes, 0.5, np.float32)}
    result, node = fused(text, given)
    assert result.graph.producer(node.input[3]).op_type == "Expand"


def test_a_mask_value_that_a_scale_makes_infinite() -> None:
    """Twice the lowest number is -inf: with a guard, such a row results in 0."""
    body = """a = Where (m, qk, low) s = Mul (a, scale) p0 = Softmax <axis = -1> (s)
        n = IsNaN (p0) p = Where (n, zero, p0)"""
    text = apart(body, "bool[N, 1, S, T] m").replace("-1e9", LOWEST)
    text = text.replace(" p = Softmax <axis = -1> (s) y", " y")
    keep = np.ones((3, 1, 5, 7), bool)
    keep[:, :, 2] = False
    fused(text, random_apart() | {"m": keep})
