"""`fuse-norms`: all forms of a norm become one operator with its scale and bias.

A case is the nodes alone, between `x` ([B, S, 4] unless told otherwise) and `y`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, printer, shape_inference

from passes.fuse.norm.fuse_norms import FuseNorms
from tests.checks import check, model, parse, random_feeds, text_of
from tests.ort import session
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.settings import Settings

FUSE = FuseNorms()
HEADER = '<ir_version: 10, opset_import: ["" : {}, "com.microsoft" : 1]>\n'

CONSTANTS = {
    "float two": "2.0",
    "float half": "0.5",
    "float minus_half": "-0.5",
    "float one": "1.0",
    "float zero": "0.0",
    "float eps": "0.00001",
    "float[1] eps1": "0.00001",
    "int64[1] last": "-1",
    "int64[1] third": "2",
    "int64[1] middle": "1",
    "int64[2] last2": "-2, -1",
    "float[4] w": "1.5, -2.0, 0.5, 3.0",
    "float[4] b": "0.1, 0.2, -0.3, 0.4",
    "float[4] ones": "1.0, 1.0, 1.0, 1.0",
    "float[3] w3": "1.5, -2.0, 0.5",
}


def typed(text: str) -> str:
    """Return the model as text, with the inferred types of its values."""
    return printer.to_text(shape_inference.infer_shapes(parse(text)))


def graph(nodes: str, shape: str = "B,S,4", opset: int = 23, outputs: str = "") -> str:
    stored = ", ".join(f"{name} = {{{value}}}" for name, value in CONSTANTS.items())
    result = outputs or f"float[{shape}] y"
    return f"{HEADER.format(opset)}g (float[{shape}] x) => ({result}) <{stored}> {{ {nodes} }}"


def becomes(nodes: str, after: str, shape: str = "B,S,4") -> Model:
    return check(FUSE, typed(graph(nodes, shape)), graph(after, shape))


def becomes_only(nodes: str, ops: list[str], shape: str = "B,S,4") -> Model:
    found = check(FUSE, typed(graph(nodes, shape)))
    assert [node.op_type for node in found.graph.nodes] == ops, text_of(found)
    return found


def stays(nodes: str, shape: str = "B,S,4", opset: int = 23, outputs: str = "") -> None:
    check(FUSE, typed(graph(nodes, shape, opset, outputs)), near_miss=True)


# -- rms norm

SQUARES = {"power": "q = Pow (x, two) ", "product": "q = Mul (x, x) "}
RMS_ENDS = {
    "reciprocal of root": "s = Sqrt (v) r = Reciprocal (s) n = Mul (x, r) ",
    "one over root": "s = Sqrt (v) r = Div (one, s) n = Mul (r, x) ",
    "divided by root": "s = Sqrt (v) n = Div (x, s) ",
    "power of minus a half": "r = Pow (v, minus_half) n = Mul (x, r) ",
    "power of a half": "s = Pow (v, half) n = Div (x, s) ",
    "root of reciprocal": "i = Reciprocal (v) r = Sqrt (i) n = Mul (x, r) ",
}
RMS = "y = RMSNormalization <axis = -1, epsilon = 0.00001> (x, w)"


@pytest.mark.parametrize("square", SQUARES.values(), ids=list(SQUARES))
@pytest.mark.parametrize("end", RMS_ENDS.values(), ids=list(RMS_ENDS))
def test_rms_norm(square: str, end: str) -> None:
    middle = "m = ReduceMean (q, last) v = Add (m, eps) "
    becomes(square + middle + end + "y = Mul (w, n)", RMS)


def test_rms_norm_whose_weight_meets_the_root_first() -> None:
    start = "q = Mul (x, x) m = ReduceMean (q, third) v = Add (eps1, m) s = Sqrt (v) "
    becomes(start + "r = Reciprocal (s) t = Mul (r, w) y = Mul (x, t)", RMS)
    becomes(start + "t = Div (w, s) y = Mul (t, x)", RMS)


CORE = "q = Mul (x, x) m = ReduceMean (q, last) v = Add (m, eps) s = Sqrt (v) "


def test_rms_norm_without_a_weight() -> None:
    becomes(
        CORE + "y = Div (x, s)", "y = RMSNormalization <axis = -1, epsilon = 0.00001> (x, ones)"
    )


def test_rms_norm_without_an_epsilon() -> None:
    becomes(
        "q = Mul (x, x) m = ReduceMean (q, last) s = Sqrt (m) n = Div (x, s) y = Mul (n, w)",
        "y = RMSNormalization <axis = -1, epsilon = 0.0> (x, w)",
    )


def test_rms_norm_of_heads() -> None:
    becomes(CORE + "n = Div (x, s) y = Mul (n, w)", RMS, "B,2,S,4")


def test_rms_norm_over_other_axes_goes_between_transposes() -> None:
    core = "q = Mul (x, x) m = ReduceMean (q, middle) v = Add (m, eps) s = Sqrt (v) "
    becomes(
        core + "n = Div (x, s) o = Constant <value = float[4,1,1] {1.5, -2.0, 0.5, 3.0}> () "
        "y = Mul (o, n)",
        "t = Transpose <perm = [0, 2, 3, 1]> (x) "
        "n = RMSNormalization <axis = -1, epsilon = 0.00001> (t, w) "
        "y = Transpose <perm = [0, 3, 1, 2]> (n)",
        "B,4,H,W",
    )


def test_two_weights_on_one_norm_make_two_norms() -> None:
    outputs = "float[B,S,4] y, float[B,S,4] z"
    nodes = CORE + "n = Div (x, s) y = Mul (n, w) z = Mul (n, b)"
    found = check(FUSE, typed(graph(nodes, outputs=outputs)))
    assert [node.op_type for node in found.graph.nodes] == ["RMSNormalization"] * 2


def test_a_norm_with_other_users_keeps_its_weight_outside() -> None:
    outputs = "float[B,S,4] y, float[B,S,4] z"
    nodes = CORE + "n = Div (x, s) y = Mul (n, w) z = Neg (n)"
    found = check(FUSE, typed(graph(nodes, outputs=outputs)))
    ops = sorted(node.op_type for node in found.graph.nodes)
    assert ops == ["Mul", "Neg", "RMSNormalization"]


@pytest.mark.parametrize(
    "nodes",
    [
        CORE + "z = Abs (x) y = Div (z, s)",  # another numerator
        "q = Pow (x, w) m = ReduceMean (q, last) v = Add (m, eps) s = Sqrt (v) y = Div (x, s)",
        "q = Mul (x, x) m = ReduceMax (q, last) v = Add (m, eps) s = Sqrt (v) y = Div (x, s)",
        "q = Mul (x, x) m = ReduceMean (q, last) v = Sub (m, eps) s = Sqrt (v) y = Div (x, s)",
        "q = Mul (x, x) m = ReduceMean (q, last) s = Sqrt (m) v = Add (s, eps) y = Div (x, v)",
        "q = Mul (x, x) m = ReduceMean (q, last) v = Add (m, w) s = Sqrt (v) y = Div (x, s)",
        "a = Abs (x) m = ReduceMean (a, last) v = Add (m, eps) s = Sqrt (v) y = Div (x, s)",
    ],
)
def test_near_misses_of_rms_norm_stay(nodes: str) -> None:
    stays(nodes)


def test_rms_norm_needs_opset_23() -> None:
    stays(CORE + "y = Div (x, s)", opset=22)


def test_rms_norm_with_an_intermediate_output_stays() -> None:
    stays(CORE + "y = Div (x, s)", outputs="float[B,S,4] y, float[B,S,1] s")


def test_rms_norm_over_an_axis_of_unknown_size_stays() -> None:
    stays(CORE + "y = Div (x, s)", "B,4,D")


def test_a_reduction_that_drops_its_axis_stays() -> None:
    nodes = (
        "q = Mul (x, x) m = ReduceMean <keepdims = 0> (q, last) v = Add (m, eps) s = Sqrt (v) "
        "y = Div (x, s)"
    )
    stays(nodes, "4,4")


def test_l2_norm_is_an_rms_norm_of_another_scale() -> None:
    scale = "c = Constant <value = float[4] {0.5, 0.5, 0.5, 0.5}> () "
    plain = scale + "y = RMSNormalization <axis = -1, epsilon = 0.0> (x, c)"
    becomes("s = ReduceL2 (x, last) y = Div (x, s)", plain)
    becomes("q = Mul (x, x) t = ReduceSum (q, last) s = Sqrt (t) y = Div (x, s)", plain)
    becomes(
        "q = Mul (x, x) t = ReduceSum (q, last) v = Add (t, eps) s = Sqrt (v) y = Div (x, s)",
        scale + "y = RMSNormalization <axis = -1, epsilon = 0.0000025> (x, c)",
    )


def test_an_l2_norm_with_a_limit_for_zeros() -> None:
    """The limit is that of torch; epsilon is its square divided by the number of elements."""
    signature = """g (float[B,S,4] x) => (float[B,S,4] y)
        <int64[1] last = {-1}, float tiny = {1e-12}>"""
    values = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    values[0, 1] = 0
    for limited in ("Max (s, tiny)", "Clip (s, tiny)"):
        nodes = f"s = ReduceL2 (x, last) c = {limited} y = Div (x, c)"
        text = f"{HEADER.format(23)}{signature} {{ {nodes} }}"
        result = check(FUSE, typed(text), inputs={"x": values})
        norms = [n for n in result.graph.nodes if n.op_type == "RMSNormalization"]
        assert [a.f for n in norms for a in n.attribute if a.name == "epsilon"] == [
            pytest.approx(2.5e-25)
        ]
    double = f"{HEADER.format(23)}{signature} {{ {nodes} }}".replace("float", "double")
    check(FUSE, typed(double), near_miss=True)


def test_an_l2_norm_with_a_large_limit_stays() -> None:
    stays("s = ReduceL2 (x, last) c = Clip (s, eps) y = Div (x, c)")
    stays("s = ReduceL2 (x, last) c = Add (s, eps) y = Div (x, c)")


# -- layer norm

DIFFERENCE = "m = ReduceMean (x, last) d = Sub (x, m) "
VARIANCES = {
    "power": DIFFERENCE + "q = Pow (d, two) u = ReduceMean (q, last) v = Add (u, eps) ",
    "product": DIFFERENCE + "q = Mul (d, d) u = ReduceMean (q, last) v = Add (eps1, u) ",
    "computed twice": DIFFERENCE + "m2 = ReduceMean (x, third) d2 = Sub (x, m2) q = Mul (d2, d2) "
    "u = ReduceMean (q, last) v = Add (u, eps) ",
    "mean of squares": DIFFERENCE + "q = Mul (x, x) t = ReduceMean (q, last) o = Mul (m, m) "
    "u = Sub (t, o) v = Add (u, eps) ",
    "mean of squares, not negative": DIFFERENCE + "q = Mul (x, x) t = ReduceMean (q, last) "
    "o = Mul (m, m) u = Sub (t, o) c = Max (u, zero) v = Add (c, eps) ",
}
LN_ENDS = {
    name: end.replace("(x,", "(d,").replace(", x)", ", d)") for name, end in RMS_ENDS.items()
}
LN = "y = LayerNormalization <axis = -1, epsilon = 0.00001> (x, w, b)"


@pytest.mark.parametrize("variance", VARIANCES.values(), ids=list(VARIANCES))
@pytest.mark.parametrize("end", LN_ENDS.values(), ids=list(LN_ENDS))
def test_layer_norm(variance: str, end: str) -> None:
    becomes(variance + end + "k = Mul (n, w) y = Add (b, k)", LN)


VARIANCE = VARIANCES["power"]


@pytest.mark.parametrize("inverse", ["s = Sqrt (v) r = Reciprocal (s)", "r = Pow (v, minus_half)"])
def test_layer_norm_as_scale_and_offset(inverse: str) -> None:
    """The form of TensorFlow and Keras."""
    start = VARIANCE + inverse + " k = Mul (r, w) a = Mul (x, k) "
    becomes(start + "c = Mul (m, k) e = Sub (b, c) y = Add (a, e)", LN)
    becomes(start + "j = Neg (m) c = Mul (j, k) e = Add (c, b) y = Add (a, e)", LN)


def test_other_scales_and_offsets_stay() -> None:
    line = " c = Mul (m, w3) e = Sub (b, c) a = Mul (x, w) y = Add (a, e)"
    stays("m = ReduceMean (x, last)" + line.replace("w3", "half"))  # another factor
    stays("q = Pow (x, two) m = ReduceMean (q, last)" + line.replace("w3", "w"))


def test_layer_norm_by_pooling() -> None:
    """The form of TensorFlow's exporter for means along the last of three axes."""
    core = VARIANCE.replace("ReduceMean (x, last)", "GlobalAveragePool (x)")
    core = core.replace("ReduceMean (q, last)", "GlobalAveragePool (q)")
    end = "s = Sqrt (v) n = Div (d, s) k = Mul (n, w) y = Add (b, k)"
    becomes(core + end, LN)
    stays(core.replace("GlobalAveragePool (q)", "GlobalMaxPool (q)") + end)


def test_layer_norm_without_scale_or_bias() -> None:
    core = VARIANCE + "s = Sqrt (v) n = Div (d, s) "
    head = "y = LayerNormalization <axis = -1, epsilon = 0.00001> "
    becomes(core + "y = Identity (n)", "n = " + head[4:] + "(x, ones) y = Identity (n)")
    becomes(core + "y = Mul (n, w)", head + "(x, w)")
    becomes(core + "y = Add (n, b)", head + "(x, ones, b)")


def test_layer_norm_by_attributes() -> None:
    nodes = (
        "m = ReduceMean <axes = [-1]> (x) d = Sub (x, m) q = Pow (d, two) "
        "u = ReduceMean <axes = [-1]> (q) v = Add (u, eps) s = Sqrt (v) n = Div (d, s) "
        "k = Mul (n, w) y = Add (k, b)"
    )
    check(FUSE, typed(graph(nodes, opset=17)), graph(LN, opset=17))
    stays(nodes, opset=16)


def test_layer_norm_over_two_axes() -> None:
    core = VARIANCE.replace("last", "last2") + "s = Sqrt (v) n = Div (d, s) "
    becomes_only(core + "y = Identity (n)", ["LayerNormalization", "Identity"], "B,3,4")


def test_layer_norm_of_channels_first() -> None:
    core = VARIANCE.replace("last", "middle") + "s = Sqrt (v) n = Div (d, s) "
    weight = "o = Constant <value = float[4,1,1] {1.5, -2.0, 0.5, 3.0}> () "
    bias = "p = Constant <value = float[4,1,1] {0.1, 0.2, -0.3, 0.4}> () "
    becomes(
        core + weight + bias + "k = Mul (o, n) y = Add (k, p)",
        "t = Transpose <perm = [0, 2, 3, 1]> (x) "
        "n = LayerNormalization <axis = -1, epsilon = 0.00001> (t, w, b) "
        "y = Transpose <perm = [0, 3, 1, 2]> (n)",
        "B,4,H,W",
    )


@pytest.mark.parametrize(
    "nodes",
    [
        VARIANCE + "s = Sqrt (v) y = Div (x, s)",  # not centered
        VARIANCE + "s = Sqrt (v) e = Abs (d) y = Div (e, s)",
        VARIANCE.replace("(q, last)", "(q, middle)") + "s = Sqrt (v) y = Div (d, s)",
        DIFFERENCE + "q = Mul (d, d) u = ReduceSum (q, last) h = Mul (u, half) s = Sqrt (h) "
        "y = Div (d, s)",  # a variance divided by another count
        DIFFERENCE + "q = Mul (d, d) u = ReduceMean (q, last) s = Sqrt (u) v = Add (s, eps) "
        "y = Div (d, v)",  # epsilon outside of the root
    ],
)
def test_near_misses_of_layer_norm_stay(nodes: str) -> None:
    stays(nodes)


def test_a_layer_norm_with_a_used_mean_is_the_rms_norm_of_a_difference() -> None:
    nodes = VARIANCE + "s = Sqrt (v) y = Div (d, s)"
    outputs = "float[B,S,4] y, float[B,S,1] m"
    after = DIFFERENCE + "y = RMSNormalization <axis = -1, epsilon = 0.00001> (d, ones)"
    check(FUSE, typed(graph(nodes, outputs=outputs)), graph(after, outputs=outputs))


def test_a_layer_norm_with_a_used_deviation_stays() -> None:
    stays(
        VARIANCE + "s = Sqrt (v) y = Div (d, s)",
        outputs="float[B,S,4] y, float[B,S,1] s",
    )


# -- scale and bias


HEAD = "n = LayerNormalization <axis = -1, epsilon = 0.00001> "
AFTER = "y = LayerNormalization <axis = -1, epsilon = 0.00001> "


@pytest.mark.parametrize(
    ("nodes", "after"),
    [
        (HEAD + "(x, ones) k = Mul (n, w) y = Add (k, b)", AFTER + "(x, w, b)"),
        (HEAD + "(x, w) y = Add (n, b)", AFTER + "(x, w, b)"),
        (
            HEAD + "(x, w, b) y = Mul (n, two)",
            "c = Constant <value = float[4] {3.0, -4.0, 1.0, 6.0}> () "
            "d = Constant <value = float[4] {0.2, 0.4, -0.6, 0.8}> () " + AFTER + "(x, c, d)",
        ),
        (
            HEAD + "(x, ones, b) y = Sub (n, b)",
            "c = Constant <value = float[4] {0.0, 0.0, 0.0, 0.0}> () " + AFTER + "(x, ones, c)",
        ),
        (
            HEAD + "(x, w) y = Div (n, half)",
            "c = Constant <value = float[4] {3.0, -4.0, 1.0, 6.0}> () " + AFTER + "(x, c)",
        ),
    ],
)
def test_following_operators_are_folded_into_scale_and_bias(nodes: str, after: str) -> None:
    becomes(nodes, after)


@pytest.mark.parametrize(
    "nodes",
    [
        HEAD + "(x, ones) k = Mul (n, w) j = Neg (n) y = Add (k, j)",  # used twice
        HEAD + "(x, ones) y = Mul (n, x)",
        HEAD + "(x, ones) y = Sub (b, n)",
        HEAD + "(x, w) k = ReduceMax (x, last) y = Mul (n, k)",  # varies by token
        "n = RMSNormalization <axis = -1, epsilon = 0.00001> (x, w) y = Add (n, b)",
        "n, mean = LayerNormalization <axis = -1> (x, ones) k = Mul (n, w) y = Add (k, mean)",
    ],
)
def test_other_operands_than_scale_and_bias_stay(nodes: str) -> None:
    stays(nodes)


def test_a_scale_that_adds_an_axis_stays() -> None:
    nodes = HEAD + "(x, ones) c = Constant <value = float[1,1,1,1] {2.0}> () y = Mul (n, c)"
    stays(nodes, outputs="float[1,B,S,4] y")


def test_a_computed_scale_is_used_unchanged() -> None:
    text = (
        f"{HEADER.format(23)}g (float[B,S,4] x, float[4] c) => (float[B,S,4] y) "
        "<float[4] ones = {1.0, 1.0, 1.0, 1.0}> { a = Exp (c) "
        "n = RMSNormalization <axis = -1> (x, ones) y = Mul (n, a) }"
    )
    check(FUSE, typed(text), "a = Exp (c) y = RMSNormalization <axis = -1> (x, a)")


# -- half precision


def half_graph(nodes: str, constants: str) -> str:
    return (
        f"{HEADER.format(23)}g (float16[B,S,4] x) => (float16[B,S,4] y) <float eps = {{0.00001}}, "
        f"int64[1] last = {{-1}}, {constants}> {{ {nodes} }}"
    )


BITS = [int(np.float16(value).view(np.uint16)) for value in (1.5, -2.0, 0.5, 3.0)]
HALVES = f"float16[4] w = {{{', '.join(map(str, BITS))}}}"
ISLAND = (
    "c = Cast <to = 1> (x) q = Mul (c, c) m = ReduceMean (q, last) v = Add (m, eps) s = Sqrt (v) "
)


def test_a_half_precision_rms_norm_computed_in_float_fuses_in_half() -> None:
    after = half_graph(RMS, HALVES)
    llama = ISLAND + "n = Div (c, s) h = Cast <to = 10> (n) y = Mul (w, h)"
    check(FUSE, typed(half_graph(llama, HALVES)), after, atol=4e-3)
    root_cast = ISLAND + "r = Reciprocal (s) h = Cast <to = 10> (r) n = Mul (x, h) y = Mul (w, n)"
    check(FUSE, typed(half_graph(root_cast, HALVES)), after, atol=8e-3)


def test_a_half_precision_layer_norm_partly_in_double_fuses_in_half() -> None:
    """The form of TorchScript below opset 17."""
    nodes = (
        "m = ReduceMean (x, last) d = Sub (x, m) c = Cast <to = 11> (d) q = Pow (c, two) "
        "u = ReduceMean (q, last) v = Add (u, wide) s = Sqrt (v) n = Div (c, s) "
        "h = Cast <to = 10> (n) k = Mul (h, w) y = Add (k, w)"
    )
    constants = f"{HALVES}, double two = {{2.0}}, double wide = {{0.00001}}"
    after = "y = LayerNormalization <axis = -1, epsilon = 0.00001> (x, w, w)"
    check(FUSE, typed(half_graph(nodes, constants)), half_graph(after, constants), atol=8e-3)


def test_a_norm_with_a_double_result_stays_in_double() -> None:
    nodes = (
        "m = ReduceMean (x, last) d = Sub (x, m) c = Cast <to = 11> (d) q = Mul (c, c) "
        "u = ReduceMean (q, last) v = Add (u, wide) s = Sqrt (v) n = Div (c, s) "
        "k = Mul (n, n) y = Cast <to = 10> (k)"
    )
    text = typed(half_graph(nodes, "double wide = {0.00001}"))
    found = check(FUSE, text, atol=8e-3)
    assert "LayerNormalization" not in text_of(found)


def test_weights_of_a_higher_precision_stay_in_float() -> None:
    wide = "float[4] w = {1.50001, -2.0, 0.5, 3.0}"
    nodes = ISLAND + "n = Div (c, s) k = Mul (w, n) y = Cast <to = 10> (k)"
    found = check(FUSE, typed(half_graph(nodes, wide)), atol=4e-3)
    assert [node.op_type for node in found.graph.nodes] == ["Cast", "RMSNormalization", "Cast"]


# -- contrib spellings

MS = "com.microsoft"


@pytest.mark.parametrize(
    ("nodes", "after"),
    [
        (
            f"y = {MS}.SkipLayerNormalization <epsilon = 0.00001> (x, x, w, b)",
            "s = Add (x, x) " + AFTER + "(s, w, b)",
        ),
        (
            f"y = {MS}.SkipLayerNormalization <epsilon = 0.00001> (x, x, w, b, w)",
            "t = Add (x, x) s = Add (t, w) " + AFTER + "(s, w, b)",
        ),
        (
            f"y = {MS}.SkipSimplifiedLayerNormalization <epsilon = 0.00001> (x, x, w)",
            "s = Add (x, x) y = RMSNormalization <axis = -1, epsilon = 0.00001> (s, w)",
        ),
        ("y = SimplifiedLayerNormalization <epsilon = 0.00001> (x, w)", RMS),
    ],
)
def test_contrib_norms(nodes: str, after: str) -> None:
    check(FUSE, graph(nodes, "2,3,4"), graph(after, "2,3,4"))


def test_the_sum_of_a_skip_norm_is_its_fourth_output() -> None:
    nodes = f"y, mean, deviation, z = {MS}.SkipLayerNormalization <epsilon = 0.00001> (x, x, w, b)"
    outputs = "float[2,3,4] y, float[2,3,4] z"
    after = "z = Add (x, x) " + AFTER + "(z, w, b)"
    check(FUSE, graph(nodes, "2,3,4", outputs=outputs), graph(after, "2,3,4", outputs=outputs))


def test_a_skip_norm_with_used_statistics_stays() -> None:
    nodes = f"y, mean = {MS}.SkipLayerNormalization (x, x, w, b)"
    text = graph(nodes, "2,3,4", outputs="float[2,3,4] y, float[2,3,1] mean")
    check(FUSE, text, near_miss=True, run=False)


# -- instance and group norm


IMAGE = "N,4,H,W"
AXES = "int64[2] space = {2, 3}"
SPACE = VARIANCE.replace("last", "last2") + "s = Sqrt (v) n = Div (d, s) "
PER_CHANNEL = (
    "o = Constant <value = float[4,1,1] {1.5, -2.0, 0.5, 3.0}> () "
    "p = Constant <value = float[4,1,1] {0.1, 0.2, -0.3, 0.4}> () k = Mul (o, n) y = Add (k, p)"
)


def test_instance_norm() -> None:
    after = "y = InstanceNormalization <epsilon = 0.00001> (x, w, b)"
    becomes(SPACE + PER_CHANNEL, after, IMAGE)


def test_instance_norm_of_sequences() -> None:
    nodes = VARIANCE + "s = Sqrt (v) n = Div (d, s) " + PER_CHANNEL.replace("[4,1,1]", "[4,1]")
    becomes(nodes, "y = InstanceNormalization <epsilon = 0.00001> (x, w, b)", "N,4,L")


def test_instance_norm_between_reshapes() -> None:
    nodes = (
        "a = Constant <value = int64[3] {0, 4, -1}> () r = Reshape (x, a) "
        "n = InstanceNormalization <epsilon = 0.00001> (r, w, b) "
        "c = Constant <value = int64[4] {2, 4, 3, 3}> () y = Reshape (n, c)"
    )
    becomes(nodes, "y = InstanceNormalization <epsilon = 0.00001> (x, w, b)", "2,4,3,3")


GROUPS = (
    "a = Constant <value = int64[3] {0, 2, -1}> () r = Reshape (x, a) "
    "i = Constant <value = float[2] {1.0, 1.0}> () j = Constant <value = float[2] {0.0, 0.0}> () "
    "g = InstanceNormalization <epsilon = 0.00001> (r, i, j) "
    "c = Constant <value = int64[4] {2, 4, 3, 3}> () n = Reshape (g, c) "
)


def run_for_onnx(text: str) -> Model:
    """Check the result for the target `onnx`."""
    original = parse(text)
    subject = model(text)
    FUSE.run(subject, Context(Settings(target="onnx")))
    fed: dict[str, Any] = random_feeds(subject)
    before = session(original).run(None, fed)
    after = session(subject.inlined_proto()).run(None, fed)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(np.asarray(new), np.asarray(old), atol=1e-5)
    return subject


def test_group_norm_is_for_other_targets() -> None:
    stays(GROUPS + PER_CHANNEL, "2,4,3,3")
    subject = run_for_onnx(typed(graph(GROUPS + PER_CHANNEL, "2,4,3,3")))
    (node,) = subject.graph.nodes
    assert node.op_type == "GroupNormalization"
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert attributes["num_groups"] == 2


def test_groups_across_the_batch_stay() -> None:
    nodes = GROUPS.replace("{0, 2, -1}", "{1, 2, -1}") + PER_CHANNEL
    subject = run_for_onnx(typed(graph(nodes, "2,4,3,3")))
    assert "GroupNormalization" not in text_of(subject)
