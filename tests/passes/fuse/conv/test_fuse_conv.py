"""`fuse-conv`: maps folded into the weights of a Conv, and near misses."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from passes.fuse.conv.fuse_conv import RULES, FuseConv
from tests import ort
from tests.checks import assert_same_outputs, check, model, parse, random_feeds
from tests.passes.fuse.constants import batch_norm, becomes, floats, stays, stored, typed
from toolkit.pass_manager.protocol import Context
from toolkit.rewriting.rule import explain

CONV = FuseConv()
IMAGE = "g (float[N, 4, 7, 6] x) => (float[N, 6, H, W] y)"
TWO = "g (float[N, 4, 7, 6] x) => (float[N, 6, 5, 4] y, float[N, 6, 5, 4] z)"
W = floats("w", 6, 4, 3, 3)
B = floats("b", 6)
NORM = "BatchNormalization (c, gamma, beta, mean, variance)"


def fused(nodes: str, *constants: str, after: str = "Conv", signature: str = IMAGE) -> Any:
    return becomes(CONV, signature, ", ".join(constants), nodes, after)


def kept(nodes: str, *constants: str, signature: str = IMAGE, **options: Any) -> None:
    stays(CONV, signature, ", ".join(constants), nodes, **options)


# -- behind a Conv


@pytest.mark.parametrize("inputs", ["x, w", "x, w, b"])
@pytest.mark.parametrize(
    "then",
    [
        f"y = {NORM}",
        "y = Add (c, k)",
        "y = Add (k, c)",
        "y = Mul (c, k)",
        "y = Sub (c, k)",
        "y = Sub (k, c)",
        "y = Div (c, k)",
        "y = Neg (c)",
        "y = Mul (c, k1)",
        "y = Add (c, s)",
        "y = Div (c, ones4)",
        "d = Mul (c, k) y = Add (d, s)",
        "d = Sub (c, mean1) e = Div (d, std1) f = Mul (e, k1) y = Add (f, k)",
        f"d = Mul (c, s) e = Add (d, k) c2 = {NORM.replace('(c', '(e')} y = Neg (c2)",
    ],
)
def test_per_channel_maps_are_folded_into_the_weights(inputs: str, then: str) -> None:
    fused(
        f"c = Conv <pads = [1, 0, 2, 1], strides = [2, 1]> ({inputs}) {then}",
        *(W, B, batch_norm(6)),
        *(floats("k", 6, 1, 1, low=0.5), floats("k1", 1, 6, 1, 1), "float s = {0.3}"),
        *("float[1, 1, 1, 1] ones4 = {2}", floats("mean1", 1, 6, 1, 1)),
        floats("std1", 1, 6, 1, 1, low=0.5, high=2),
    )


@pytest.mark.parametrize(
    ("attributes", "shape", "sizes"),
    [
        ("", [6, 4, 3], "[N, 4, 9]"),
        ("<group = 2, dilations = [2]>", [6, 2, 3], "[N, 4, 9]"),
        ('<group = 4, auto_pad = "SAME_UPPER">', [4, 1, 3, 3], "[N, 4, 5, 6]"),
        ('<group = 4, auto_pad = "SAME_LOWER", strides = [2, 2]>', [8, 1, 3, 2], "[N, 4, 5, 6]"),
        ("<group = 2, dilations = [2, 1], pads = [2, 0, 1, 1]>", [6, 2, 3, 3], "[N, 4, 7, 6]"),
        ('<auto_pad = "VALID">', [6, 4, 1, 1], "[N, 4, 7, 6]"),
        ("<pads = [1, 0, 1, 1, 1, 0]>", [6, 4, 2, 2, 3], "[N, 4, 5, 5, 5]"),
    ],
)
def test_any_kind_of_conv(attributes: str, shape: list[int], sizes: str) -> None:
    ones = [1] * (len(shape) - 2)
    result = ", ".join(["N", "C", "A", "B", "D"][: len(shape)])
    constants = [floats("w", *shape), batch_norm(shape[0])]
    constants += [floats("k", shape[0], *ones), floats("k0", 4, *ones)]
    becomes(
        CONV,
        f"g (float{sizes} x) => (float[{result}] y)",
        ", ".join(constants),
        f"d = Mul (x, k0) c = Conv {attributes} (d, w) n = {NORM} y = Mul (n, k)",
        "Conv",
    )


@pytest.mark.parametrize(
    ("attributes", "shape", "sizes"),
    [
        ("<strides = [2]>", [4, 3, 3], "[N, 4, 5]"),
        ("<group = 2, strides = [2, 2], output_padding = [1, 0]>", [4, 3, 3, 2], "[N, 4, 3, 4]"),
        ("<group = 4, pads = [1, 0, 0, 1]>", [4, 2, 3, 3], "[N, 4, 5, 4]"),
        ("<dilations = [2, 1]>", [4, 6, 2, 2], "[N, 4, 3, 3]"),
        ("<group = 2>", [4, 3, 2, 2, 2], "[N, 4, 3, 3, 3]"),
    ],
)
def test_any_kind_of_transposed_conv(attributes: str, shape: list[int], sizes: str) -> None:
    groups = int(attributes[9]) if attributes.startswith("<group") else 1
    outputs, ones = shape[1] * groups, [1] * (len(shape) - 2)
    result = ", ".join(["N", "C", "A", "B", "D"][: len(shape)])
    constants = [floats("w", *shape), floats("b", outputs), batch_norm(outputs)]
    constants += [floats("k", outputs, *ones), floats("k0", 4, *ones)]
    becomes(
        CONV,
        f"g (float{sizes} x) => (float[{result}] y)",
        ", ".join(constants),
        f"d = Mul (k0, x) c = ConvTranspose {attributes} (d, w, b) n = {NORM} y = Sub (n, k)",
        "ConvTranspose",
    )


def test_a_conv_inside_a_graph_keeps_its_name_and_its_users() -> None:
    changed = fused(
        f"[first] c = Conv (x, w) n = {NORM} r = Relu (n) s = Sigmoid (n) y = Mul (r, s)",
        *(W, batch_norm(6)),
        after="Conv Relu Sigmoid Mul",
    )
    assert changed.graph.nodes[0].name == "first"


def test_half_precision_is_computed_in_double_and_rounded_once() -> None:
    """Single steps would overflow or underflow in half precision; their composition does not."""
    signature = "g (float16[1, 2, 3, 3] x) => (float16[1, 2, 3, 3] y)"
    constants = [
        stored("w", np.ones((2, 2, 1, 1)), "float16"),
        stored("big", 30000.0, "float16"),
        stored("many", 4.0, "float16"),
        stored("tiny", 2.0**-17, "float16"),
    ]
    nodes = "c = Conv (x, w) d = Mul (c, tiny) e = Mul (d, big) y = Mul (e, many)"
    changed = becomes(CONV, signature, ", ".join(constants), nodes, "Conv", atol=2e-3)
    weight = changed.graph.const(changed.graph.nodes[0].input[1])
    assert weight is not None
    np.testing.assert_allclose(weight, 30000 * 4 * 2.0**-17, rtol=1e-3)


# -- near misses behind a Conv


@pytest.mark.parametrize(
    "then",
    [
        "y = Add (c, row)",  # [6] lies along W, which is 6 as well
        "y = Mul (c, column)",  # along H
        "y = Add (c, image)",  # one number per element
        "y = Add (c, batch)",  # broadcasts to a batch of two
        "y = Mul (c, c)",
        "y = Add (c, z)",  # not constant
        "y = Div (k, c)",
        "y = Div (c, zeros)",  # infinite
        "y = Mul (c, infinite)",
        "y = Relu (c)",
        f"y = {NORM.replace('variance', 'z1')}",
    ],
)
def test_constants_that_are_not_per_channel_stay(then: str) -> None:
    kept(
        f"c = Conv <pads = [1, 1, 1, 1]> (x, w) {then}",
        *(floats("w", 6, 4, 3, 3), batch_norm(6), floats("k", 6, 1, 1)),
        *(floats("row", 6), floats("column", 6, 1), floats("image", 1, 6, 6, 6)),
        *(floats("batch", 2, 1, 1, 1), "float[6, 1, 1] zeros = {0, 1, 1, 1, 1, 1}"),
        "float infinite = {inf}",
        signature="g (float[1, 4, 6, 6] x, float[1] z, float[6] z1) => (float[A, 6, 6, 6] y)",
        run="infinite" not in then and "zeros" not in then,
    )


def test_a_constant_of_higher_rank_stays() -> None:
    kept(
        "c = Conv (x, w) y = Add (c, k)",
        *(W, floats("k", 1, 1, 6, 1, 1)),
        signature="g (float[N, 4, 7, 6] x) => (float[A, N, 6, H, W] y)",
    )


def test_a_constant_that_broadcasts_the_channels_stays() -> None:
    kept("c = Conv (x, w) y = Add (c, k)", floats("w", 1, 4, 3, 3), floats("k", 6, 1, 1))


@pytest.mark.parametrize(
    "nodes",
    [
        f"c = Conv (x, w) n = {NORM} y = Add (n, c) z = Neg (y)",  # used twice
        f"c = Conv (x, w) y = {NORM} z = Relu (c)",
        f"z = Conv (x, w) y = {NORM.replace('(c', '(z')}",  # an output itself
    ],
)
def test_a_conv_with_other_users_stays(nodes: str) -> None:
    kept(nodes, W, batch_norm(6), signature=TWO)


def test_a_conv_captured_by_a_subgraph_stays() -> None:
    kept(
        """c = Conv (x, w)
        y = Add (c, k)
        z = If (on) <
            then_branch = t () => (float[N, 6, 5, 4] p) { p = Exp (c) },
            else_branch = f () => (float[N, 6, 5, 4] q) { q = Identity (y) }
        >""",
        *(W, floats("k", 6, 1, 1)),
        signature="g (float[N, 4, 7, 6] x, bool on) => (float[N, 6, 5, 4] y, float[N, 6, 5, 4] z)",
        run=False,
    )


def test_weights_that_are_inputs_or_computed_stay() -> None:
    signature = "g (float[N, 4, 7, 6] x, float[6, 4, 3, 3] v) => (float[N, 6, 5, 4] y)"
    kept("c = Conv (x, v) y = Mul (c, k)", floats("k", 6, 1, 1), signature=signature)
    kept(
        "q = DequantizeLinear (w, s) c = Conv (x, q) y = Mul (c, k)",
        "int8[1, 4, 1, 1] w = {1, 2, 3, 4}, float s = {0.5}",
        floats("k", 1),
        signature="g (float[N, 4, 7, 6] x) => (float[N, 1, 7, 6] y)",
    )
    default = "g (float[N, 4, 7, 6] x, float[6] b) => (float[N, 6, 5, 4] y)"
    kept("c = Conv (x, w, b) y = Mul (c, k)", W, floats("k", 6, 1, 1), signature=default)


def test_batch_normalization_in_training_stays() -> None:
    kept(
        f"c = Conv (x, w) y, m, v = {NORM.replace('(', '<training_mode = 1> (', 1)}",
        *(W, batch_norm(6)),
        run=False,
    )


def test_half_precision_that_overflows_or_vanishes_stays() -> None:
    signature = "g (float16[1, 2, 3, 3] x) => (float16[1, 2, 3, 3] y)"
    for weight, factor in ((3000.0, 30.0), (2e-3, 2e-4)):
        weights = stored("w", np.full((2, 2, 1, 1), weight), "float16")
        constants = f"{weights}, {stored('k', factor, 'float16')}"
        stays(CONV, signature, constants, "c = Conv (x, w) y = Mul (c, k)", atol=1)


# -- weights with several readers


def test_small_shared_weights_are_copied() -> None:
    changed = becomes(
        CONV,
        TWO,
        f"{W}, {floats('k', 6, 1, 1)}",
        "c = Conv (x, w) y = Mul (c, k) d = Sigmoid (x) z = Conv (d, w)",
        "Conv Sigmoid Conv",
    )
    assert "w" in changed.graph.nodes[2].input


LARGE = "g (float[1, 128, 3, 3] x) => (float[1, 512, 1, 1] y, float[1, 512, 1, 1] z)"


def _large(nodes: str, operators: str | None) -> None:
    constants = f"{floats('w', 512, 128, 3, 3)}, {floats('k', 512, 1, 1)}"
    if operators is None:
        stays(CONV, LARGE, constants, nodes)
    else:
        becomes(CONV, LARGE, constants, nodes, operators, atol=1e-4)


def test_large_shared_weights_are_not_copied_but_get_a_bias() -> None:
    two = "d = Sigmoid (x) z = Conv (d, w)"
    _large(f"c = Conv (x, w) y = Mul (c, k) {two}", None)
    _large(f"c = Conv (x, w) y = Add (c, k) {two}", "Conv Sigmoid Conv")
    _large(f"c = Conv (x, w) e = Add (c, k) y = Mul (e, k) {two}", "Conv Mul Sigmoid Conv")


# -- before a Conv

BEFORE = "BatchNormalization (x, gamma, beta, mean, variance)"


@pytest.mark.parametrize(
    "before",
    [
        f"d = {BEFORE}",
        "d = Mul (x, k)",
        "d = Sub (x, k)",
        "d = Sub (k, x)",
        "d = Div (x, s)",
        "e = Neg (x) d = Add (s, e)",
        f"a = Add (x, k) e = Mul (a, s) d = {BEFORE.replace('x', 'e')}",
    ],
)
@pytest.mark.parametrize(
    "conv",
    [
        "Conv (d, w)",
        "Conv (d, w, b)",
        "Conv <group = 2, strides = [2, 1], dilations = [1, 2]> (d, w2)",
        'Conv <auto_pad = "SAME_UPPER"> (d, w1)',
        "ConvTranspose <group = 2> (d, v)",
    ],
)
def test_maps_of_the_input_are_folded_into_weights_without_padding(before: str, conv: str) -> None:
    fused(
        f"{before} y = {conv}",
        *(W, B, floats("w2", 6, 2, 3, 3), floats("w1", 6, 4, 1, 1), floats("v", 4, 3, 1, 1)),
        *(batch_norm(4), floats("k", 4, 1, 1), "float s = {0.3}"),
        after=conv.split(maxsplit=1)[0],
    )


PADDED = "Conv <pads = [1, 1, 1, 1]> (d, w)"


@pytest.mark.parametrize(
    "conv",
    [PADDED, 'Conv <auto_pad = "SAME_LOWER"> (d, w)', "ConvTranspose (d, v)"],
)
@pytest.mark.parametrize("before", [f"d = {BEFORE}", "d = Add (x, k)", "d = Sub (k, x)"])
def test_a_shift_stays_before_padding(before: str, conv: str) -> None:
    constants = W, floats("v", 4, 6, 2, 2), batch_norm(4), floats("k", 4, 1, 1)
    kept(f"{before} y = {conv}", *constants)


def test_a_scale_before_padding_is_folded() -> None:
    fused(f"d = Mul (x, k) y = {PADDED}", W, floats("k", 4, 1, 1))
    unshifted = batch_norm(4).replace("beta", "old").replace("mean", "older")
    zeros = "float[4] beta = {0, 0, 0, 0}, float[4] mean = {0, 0, 0, 0}"
    fused(f"d = {BEFORE} y = {PADDED}", W, unshifted, zeros)


@pytest.mark.parametrize(
    "before",
    ["e = Mul (x, k) d = Add (e, t)", "e = Add (x, s) f = Div (e, k) d = Add (f, t)"],
)
def test_two_maps_before_padding_become_one_shift(before: str) -> None:
    constants = floats("k", 4, 1, 1, low=0.5), floats("t", 4, 1, 1), "float s = {0.3}"
    fused(f"{before} y = {PADDED}", W, *constants, after="Add Conv")


def test_a_scale_of_zero_cannot_be_moved_after_the_shift() -> None:
    zero = stored("k", np.array([1, 0, 2, 3]).reshape(4, 1, 1))
    kept(f"e = Mul (x, k) d = Add (e, t) y = {PADDED}", W, zero, floats("t", 4, 1, 1))
    fused("e = Mul (x, k) d = Add (e, t) y = Conv (d, w)", W, zero, floats("t", 4, 1, 1))


@pytest.mark.parametrize(
    ("signature", "before"),
    [
        ("float[N, 1, 7, 6] x", "Mul (x, k)"),  # one channel broadcast to four
        ("float[4, 7, 6] x", "Mul (x, k4)"),  # an image broadcast to a batch
        ("float[N, 4, 7, 4] x", "Mul (x, row)"),  # along W
    ],
)
def test_constants_that_broadcast_the_input_stay(signature: str, before: str) -> None:
    kept(
        f"d = {before} y = Conv (d, w)",
        *(W, floats("k", 4, 1, 1), floats("k4", 1, 4, 1, 1), floats("row", 4)),
        signature=f"g ({signature}) => (float[A, 6, H, W] y)",
    )


def test_an_input_with_other_users_stays() -> None:
    kept(
        "d = Mul (x, k) y = Conv (d, w) z = Conv (d, w)",
        *(W, floats("k", 4, 1, 1)),
        signature=TWO,
    )


@pytest.mark.parametrize(
    "before",
    [
        "e = Erf (x) f = Add (e, one) h = Mul (x, f) d = Mul (h, half)",
        "q = Abs (x) r = Sqrt (q) h = Div (x, r) d = Mul (h, k)",
        "q = Abs (x) r = Sqrt (q) i = Div (one, r) h = Mul (x, i) d = Mul (h, k)",
    ],
)
def test_the_last_factor_of_a_gelu_or_norm_stays(before: str) -> None:
    constants = W, floats("k", 4, 1, 1), "float half = {0.5}", "float one = {1}"
    kept(f"{before} y = Conv (d, w)", *constants)


def test_maps_between_two_convs_are_folded_into_the_first() -> None:
    changed = fused(
        f"c = Conv (x, w) n = {NORM} y = Conv <pads = [1, 1, 1, 1]> (n, v)",
        *(W, floats("v", 6, 6, 3, 3), batch_norm(6)),
        after="Conv Conv",
    )
    assert list(changed.graph.nodes[1].input) == [changed.graph.nodes[0].output[0], "v"]


def test_a_batch_normalization_without_a_conv_stays() -> None:
    kept(
        f"c = Concat <axis = 1> (x, x) n = {NORM} r = Relu (n) y = Conv (r, w)",
        *(floats("w", 6, 8, 3, 3), batch_norm(8)),
    )


def test_explain_gives_the_reason() -> None:
    text = typed(IMAGE, f"{W}, {batch_norm(4)}", f"d = {BEFORE} y = {PADDED}")
    reasons = [miss.reason for miss in explain(model(text), RULES)]
    assert "its padding is not shifted with the rest" in reasons


def test_opset_9_and_spatial_statistics() -> None:
    """Before opset 9 a BatchNormalization could have statistics per element."""
    nodes = f"c = Conv (x, w) y = {NORM}"
    becomes(CONV, IMAGE, f"{W}, {batch_norm(6)}", nodes, "Conv", opset=9)
    everywhere = nodes.replace("BatchNormalization", "BatchNormalization <spatial = 0>")
    stays(CONV, IMAGE, f"{W}, {batch_norm(6)}", everywhere, opset=8, run=False)


def test_a_long_chain_is_one_rewrite() -> None:
    steps = " ".join(f"v{i + 1} = Add (v{i}, k)" for i in range(200))
    nodes = f"v0 = Conv (x, w) {steps} y = Neg (v200)"
    subject = check(CONV, typed(IMAGE, f"{W}, {floats('k', 6, 1, 1)}", nodes))
    assert len(subject.graph.nodes) == 1


# -- BatchNormalization by itself

ALONE = "g (float[N, 4, 7, 6] x) => (float[N, 4, 7, 6] y)"


@pytest.mark.parametrize(
    "nodes",
    [
        f"n = {BEFORE} y = Mul (n, k)",
        f"d = Sub (s, x) y = {BEFORE.replace('(x', '(d')}",
        f"d = Mul (x, k) n = {BEFORE.replace('(x', '(d')} e = Add (n, k) y = Div (e, s)",
    ],
)
def test_maps_around_a_batch_normalization_are_folded_into_it(nodes: str) -> None:
    constants = batch_norm(4), floats("k", 4, 1, 1), "float s = {0.3}"
    fused(nodes, *constants, after="BatchNormalization", signature=ALONE)


@pytest.mark.parametrize(
    "nodes",
    [
        f"n = {BEFORE} y = Mul (n, row)",
        f"n = {BEFORE} y = Mul (n, n)",
        f"n = {BEFORE} d = Add (n, k) y = Mul (n, d)",
        f"d = Relu (x) y = {BEFORE.replace('(x', '(d')}",
    ],
)
def test_other_operators_around_a_batch_normalization_stay(nodes: str) -> None:
    kept(nodes, batch_norm(4), floats("k", 4, 1, 1), floats("row", 6), signature=ALONE)


# -- anything goes


@pytest.mark.parametrize("seed", range(12))
def test_random_chains(seed: int) -> None:
    """Random chains of Convs and affine maps, with and without padding, stay equivalent."""
    random = np.random.default_rng(seed)
    steps = [
        "Conv (v, w)",
        "Conv <pads = [1, 0, 1, 2]> (v, w)",
        "Conv <group = 2, pads = [1, 1, 1, 1]> (v, w2, b)",
        "Conv <group = 4, dilations = [2, 1], pads = [2, 1, 2, 1]> (v, w4)",
        "ConvTranspose <group = 2, strides = [2, 1]> (v, u, b)",
        *("Mul (v, k)", "Add (v, k)", "Sub (k, v)", "Div (v, k)", "Mul (v, s)", "Add (s, v)"),
        *("Neg (v)", "Relu (v)", "BatchNormalization (v, gamma, beta, mean, variance)"),
        *("Add (v, row)", "Pad (v, p)", "Pad (v, p)"),
    ]
    chosen = [steps[i] for i in random.integers(len(steps), size=12)]
    named = [re.sub(r"\bv\b", f"v{i}", step) for i, step in enumerate(chosen)]
    nodes = " ".join(f"v{i + 1} = {step}" for i, step in enumerate(named))
    nodes = f"v0 = Identity (x) {nodes}"
    constants = [
        *(floats("w", 4, 4, 3, 2), floats("w2", 4, 2, 3, 3), floats("w4", 4, 1, 3, 3)),
        *(floats("u", 4, 2, 2, 3), floats("b", 4), floats("k", 4, 1, 1, low=0.5, high=2)),
        *("float s = {0.7}", "float[1] row = {0.5}", batch_norm(4)),
        "int64[8] p = {0, 0, 1, 0, 0, 0, 0, 1}",
    ]
    signature = "g (float[2, 4, 40, 24] x) => (float[A, B, C, D] y)"
    text = typed(signature, ", ".join(constants), f"{nodes} y = Identity (v12)")
    subject = model(text)
    CONV.run(subject, Context())
    subject.graph.verify()
    original = parse(text)
    feeds = random_feeds(subject)
    scale = max(float(np.abs(ort.run(original, feeds)[0]).max()), 1.0)
    assert_same_outputs(original, subject, [feeds], atol=1e-5 * scale)
