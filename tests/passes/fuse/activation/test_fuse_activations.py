"""`fuse-activations`: all forms are fused, near misses stay.

A case is the nodes alone, between `x` and `y`; constants are named in `NUMBERS`.
"""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, printer, shape_inference

from passes.fuse.activation.fuse_activations import FuseActivations
from tests.checks import assert_same_outputs, check, model, parse, random_feeds, text_of
from toolkit.pass_manager.protocol import Context
from toolkit.settings import Settings

FUSE = FuseActivations()
HEADER = '<ir_version: 10, opset_import: ["" : {}, "com.microsoft" : 1]>\n'

NUMBERS = {
    "zero": 0.0,
    "one": 1.0,
    "two": 2.0,
    "three": 3.0,
    "six": 6.0,
    "half": 0.5,
    "minus": -1.0,
    "sixth": 1 / 6,
    "rough_sixth": 0.1667,
    "tenth": 0.1,
    "root2": 1.4142135381698608,
    "root_half": 0.7071067811865476,
    "root_minus": -0.7071067811865476,
    "k": 0.7978845834732056,
    "k2": 1.5957691669464111,
    "cubic": 0.044714998453855515,
    "k_cubic": 0.035677408136,
    "quick": 1.7020000219345093,
    "twenty": 20.0,
}


def typed(text: str) -> str:
    """Return the model as text, with the inferred types of its values."""
    return printer.to_text(shape_inference.infer_shapes(parse(text)))


def spelled(value: float, dtype: str) -> str:
    """Return a number in ONNX text, which writes half precision as bits."""
    return str(np.float16(value).view(np.uint16)) if dtype == "float16" else f"{value:.9f}"


def graph(nodes: str, dtype: str = "float", opset: int = 23) -> str:
    stored = ", ".join(
        f"{dtype} {name} = {{{spelled(value, dtype)}}}" for name, value in NUMBERS.items()
    )
    wide = "float wide_half = {0.5}, float wide_one = {1.0}, float wide_root = {1.41421354}"
    signature = f"g ({dtype}[N,4] x) => ({dtype}[N,4] y) <{stored}, {wide}>"
    return f"{HEADER.format(opset)}{signature} {{ {nodes} }}"


def becomes(nodes: str, after: str, dtype: str = "float", atol: float = 1e-5) -> None:
    check(FUSE, typed(graph(nodes, dtype)), graph(after, dtype), atol=atol)


def stays(nodes: str, dtype: str = "float", opset: int = 23, run: bool = True) -> None:
    check(FUSE, typed(graph(nodes, dtype, opset)), near_miss=True, run=run)


# -- Gelu

ERF = "a = Div (x, root2) e = Erf (a) p = Add (e, one) "
ERF_GELUS = {
    "product of the sum first": ERF + "m = Mul (x, p) y = Mul (m, half)",
    "half of x first": ERF + "h = Mul (half, x) y = Mul (h, p)",
    "half of the sum first": ERF + "h = Mul (p, half) y = Mul (x, h)",
    "divided by two": ERF + "m = Mul (p, x) y = Div (m, two)",
    "scaled by a product": "a = Mul (root_half, x) e = Erf (a) p = Add (one, e) "
    "m = Mul (x, p) y = Mul (half, m)",
    "half multiplied in": "a = Div (x, root2) e = Erf (a) h = Mul (e, half) p = Add (h, half) "
    "y = Mul (x, p)",
    "complement of the negative": "a = Mul (x, root_minus) e = Erf (a) p = Sub (one, e) "
    "m = Mul (x, p) y = Mul (m, half)",
    "half multiplied in, of the negative": "a = Mul (x, root_minus) e = Erf (a) h = Mul (e, half) "
    "p = Sub (half, h) y = Mul (x, p)",
    "multiplied out": "a = Div (x, root2) e = Erf (a) h = Mul (x, half) m = Mul (h, e) "
    "y = Add (h, m)",
}


@pytest.mark.parametrize("nodes", ERF_GELUS.values(), ids=list(ERF_GELUS))
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_gelu(nodes: str, dtype: str) -> None:
    becomes(nodes, "y = Gelu (x)", dtype, atol=1e-5 if dtype == "float" else 4e-3)


END = "t = Tanh (u) p = Add (t, one) h = Mul (x, half) y = Mul (h, p)"
TANH_GELUS = {
    "cube as power": "q = Pow (x, three) c = Mul (q, cubic) s = Add (x, c) u = Mul (s, k) " + END,
    "cube as product": "q = Mul (x, x) r = Mul (x, q) c = Mul (cubic, r) s = Add (c, x) "
    "u = Mul (k, s) " + END,
    "square of a power": "q = Pow (x, two) r = Mul (q, x) c = Mul (cubic, r) s = Add (c, x) "
    "u = Mul (k, s) " + END,
    "factored": "v = Mul (x, k) w = Mul (x, cubic) q = Mul (w, x) s = Add (q, one) "
    "u = Mul (v, s) " + END,
    "factored, with a power": "v = Mul (x, k) w = Pow (x, two) q = Mul (w, cubic) s = Add (q, one) "
    "u = Mul (v, s) " + END,
    "multiplied out": "v = Mul (x, k) w = Pow (x, three) q = Mul (w, k_cubic) u = Add (v, q) "
    + END,
    "as a sigmoid": "q = Pow (x, three) c = Mul (q, cubic) s = Add (x, c) u = Mul (s, k2) "
    "g = Sigmoid (u) y = Mul (x, g)",
}


@pytest.mark.parametrize("nodes", TANH_GELUS.values(), ids=list(TANH_GELUS))
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_gelu_by_tanh(nodes: str, dtype: str) -> None:
    after = 'y = Gelu <approximate = "tanh"> (x)'
    becomes(nodes, after, dtype, atol=1e-5 if dtype == "float" else 8e-3)


def test_a_half_precision_gelu_computed_in_float_fuses_in_half() -> None:
    core = "a = Div (c, wide_root) e = Erf (a) p = Add (e, wide_one) "
    whole = f"c = Cast <to = 1> (x) {core} m = Mul (c, p) n = Mul (m, wide_half) "
    becomes(whole + "y = Cast <to = 10> (n)", "y = Gelu (x)", "float16", atol=4e-3)
    partly = f"c = Cast <to = 1> (x) {core} n = Mul (p, wide_half) d = Cast <to = 10> (n) "
    becomes(partly + "y = Mul (x, d)", "y = Gelu (x)", "float16", atol=4e-3)


@pytest.mark.parametrize(
    "nodes",
    [
        "a = Div (x, two) e = Erf (a) p = Add (e, one) m = Mul (x, p) y = Mul (m, half)",
        ERF + "m = Mul (x, p) y = Mul (m, two)",
        "a = Div (x, root2) e = Erf (a) p = Add (e, half) m = Mul (x, p) y = Mul (m, half)",
        "a = Div (x, root2) e = Erf (a) h = Mul (e, half) p = Sub (half, h) y = Mul (x, p)",
        "z = Neg (x) a = Div (z, root2) e = Erf (a) p = Add (e, one) m = Mul (x, p) "
        "y = Mul (m, half)",
        "q = Pow (x, two) c = Mul (q, cubic) s = Add (x, c) u = Mul (s, k) " + END,
        "q = Pow (x, three) c = Mul (q, tenth) s = Add (x, c) u = Mul (s, k) " + END,
        "s = Mul (x, quick) g = Sigmoid (s) y = Mul (x, g)",
    ],
)
def test_near_misses_of_gelu_do_not_fuse(nodes: str) -> None:
    stays(nodes)


def test_gelu_needs_opset_20() -> None:
    stays(ERF + "m = Mul (x, p) y = Mul (m, half)", opset=19)


def test_a_gelu_with_a_used_intermediate_stays() -> None:
    text = graph(ERF + "m = Mul (x, p) y = Mul (m, half)").replace(
        "(float[N,4] y)", "(float[N,4] y, float[N,4] e)"
    )
    check(FUSE, typed(text), near_miss=True)
    captured = """ g (bool b, float[4] x) => (float[4] y, float[4] z) <float root2 = {1.41421356},
        float one = {1.0}, float half = {0.5}> {
        a = Div (x, root2) e = Erf (a) p = Add (e, one) m = Mul (x, p) y = Mul (m, half)
        z = If (b) <then_branch = t () => (float[4] i) { i = Neg (e) },
                    else_branch = f () => (float[4] j) { j = Neg (x) }>
    }"""
    check(FUSE, HEADER.format(23) + captured, near_miss=True)


def test_a_constant_of_higher_rank_stays() -> None:
    text = graph(ERF + "m = Mul (x, p) y = Mul (m, deep)").replace(
        "float zero", "float[1,1,1] deep = {0.5}, float zero"
    )
    check(FUSE, typed(text.replace("=> (float[N,4] y)", "=> (float[1,N,4] y)")), near_miss=True)


def test_every_gelu_of_a_chain_fuses() -> None:
    nodes = ""
    for i in range(40):
        x, y = ("x" if not i else f"y{i - 1}"), ("y" if i == 39 else f"y{i}")
        nodes += (
            f"a{i} = Div ({x}, root2) e{i} = Erf (a{i}) p{i} = Add (e{i}, one) "
            f"m{i} = Mul ({x}, p{i}) {y} = Mul (m{i}, half) "
        )
    subject = model(typed(graph(nodes)))
    FUSE.run(subject, Context())
    assert {node.op_type for node in subject.graph.nodes} == {"Gelu"}, text_of(subject)


# -- contrib spellings

MS = "com.microsoft"


@pytest.mark.parametrize(
    ("nodes", "after"),
    [
        (f"y = {MS}.Gelu (x)", "y = Gelu (x)"),
        (f"y = {MS}.FastGelu (x)", 'y = Gelu <approximate = "tanh"> (x)'),
        (f"y = {MS}.BiasGelu (x, b)", "s = Add (x, b) y = Gelu (s)"),
        (f"y = {MS}.FastGelu (x, b)", 's = Add (x, b) y = Gelu <approximate = "tanh"> (s)'),
        (f"y = {MS}.QuickGelu (x)", "s = Mul (x, quick) g = Sigmoid (s) y = Mul (x, g)"),
        (f"y = {MS}.QuickGelu <alpha = 1.0> (x)", "g = Sigmoid (x) y = Mul (x, g)"),
    ],
)
def test_contrib_activations(nodes: str, after: str) -> None:
    vector = "float[4] b = {1.0, 2.0, -1.0, 0.5}, float zero"
    check(
        FUSE,
        graph(nodes).replace("float zero", vector, 1),
        graph(after).replace("float zero", vector, 1),
        atol=1e-4,
    )


# -- limits


@pytest.mark.parametrize(
    ("nodes", "after"),
    [
        ("y = Max (x, zero)", "y = Relu (x)"),
        ("y = Max (zero, x)", "y = Relu (x)"),
        ("c = Greater (x, zero) y = Where (c, x, zero)", "y = Relu (x)"),
        ("c = LessOrEqual (zero, x) y = Where (c, x, zero)", "y = Relu (x)"),
        ("c = Less (x, zero) y = Where (c, zero, x)", "y = Relu (x)"),
        ("m = Max (x, minus) y = Min (m, half)", "y = Clip (x, minus, half)"),
        ("m = Min (x, half) y = Max (minus, m)", "y = Clip (x, minus, half)"),
        ("m = Relu (x) y = Min (m, half)", "y = Clip (x, zero, half)"),
        ("m = Min (x, half) y = Relu (m)", "y = Clip (x, zero, half)"),
        ("m = Max (x, zero) y = Min (m, six)", "y = Clip (x, zero, six)"),
        ("s = Mul (x, tenth) y = Max (x, s)", "y = LeakyRelu <alpha = 0.1> (x)"),
        ("y = PRelu (x, tenth)", "y = LeakyRelu <alpha = 0.1> (x)"),
        (
            "c = Greater (x, zero) s = Mul (x, tenth) y = Where (c, x, s)",
            "y = LeakyRelu <alpha = 0.1> (x)",
        ),
        (
            "r = Relu (x) n = Neg (x) q = Relu (n) s = Mul (q, tenth) y = Sub (r, s)",
            "y = LeakyRelu <alpha = 0.1> (x)",
        ),
        (
            "r = Relu (x) n = Neg (x) q = Relu (n) s = Mul (q, minus) y = Add (r, s)",
            "y = LeakyRelu <alpha = 1.0> (x)",
        ),
        (
            "c = Less (x, zero) s = Mul (x, tenth) y = Where (c, s, x)",
            "y = LeakyRelu <alpha = 0.1> (x)",
        ),
    ],
)
def test_limits(nodes: str, after: str) -> None:
    becomes(nodes, after)


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Max (x, one)",
        "y = Min (x, zero)",
        "c = Greater (x, half) y = Where (c, x, zero)",
        "c = Greater (x, zero) y = Where (c, zero, x)",
        "c = Greater (zero, x) y = Where (c, x, zero)",
        "m = Max (x, half) y = Min (m, minus)",  # limits that are not in order
        "m = Relu (x) y = Min (m, minus)",
        "s = Mul (x, two) y = Max (x, s)",
        "s = Mul (x, minus) y = Max (x, s)",
        "c = Greater (x, zero) s = Add (x, tenth) y = Where (c, x, s)",
    ],
)
def test_other_limits_stay(nodes: str) -> None:
    stays(nodes)


def test_a_slope_for_each_channel_stays() -> None:
    check(
        FUSE,
        typed("g (float[N,2] x) => (float[N,2] y) <float[2] a = {0.1, 0.2}> { y = PRelu (x, a) }"),
        near_miss=True,
    )


def test_integers_have_no_relu() -> None:
    check(
        FUSE,
        typed("g (int64[N] x) => (int64[N] y) <int64 zero = {0}> { y = Max (x, zero) }"),
        near_miss=True,
    )


def test_doubles_keep_operators_that_have_a_kernel() -> None:
    stays("s = Mul (x, tenth) y = Max (x, s)", "double")
    stays("a = Add (x, three) c = Clip (a, zero, six) y = Div (c, six)", "double")


# -- gates


@pytest.mark.parametrize(
    ("nodes", "after"),
    [
        ("n = Neg (x) e = Exp (n) p = Add (e, one) y = Reciprocal (p)", "y = Sigmoid (x)"),
        ("n = Neg (x) e = Exp (n) p = Add (one, e) y = Div (one, p)", "y = Sigmoid (x)"),
        ("e = Exp (x) p = Add (one, e) y = Div (e, p)", "y = Sigmoid (x)"),
        ("h = Mul (x, half) t = Tanh (h) p = Add (t, one) y = Mul (p, half)", "y = Sigmoid (x)"),
        (
            "n = Mul (x, minus) e = Exp (n) p = Add (e, one) y = Div (x, p)",
            "s = Sigmoid (x) y = Mul (x, s)",
        ),
        (
            "n = Neg (x) s = Mul (n, quick) e = Exp (s) p = Add (e, one) y = Div (x, p)",
            "m = Mul (x, quick) s = Sigmoid (m) y = Mul (x, s)",
        ),
        ("t = Softplus (x) u = Tanh (t) y = Mul (x, u)", "y = Mish (x)"),
        (
            "c = Greater (x, twenty) s = Softplus (x) y = Where (c, x, s)",
            "y = Softplus (x)",
        ),
        (
            "a = Add (x, three) c = Clip (a, zero, six) m = Mul (x, c) y = Div (m, six)",
            "y = HardSwish (x)",
        ),
        (
            "a = Add (x, three) c = Clip (a, zero, six) d = Div (c, six) y = Mul (x, d)",
            "y = HardSwish (x)",
        ),
        (
            "a = Add (x, three) r = Relu (a) c = Min (r, six) d = Mul (c, sixth) y = Mul (x, d)",
            "y = HardSwish (x)",
        ),
        (
            "h = HardSigmoid <alpha = 0.16666667, beta = 0.5> (x) y = Mul (h, x)",
            "y = HardSwish (x)",
        ),
    ],
)
def test_gates(nodes: str, after: str) -> None:
    becomes(nodes, after)


@pytest.mark.parametrize(
    "nodes",
    [
        "a = Add (x, three) c = Clip (a, zero, six) y = Div (c, six)",
        "a = Mul (x, sixth) b = Add (a, half) y = Clip (b, zero, one)",
        "a = Add (x, three) b = Div (a, six) y = Clip (b, zero, one)",
        "a = Add (x, three) m = Max (a, zero) n = Min (m, six) y = Mul (n, sixth)",
    ],
)
def test_hard_sigmoid(nodes: str) -> None:
    found = check(FUSE, typed(graph(nodes)))
    (node,) = found.graph.nodes
    assert node.op_type == "HardSigmoid"
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert values["alpha"] == pytest.approx(1 / 6)
    assert values["beta"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Clip (x, zero, one)",
        "a = Add (x, three) c = Clip (a, zero, six) y = Div (c, three)",
        "a = Add (x, three) c = Clip (a, minus, six) y = Div (c, six)",
        "a = Add (x, three) c = Clip (a, zero, six) y = Mul (c, rough_sixth)",
        "a = Add (x, three) c = Clip (a, zero, minus) y = Mul (c, minus)",
        "h = HardSigmoid <alpha = 0.2, beta = 0.5> (x) y = Mul (h, x)",
        "e = Exp (x) p = Add (e, one) y = Reciprocal (p)",
        "n = Neg (x) e = Exp (n) p = Add (e, two) y = Div (x, p)",
        "c = Greater (x, one) s = Softplus (x) y = Where (c, x, s)",
        "t = Softplus (x) u = Sigmoid (t) y = Mul (x, u)",
        "h = Mul (x, two) t = Tanh (h) p = Add (t, one) y = Mul (p, half)",
    ],
)
def test_other_gates_stay(nodes: str) -> None:
    stays(nodes)


SLOWER = {
    "e = Exp (x) p = Add (e, one) y = Log (p)": "y = Softplus (x)",
    "e = Exp (x) p = Add (e, one) l = Log (p) t = Tanh (l) y = Mul (x, t)": "y = Mish (x)",
    "c = Greater (x, zero) e = Exp (x) s = Sub (e, one) b = Mul (s, two) y = Where (c, x, b)": (
        "y = Elu <alpha = 2.0> (x)"
    ),
}


@pytest.mark.parametrize(("nodes", "after"), SLOWER.items())
def test_slow_operators_fuse_only_for_target_onnx(nodes: str, after: str) -> None:
    stays(nodes)
    original = parse(typed(graph(nodes)))
    subject = model(typed(graph(nodes)))
    FUSE.run(subject, Context(Settings(target="onnx")))
    wanted = [node.op_type for node in parse(graph(after)).graph.node]
    assert [node.op_type for node in subject.graph.nodes] == wanted, text_of(subject)
    assert_same_outputs(original, subject, [random_feeds(subject)])
