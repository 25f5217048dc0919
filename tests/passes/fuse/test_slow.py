"""`fuse-arithmetic`: slow spellings of arithmetic and of picking data, and what must stay."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import printer, shape_inference

from passes.fuse.arithmetic import FuseArithmetic
from tests.checks import check, model, parse, text_of
from toolkit.model import Model
from toolkit.pipeline import Context

FUSE = FuseArithmetic()
HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'


def typed(text: str) -> str:
    """The model with the types of its values between input and output written down."""
    return printer.to_text(shape_inference.infer_shapes(parse(HEADER + text)))


def becomes(signature: str, nodes: str, after: str) -> Model:
    return check(FUSE, typed(f"{signature} {{ {nodes} }}"), f"{HEADER}{signature} {{ {after} }}")


def stays(signature: str, nodes: str) -> None:
    check(FUSE, typed(f"{signature} {{ {nodes} }}"), near_miss=True)


# -- powers and quotients

POWERS = "g (float[N,4] v) => (float[N,4] y) <float e = {{{}}}>"


@pytest.mark.parametrize(
    ("exponent", "after"),
    [
        (2.0, "y = Mul (x, x)"),
        (0.5, "y = Sqrt (x)"),
        (-1.0, "y = Reciprocal (x)"),
        (3.0, "a = Mul (x, x) y = Mul (a, x)"),
        (4.0, "a = Mul (x, x) y = Mul (a, a)"),
        (-0.5, "a = Sqrt (x) y = Reciprocal (a)"),
    ],
)
def test_powers(exponent: float, after: str) -> None:
    positive = "x = Exp (v) "
    becomes(POWERS.format(exponent), positive + "y = Pow (x, e)", positive + after)


def test_other_powers_stay() -> None:
    stays(POWERS.format(2.5), "x = Exp (v) y = Pow (x, e)")
    stays("g (float[N,2] x) => (float[N,2] y) <float[2] e = {2.0, 3.0}>", "y = Pow (x, e)")
    stays("g (float[N] x) => (float[1,N] y) <float[1,1] e = {2.0}>", "y = Pow (x, e)")


def test_a_root_of_integers_stays() -> None:
    stays("g (int64[N] x) => (int64[N] y) <float e = {0.5}>", "y = Pow (x, e)")


def test_powers_that_take_two_operators_are_for_the_runtime() -> None:
    subject = model(typed(f"{POWERS.format(4.0)} {{ x = Exp (v) y = Pow (x, e) }}"))
    FUSE.run(subject, Context(target="onnx"))
    assert "Pow" in text_of(subject)


def test_products_with_a_reciprocal_are_quotients() -> None:
    signature = "g (float[N,4] x) => (float[N,4] y) <float one = {1.0}>"
    becomes(
        signature, "e = Exp (x) r = Reciprocal (e) y = Mul (x, r)", "e = Exp (x) y = Div (x, e)"
    )
    becomes(signature, "e = Exp (x) r = Div (one, e) y = Mul (r, x)", "e = Exp (x) y = Div (x, e)")


def test_a_reciprocal_that_is_broadcast_or_shared_stays() -> None:
    stays(
        "g (float[N,4] x, float[N,1] e) => (float[N,4] y)",
        "a = Exp (e) r = Reciprocal (a) y = Mul (x, r)",
    )
    stays(
        "g (float[N,4] x) => (float[N,4] y, float[N,4] r)",
        "e = Exp (x) r = Reciprocal (e) y = Mul (x, r)",
    )


# -- reductions

REDUCED = "g (float[N,4] x) => (float[N,1] y) <int64[1] a = {1}, float n = {4.0}, float q = {0.25}>"


def test_a_sum_by_its_number_is_a_mean() -> None:
    after = "y = ReduceMean (x, a)"
    becomes(REDUCED, "s = ReduceSum (x, a) y = Div (s, n)", after)
    becomes(REDUCED, "s = ReduceSum (x, a) y = Mul (q, s)", after)


def test_a_sum_by_another_number_stays() -> None:
    stays(REDUCED.replace("{4.0}", "{3.0}"), "s = ReduceSum (x, a) y = Div (s, n)")
    stays(
        "g (float[N,M] x) => (float[N,1] y) <int64[1] a = {1}, float n = {4.0}>",
        "s = ReduceSum (x, a) y = Div (s, n)",
    )


def test_a_reduction_whose_axis_is_put_back_keeps_it() -> None:
    becomes(
        REDUCED,
        "s = ReduceMax <keepdims = 0> (x, a) y = Unsqueeze (s, a)",
        "y = ReduceMax <keepdims = 1> (x, a)",
    )

    becomes(
        REDUCED.replace("float n", "int64[2] t = {0, 1}, float n"),
        "s = ReduceMax <keepdims = 0> (x, a) y = Reshape (s, t)",
        "y = ReduceMax <keepdims = 1> (x, a)",
    )


def test_a_reduction_that_gets_another_axis_stays() -> None:
    stays(
        REDUCED.replace("[N,4] x", "[4,4] x").replace("[N,1] y", "[2,2] y") + " ",
        "s = ReduceMax <keepdims = 0> (x, a) t = Constant <value = int64[2] {2, 2}> () "
        "y = Reshape (s, t)",
    )
    stays(
        "g (float[N,4] x) => (float[1,N] y) <int64[1] a = {1}, int64[1] b = {0}>",
        "s = ReduceMax <keepdims = 0> (x, a) y = Unsqueeze (s, b)",
    )


# -- ranges


@pytest.mark.parametrize(
    ("indices", "size", "bounds"),
    [
        ("1, 2, 3", 3, ([1], [4], [1])),
        ("-3, -2", 2, ([-3], [-1], [1])),
        ("0, 2, 4", 3, ([0], [5], [1], [2])),
        ("-2, -1", 2, ([-2], [np.iinfo(np.int64).max], [1])),
    ],
)
def test_a_gather_of_neighbours_is_a_slice(
    indices: str, size: int, bounds: tuple[list[int], ...]
) -> None:
    signature = f"g (float[N,6] x) => (float[N,{size}] y) <int64[{size}] i = {{{indices}}}>"
    stored = "".join(
        f"c{n} = Constant <value = int64[1] {{{b[0]}}}> () " for n, b in enumerate(bounds)
    )
    names = ", ".join(f"c{n}" for n in range(len(bounds)))
    becomes(signature, "y = Gather <axis = 1> (x, i)", f"{stored} y = Slice (x, {names})")


@pytest.mark.parametrize("indices", ["0, 2, 3", "3, 2, 1", "1, 1, 1", "-1, 0, 1"])
def test_a_gather_of_others_stays(indices: str) -> None:
    stays(
        f"g (float[N,6] x) => (float[N,3] y) <int64[3] i = {{{indices}}}>",
        "y = Gather <axis = 1> (x, i)",
    )


def test_a_gather_of_rows_stays() -> None:
    stays("g (float[6,N] x) => (float[2,N] y) <int64[2] i = {1, 2}>", "y = Gather (x, i)")


# -- one-hot

ONE_HOT = (
    "g (int64[N] i) => (float[N,2] y) <int64 d = {3}, float[2] v = {0.0, 1.0}, "
    "float[3,2] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, int64[1] last = {-1}, int64[3] k = {0, 1, 2}>"
)
INDICES = {"i": np.array([0, 2, 1, -1, -3, 3, 99, -4, -99])}


@pytest.mark.parametrize(
    "nodes",
    [
        "h = OneHot (i, d, v) y = MatMul (h, w)",
        "u = Unsqueeze (i, last) e = Equal (u, k) h = Cast <to = 1> (e) y = MatMul (h, w)",
    ],
)
def test_a_product_with_a_one_hot_is_a_gather(nodes: str) -> None:
    found = check(FUSE, typed(f"{ONE_HOT} {{ {nodes} }}"), inputs=INDICES)
    assert [node.op_type for node in found.graph.nodes] == ["Clip", "Gather"]


@pytest.mark.parametrize(
    ("old", "new"), [("{0.0, 1.0}", "{0.0, 2.0}"), ("{0.0, 1.0}", "{-1.0, 1.0}")]
)
def test_other_values_of_a_one_hot_stay(old: str, new: str) -> None:
    stays(ONE_HOT.replace(old, new), "h = OneHot (i, d, v) y = MatMul (h, w)")


def test_a_comparison_with_other_classes_stays() -> None:
    nodes = "u = Unsqueeze (i, last) e = Equal (u, k) h = Cast <to = 1> (e) y = MatMul (h, w)"
    stays(ONE_HOT.replace("{0, 1, 2}", "{2, 1, 0}"), nodes)


# -- the Focus stem

STARTS = ((0, 0), (1, 0), (0, 1), (1, 1))
STEM = (
    "g (float[1,2,8,8] x) => (float[1,3,H,W] y) <{}int64[2] e = {{1000000, 1000000}}, "
    "int64[2] a = {{2, 3}}, int64[2] t = {{2, 2}}, float[3,8,3,3] w = {{{}}}, "
    "float[3] b = {{0.1, 0.2, 0.3}}>"
)


def stem(starts: tuple[tuple[int, int], ...], conv: str) -> str:
    random = np.random.default_rng(0)
    weights = ", ".join(f"{v:.4f}" for v in random.standard_normal(3 * 8 * 9))
    stored = "".join(f"int64[2] s{i} = {{{r}, {c}}}, " for i, (r, c) in enumerate(starts))
    slices = "".join(f"p{i} = Slice (x, s{i}, e, a, t) " for i in range(len(starts)))
    return (
        f"{STEM.format(stored, weights)} {{ {slices} "
        f"c = Concat <axis = 1> (p0, p1, p2, p3) y = Conv <{conv}> (c, w, b) }}"
    )


@pytest.mark.parametrize("conv", ["pads = [1, 1, 1, 1]", "strides = [2, 1]", "pads = [0, 1, 1, 2]"])
def test_a_conv_of_every_second_pixel_is_a_strided_one(conv: str) -> None:
    found = check(FUSE, typed(stem(STARTS, conv)), atol=1e-4)
    (node,) = found.graph.nodes
    assert node.op_type == "Conv"
    assert found.graph.shape(node.input[1]) == (3, 2, 6, 6)


def test_space_to_depth_is_part_of_the_conv() -> None:
    nodes = stem(STARTS, "pads = [1, 1, 1, 1]")
    start, end = nodes.index("p0 ="), nodes.index("y = Conv")
    text = nodes[:start] + "c = SpaceToDepth <blocksize = 2> (x) " + nodes[end:]
    found = check(FUSE, typed(text), atol=1e-4)
    assert [node.op_type for node in found.graph.nodes] == ["Conv"]


def test_other_stems_stay() -> None:
    check(FUSE, typed(stem((*STARTS[:3], (0, 0)), "pads = [1, 1, 1, 1]")), near_miss=True)
    check(FUSE, typed(stem(STARTS, "dilations = [2, 2], pads = [2, 2, 2, 2]")), near_miss=True)
    check(FUSE, typed(stem(STARTS, 'auto_pad = "SAME_UPPER"')), near_miss=True)
    short = stem(STARTS, "pads = [1, 1, 1, 1]").replace("{1000000, 1000000}", "{6, 8}")
    check(FUSE, typed(short), near_miss=True)
