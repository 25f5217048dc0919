"""`compact`: fewer equivalent operators, and near misses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from passes.analysis.shapes import Shapes
from passes.fuse.compact.compact import Compact
from tests.checks import check, model
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.settings import Settings

HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'


@dataclass(frozen=True, slots=True)
class Small:
    """The pass for the target onnx, after shape inference."""

    compact: Compact = field(default_factory=Compact)

    def run(self, model: Model, ctx: Context) -> None:
        ctx = Context(Settings(target="onnx"))
        Shapes(annotate=False).run(model, ctx)
        self.compact.run(model, ctx)


def left(text: str, inputs: dict[str, Any] | None = None, subject: Any = None) -> Counter[str]:
    result = check(subject or Small(), HEADER + text, inputs=inputs)
    return Counter(node.op_type for node in result.graph.nodes)


def stays(text: str, inputs: dict[str, Any] | None = None, subject: Any = None) -> None:
    check(subject or Small(), HEADER + text, inputs=inputs, near_miss=True)


# -- merged maps

WEIGHTS = """float[2, 2] wq = {1, 2, 3, 4}, float[2, 2] wk = {5, 6, 7, 8},
    float[2, 2] wv = {9, 10, 11, 12}, float[2] bq = {1, 2}, float[2] bv = {3, 4}"""
PROJECTIONS = """
    q0 = MatMul (x, wq)  q = Add (q0, bq)  k = MatMul (x, wk)
    v0 = MatMul (x, wv)  v = Add (bv, v0)
"""
ATTENTION = "Attention <q_num_heads = 1, kv_num_heads = 1>"


def attended(projections: str, rest: str = "", outputs: str = "float[B, L, 2] y") -> str:
    return f"""agraph (float[B, L, 2] x) => ({outputs}) <{WEIGHTS}> {{
        {projections} y = {ATTENTION} (q, k, v) {rest}
    }}"""


def test_query_key_and_value_become_one_layer() -> None:
    found = left(attended(PROJECTIONS))
    assert found == {"MatMul": 1, "Add": 1, "Split": 1, "Attention": 1}


def test_a_layer_without_a_bias_gets_zeros() -> None:
    result = check(Small(), HEADER + attended(PROJECTIONS))
    [add] = [node for node in result.graph.nodes if node.op_type == "Add"]
    biases = [array for name in add.input if (array := result.graph.const(name)) is not None]
    np.testing.assert_array_equal(biases[0], [1, 2, 0, 0, 3, 4])


def test_layers_after_merged_layers_are_merged_too() -> None:
    """Query and key have one source; the value has another one."""
    shared = """p = MatMul (x, wq)  h = Add (p, bq)  q0 = MatMul (h, wk)  q = Add (q0, bv)
        k0 = MatMul (h, wv)  k = Add (k0, bq)  v0 = MatMul (x, wo)  v = Add (bv, v0)"""
    text = attended(shared).replace("float[2] bq", "float[2, 2] wo = {1, 3, 5, 7}, float[2] bq")
    assert left(text) == {"MatMul": 2, "Add": 2, "Split": 2, "Attention": 1}


def test_other_targets_keep_layers_separate() -> None:
    subject = model(HEADER + attended(PROJECTIONS))
    Compact().run(subject, Context(Settings(target="ort-cpu")))
    assert not len(subject.journal)


def test_two_layers_without_a_bias_stay() -> None:
    text = f"""agraph (float[B, L, 2] x) => (float[B, L, 2] y) <{WEIGHTS}> {{
        g = MatMul (x, wq)  u = MatMul (x, wk)  y = Mul (g, u)
    }}"""
    stays(text)


def test_keys_for_different_attentions_stay_separate() -> None:
    text = f"""agraph (float[B, L, 2] x, float[B, L, 2] z) => (float[B, L, 2] y) <{WEIGHTS}> {{
        k = MatMul (x, wk)  a = {ATTENTION} (z, k, z)
        v = MatMul (x, wv)  b = {ATTENTION} (a, v, a)
        w = MatMul (x, wq)  y = {ATTENTION} (b, w, b)
    }}"""
    stays(text)


def test_a_weight_with_other_users_stays() -> None:
    stays(attended(PROJECTIONS, "z = MatMul (y, wq)", "float[B, L, 2] y, float[B, L, 2] z"))


def test_layers_that_share_weights_share_the_merged_ones() -> None:
    second = """
        q1 = MatMul (y1, wq)  q2 = Add (q1, bq)  k2 = MatMul (y1, wk)
        v1 = MatMul (y1, wv)  v2 = Add (bv, v1)
    """
    text = f"""agraph (float[B, L, 2] x) => (float[B, L, 2] y) <{WEIGHTS}> {{
        {PROJECTIONS} y1 = {ATTENTION} (q, k, v) {second} y = {ATTENTION} (q2, k2, v2)
    }}"""
    result = check(Small(), HEADER + text)
    merged = {node.input[1] for node in result.graph.nodes if node.op_type == "MatMul"}
    assert len(merged) == 1


def test_weights_above_the_limit_stay_separate() -> None:
    stays(attended(PROJECTIONS), subject=Small(Compact(max_bytes=47)))


# -- sums


def test_three_terms_are_one_sum() -> None:
    signature = "agraph (float[A, 2] x, float[A, 2] z) => (float[A, 2] y) <float[2] b = {1, 2}>"
    assert left(f"{signature} {{ s = Add (x, b) y = Add (s, z) }}") == {"Sum": 1}
    four = "s = Add (x, b) t = Add (z, s) y = Add (t, x)"
    assert left(f"{signature} {{ {four} }}") == {"Sum": 1}


def test_two_sums_are_one() -> None:
    signature = "agraph (float[A, 2] x, float[A, 2] z) => (float[A, 2] y) <float[2] b = {1, 2}>"
    body = "s = Add (x, b) u = Exp (z) v = Add (u, b) t = Add (z, s) y = Add (v, t)"
    assert left(f"{signature} {{ {body} }}") == {"Exp": 1, "Sum": 1}


def test_a_sum_with_other_users_stays() -> None:
    stays("""agraph (float[A] x, float[A] z) => (float[A] y, float[A] w) {
        s = Add (x, z) y = Add (s, z) w = Relu (s)
    }""")


def test_integers_without_a_sum_kernel_stay() -> None:
    stays("agraph (int64[A] x, int64[A] z) => (int64[A] y) { s = Add (x, z) y = Add (s, z) }")


# -- masks

MASKED = """agraph (float[B, L, 2] x, bool[B, 1, L, L] c) => (float[B, L, 2] y)
    <float zero = {{0}}, float low = {{{low}}}> {{
    m = Where (c, {kept}, {masked})  y = {attention} (x, x, x, m)
}}"""


def with_mask(low: str, kept: str = "zero", masked: str = "low") -> str:
    return MASKED.format(low=low, kept=kept, masked=masked, attention=ATTENTION)


def test_a_mask_of_minus_infinity_becomes_its_condition() -> None:
    infinite = with_mask("-1").replace("float low = {-1}", "float one = {-1}, float nil = {0}")
    infinite = infinite.replace("m = Where", "low = Div (one, nil) m = Where")
    subject = model(HEADER + infinite)
    from passes.simplify.fold import Fold

    Shapes(annotate=False).run(subject, Context())
    Fold().run(subject, Context())
    subject.commit()
    Small().run(subject, Context())
    assert Counter(n.op_type for n in subject.graph.nodes) == {"Attention": 1}
    attention = next(iter(subject.graph.nodes))
    assert attention.input[3] == "c"


@pytest.mark.parametrize("low", ["-100000", "-1e38"])
def test_a_finite_mask_stays(low: str) -> None:
    """A fully masked row would then have equal weights, not zeros."""
    stays(with_mask(low))


# -- rows

WINDOWS = "int64[6] cut = {-1, 2, 2, 2, 2, 3}, int64[3] windows = {-1, 4, 3}"


def test_windows_are_a_gather_of_rows() -> None:
    text = f"""agraph (float[B, 16, 3] x) => (float[W, 4, 3] y) <{WINDOWS}> {{
        c = Reshape (x, cut) t = Transpose <perm = [0, 1, 3, 2, 4, 5]> (c)
        y = Reshape (t, windows)
    }}"""
    assert left(text) == {"Gather": 1, "Reshape": 1}


def test_a_shift_and_its_windows_are_one_gather() -> None:
    text = f"""agraph (float[B, 4, 4, 3] x) => (float[W, 4, 3] y)
        <{WINDOWS}, int64[1] a = {{0}}, int64[1] b = {{1}}, int64[1] c = {{4}}> {{
        low = Slice (x, a, b, b)  high = Slice (x, b, c, b)  s = Concat <axis = 1> (high, low)
        r = Reshape (s, cut) t = Transpose <perm = [0, 1, 3, 2, 4, 5]> (r)
        y = Reshape (t, windows)
    }}"""
    assert left(text) == {"Reshape": 2, "Gather": 1}


@pytest.mark.parametrize(
    "moves",
    [
        # Columns move, not rows; or images of the batch are swapped with rows.
        "c = Reshape (x, cut) t = Transpose <perm = [0, 1, 3, 2, 5, 4]> (c) y = Reshape (t, rows)",
        "c = Reshape (x, cut) t = Transpose <perm = [1, 0, 3, 2, 4, 5]> (c) y = Reshape (t, rows)",
    ],
)
def test_other_moves_stay(moves: str) -> None:
    stays(f"""agraph (float[B, 16, 3] x) => (float[B, 16, 3] y)
        <{WINDOWS}, int64[3] rows = {{-1, 16, 3}}> {{ {moves} }}""")


# -- heads

HEADS = """agraph (float[L, B, 6] x) => (float[B2, 2, L2, 3] y)
    <int64[1] two = {2}, int64[1] three = {3}, int64[3] cut = {5, -1, 3},
     int64[4] split = {-1, 2, 5, 3}, int64[4] other = {-1, 5, 2, 3}>"""


CUT = "m = Reshape (x, cut) u = Transpose <perm = [1, 0, 2]> (m)"


def test_heads_are_split_by_one_reshape() -> None:
    sizes = """l = Shape <start = 0, end = 1> (x) b = Shape <start = 1, end = 2> (x)
        n = Mul (b, two) s = Concat <axis = 0> (l, n, three)
        t = Concat <axis = 0> (b, two, l, three)"""
    views = "m = Reshape (x, s) u = Transpose <perm = [1, 0, 2]> (m) y = Reshape (u, t)"
    assert left(f"{HEADS} {{ {sizes} {views} }}") == {"Reshape": 1, "Transpose": 1}


def test_heads_are_split_by_one_reshape_with_a_constant_length() -> None:
    views = f"{CUT} y = Reshape (u, split)"
    feed = {"x": np.arange(60, dtype=np.float32).reshape(5, 2, 6)}
    assert left(f"{HEADS} {{ {views} }}", feed) == {"Reshape": 1, "Transpose": 1}


@pytest.mark.parametrize(
    "views",
    [
        # The split is not of one axis; the Transpose has other users; nothing is split.
        f"{CUT} y = Reshape (u, other)",
        f"{CUT} y = Reshape (u, split) z = Exp (u)",
        "m = Reshape (x, split) u = Transpose <perm = [0, 2, 1, 3]> (m) y = Reshape (u, cut)",
    ],
)
def test_other_views_stay(views: str) -> None:
    signature = HEADS
    if "z =" in views:
        signature = HEADS.replace("] y)", "] y, float[P, Q, R] z)")
    elif not views.endswith("split)"):
        dims = "P, Q, R" if views.endswith("cut)") else "P, Q, R, S"
        signature = HEADS.replace("B2, 2, L2, 3", dims)
    stays(f"{signature} {{ {views} }}", {"x": np.arange(60, dtype=np.float32).reshape(5, 2, 6)})


# -- tokens

TOKENS = """agraph (float[B, 2, 2] x) => (float[B, 3, 2] y) <float[1, 1, 2] t = {5, 6},
    float[1, 3, 2] p = {1, 2, 3, 4, 5, 6}, float[B1, 3, 2] q, int64[2] ones = {1, 1}>"""


def tokens(body: str) -> str:
    return f"""{TOKENS.replace("float[B1, 3, 2] q, ", "")} {{
        b = Shape <start = 0, end = 1> (x) s = Concat <axis = 0> (b, ones) e = Expand (t, s) {body}
    }}"""


@pytest.mark.parametrize("order", ["(e, x)", "(x, e)"])
def test_a_token_before_an_addition_becomes_padding(order: str) -> None:
    assert left(tokens(f"j = Concat <axis = 1> {order} y = Add (j, p)")) == {"Pad": 1, "Add": 1}


@pytest.mark.parametrize("body", ["j = Concat <axis = 1> (e, x) y = Mul (j, p)"])
def test_a_token_without_an_addition_stays(body: str) -> None:
    stays(tokens(body))


def test_two_values_joined_stay() -> None:
    stays("""agraph (float[B, 2, 2] x, float[B, 1, 2] z) => (float[B, 3, 2] y)
        <float[1, 3, 2] p = {1, 2, 3, 4, 5, 6}> { j = Concat <axis = 1> (z, x) y = Add (j, p) }""")


# -- tables

BUCKETS = """agraph (int64[A, A] d) => ({kind}[A, A] y)
    <float near = {{4}}, float rate = {{1.5}}, int64 four = {{4}}, int64 low = {{-9}},
     int64 high = {{9}}, int64 one = {{1}}> {{ {nodes} }}"""
LOGARITHM = """a = Abs (d) a1 = Max (a, one) f = Cast <to = 1> (a1) q = Div (f, near) l = Log (q)
    m = Mul (l, rate) c = Ceil (m) far = Cast <to = 7> (c) large = Add (far, four)
    small = Less (a, four) w = Where (small, a, large) s = Sign (d) z = Mul (w, s)"""
DISTANCES = np.array([[0, 1, -1, 3], [4, 5, -6, 900], [-70000, 16, 15, -16], [17, 33, -33, 8]])


def buckets(nodes: str, kind: str = "int64") -> str:
    return BUCKETS.format(nodes=nodes, kind=kind)


def test_buckets_of_distances_are_looked_up() -> None:
    found = left(buckets(f"{LOGARITHM} y = Clip (z, low, high)"), {"d": DISTANCES})
    assert found == {"Clip": 1, "Gather": 1}


def test_the_part_of_a_function_with_constant_ends_is_looked_up() -> None:
    found = left(buckets(f"{LOGARITHM} u = Clip (z, low, high) y = Add (u, d)"), {"d": DISTANCES})
    assert found == {"Clip": 1, "Gather": 1, "Add": 1}


def test_two_tables_limit_their_distances_once() -> None:
    nodes = f"{LOGARITHM} n = Neg (z) p = Clip (z, low, high) r = Clip (n, low, high)"
    text = buckets(f"{nodes} y = Concat <axis = 1> (p, r)").replace("A] y", "B] y")
    assert left(text, {"d": DISTANCES}) == {"Clip": 1, "Gather": 2, "Concat": 1}


@pytest.mark.parametrize(
    "end",
    [
        "y = Identity (z)",  # grows without bound
        "y = Min (z, high)",  # at one end
        "u = Mod (z, high) y = Clip (u, low, high)",
    ],
)
def test_functions_without_a_constant_end_stay(end: str) -> None:
    stays(buckets(f"{LOGARITHM} {end}"), {"d": DISTANCES})


def test_a_function_of_two_values_stays() -> None:
    text = buckets(f"{LOGARITHM} u = Add (z, e) y = Clip (u, low, high)")
    stays(text.replace("(int64[A, A] d)", "(int64[A, A] d, int64[A, A] e)"))


# -- axes apart

APART = """agraph (float[B, 2, L, 3] x, int64[1, L, L] at) => (float[B, 2, L, L] y)
    <float[2, 3, 3] c = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18},
     int64[1] three = {3}, int64[1] less = {-1}, int64[1] two = {2}, int64[2] ones = {1, 1},
     float root = {2.5}>"""
MERGED = """b = Shape <start = 0, end = 1> (x) l = Shape <start = 2, end = 3> (x)
    s = Concat <axis = 0> (less, l, three) m = Reshape (x, s) r = Concat <axis = 0> (b, ones)
    tiled = Tile (c, r) turned = Transpose <perm = [0, 2, 1]> (tiled) p = MatMul (m, turned)
    n = Mul (b, two) e = Concat <axis = 0> (n, l, l) i = Expand (at, e)
    g = GatherElements <axis = {axis}> (p, i) d = Div (g, root)
    t = Concat <axis = 0> (b, two, l, l)"""


def test_batch_and_heads_are_not_merged_for_a_product() -> None:
    text = f"{APART} {{ {MERGED.format(axis=-1)} y = Reshape (d, t) }}"
    found = left(text)
    assert found == {"MatMul": 1, "Shape": 1, "Concat": 1, "Expand": 1, "GatherElements": 1}


def test_gathers_along_merged_axes_stay() -> None:
    text = f"{APART} {{ {MERGED.format(axis=0)} y = Reshape (d, t) }}"
    text = text.replace("L] at", "3] at").replace("L] y", "3] y").replace("l, l)", "l, three)")
    stays(text)


# -- factors

MOVED = """agraph (float[A, 2] x) => (float[3, A] y)
    <float[2, 3] w = {1, 2, 3, 4, 5, 6}, float c = {2.5}, float[1, 1, 1] k = {2.5},
     float z = {0}>"""


@pytest.mark.parametrize("scale", ["Div (t, c)", "Mul (c, t)"])
def test_a_factor_after_data_movement_is_folded_into_the_weight(scale: str) -> None:
    found = left(f"{MOVED} {{ m = MatMul (x, w) t = Transpose (m) y = {scale} }}")
    assert found == {"MatMul": 1, "Transpose": 1}


@pytest.mark.parametrize(
    "nodes",
    [
        "m = MatMul (x, w) t = Transpose (m) y = Div (c, t)",
        "m = MatMul (x, w) t = Transpose (m) y = Div (t, z)",
        "m = MatMul (x, w) t0 = Transpose (m) t = Relu (t0) y = Div (t, c)",
        "m = MatMul (x, w) t = Transpose (m) u = Div (t, c) y = Add (u, t)",
        "v = Abs (w) m = MatMul (x, v) t = Transpose (m) y = Div (t, c)",
    ],
)
def test_other_factors_stay(nodes: str) -> None:
    stays(f"{MOVED} {{ {nodes} }}")


def test_a_factor_with_more_axes_stays() -> None:
    nodes = "m = MatMul (x, w) t = Transpose (m) y = Div (t, k)"
    stays(f"{MOVED.replace('[3, A] y', '[1, 3, A] y')} {{ {nodes} }}")


# -- gates

GATED = """agraph (float[A, 2] x) => ({outputs})
    <float[2, 2] w = {{1, 2, 3, 4}}, float[2, 2] v = {{5, 6, 7, 8}}, float[2] b = {{0.5, -1}},
     float[A, 2] h, float[A, 2] g, float a = {{{factor}}}> {{ {nodes} }}"""
GATE = "k = Mul (h, a) s = Sigmoid (k) g = Mul (h, s)"
BETWEEN_MAPS = f"m = MatMul (x, w) h = Add (m, b) {GATE} y = MatMul (g, v)"


def gated(nodes: str, factor: float = 1.702, outputs: str = "float[A, 2] y") -> str:
    return GATED.format(nodes=nodes, factor=factor, outputs=outputs)


def test_the_factor_of_a_gate_is_folded_into_the_layers_around_it() -> None:
    result = check(Small(), HEADER + gated(BETWEEN_MAPS))
    found = Counter(node.op_type for node in result.graph.nodes)
    assert found == {"MatMul": 2, "Add": 1, "Sigmoid": 1, "Mul": 1}
    weights: list[Any] = [
        result.graph.const(n.input[1]) for n in result.graph.nodes if n.op_type == "MatMul"
    ]
    np.testing.assert_allclose(weights[0], 1.702 * np.array([[1, 2], [3, 4]]), rtol=1e-6)
    np.testing.assert_allclose(weights[1], np.array([[5, 6], [7, 8]]) / 1.702, rtol=1e-6)


@pytest.mark.parametrize(
    "nodes",
    [
        f"h = Gemm (x, w, b) {GATE} y = Gemm (g, v, b)",
        f"h = MatMul (x, w) {GATE} y = Gemm <transB = 1> (g, v)",
    ],
)
def test_the_factor_of_a_gate_is_folded_into_gemm(nodes: str) -> None:
    assert left(gated(nodes))["Mul"] == 1


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (BETWEEN_MAPS, "float[A, 2] y, float[A, 2] h"),
        (BETWEEN_MAPS, "float[A, 2] y, float[A, 2] g"),
        (f"m = MatMul (x, w) h = Add (m, b) {GATE} y = Neg (g)", "float[A, 2] y"),
        (f"h = Neg (x) {GATE} y = MatMul (g, v)", "float[A, 2] y"),
        (f"m = MatMul (x, w) h = Add (m, x) {GATE} y = MatMul (g, v)", "float[A, 2] y"),
        (BETWEEN_MAPS.replace("(g, v)", "(g, x)").replace("x, w", "v, w"), "float[A, 2] y"),
        (f"h = MatMul (x, w) {GATE} y = Gemm <transA = 1> (g, v)", "float[2, 2] y"),
    ],
)
def test_gates_that_are_not_between_layers_keep_their_factor(nodes: str, outputs: str) -> None:
    feed = {"x": np.ones((2, 2), np.float32)}
    stays(gated(nodes, outputs=outputs), inputs=feed)


@pytest.mark.parametrize("factor", [-1.702, 0.0, 1e4])
def test_a_factor_out_of_range_stays(factor: float) -> None:
    stays(gated(BETWEEN_MAPS, factor))


SOURCES = "float[2, 3, 3, 4] x, float[3, 3, 4] c"
SIZES = "int64[3] merged = {6, 3, 4}, int64[4] split = {2, 3, 3, 4}, int64[3] twice = {2, 1, 1}"


@pytest.mark.parametrize(
    "nodes",
    [
        "t = Exp (m) y = Reshape (t, split) u = Abs (t) z = Reshape (u, split)",
        "t = Exp (m) y = Reshape (t, split) z = Reshape (t, split)",
        "y = Reshape (m, split) t = Exp (m) z = Reshape (t, split)",
    ],
)
def test_a_split_with_two_outputs_of_the_graph(nodes: str) -> None:
    found = left(
        f"""g ({SOURCES}) => (float[2, 3, 3, 4] y, float[2, 3, 3, 4] z) <{SIZES}> {{
            a = Neg (x) m = Reshape (a, merged) {nodes}
        }}"""
    )
    assert not found["Reshape"]


def test_repeated_values_stay_repeated() -> None:
    stays(
        f"""g ({SOURCES}) => (float[2, 3, 3, 4] y) <{SIZES}> {{
            a = Neg (c) m = Tile (a, twice) y = Reshape (m, split)
        }}"""
    )
