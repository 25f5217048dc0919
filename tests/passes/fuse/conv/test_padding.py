"""`fuse-conv`: Pads folded into windows, and space-to-depth stems."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from passes.fuse.conv.fuse_conv import FuseConv
from tests.passes.fuse.constants import becomes, floats, stays, stored
from toolkit.ir import node as nd

CONV = FuseConv()
IMAGE = "g (float[N, 4, 7, 6] x) => (float[N, 6, H, W] y)"
POOL = "g (float[N, 4, 7, 6] x) => (float[N, 4, H, W] y)"
W = floats("w", 6, 4, 3, 3)
PADS = "int64[8] p = {0, 0, 1, 0, 0, 0, 2, 3}"


# -- Slice of Conv

CUT = ", ".join(
    f"int64[1] {name} = {{{number}}}"
    for name, number in {"zero": 0, "one": 1, "last": -1, "six": 6, "end": 2**62, "two": 2}.items()
)


@pytest.mark.parametrize(
    ("conv", "cut", "pads"),
    [
        ("Conv <pads = [1, 2, 1, 2]> (x, w)", "zero, last, two", [1, 2, 0, 2]),
        ("Conv <pads = [1, 2, 1, 2]> (x, w)", "one, end, two", [0, 2, 1, 2]),
        ("Conv <pads = [1, 2, 2, 2]> (x, w)", "one, six, two", [0, 2, 0, 2]),
        ("Conv <pads = [2, 2, 2, 2], strides = [2, 2]> (x, w)", "one, last, two", [0, 2, 0, 2]),
    ],
)
def test_a_cropped_result_needs_less_padding(conv: str, cut: str, pads: list[int]) -> None:
    changed = becomes(CONV, IMAGE, f"{W}, {CUT}", f"c = {conv} y = Slice (c, {cut})", "Conv")
    assert nd.attr(changed.graph.nodes[0], "pads") == pads


@pytest.mark.parametrize(
    ("conv", "cut"),
    [
        ("Conv <pads = [0, 2, 0, 2]> (x, w)", "zero, last, two"),  # nothing is padded there
        ("Conv <pads = [1, 2, 1, 2], strides = [2, 2]> (x, w)", "one, end, two"),
        ("Conv <pads = [1, 2, 1, 2]> (x, w)", "zero, last, one"),  # channels
        ("Conv <pads = [2, 2, 2, 2]> (x, w)", "zero, end, two, two"),  # every other
        ('Conv <auto_pad = "SAME_UPPER"> (x, w)', "zero, last, two"),
        ("Conv <pads = [1, 2, 1, 2]> (x, w)", "last, end, two"),
    ],
)
def test_other_slices_of_a_conv_stay(conv: str, cut: str) -> None:
    signature = IMAGE.replace("float[N, 6, H, W] y", "float[N, C, H, W] y")
    stays(CONV, signature, f"{W}, {CUT}", f"c = {conv} y = Slice (c, {cut})")


# -- Pad into Conv


@pytest.mark.parametrize(
    ("pad", "conv", "pads"),
    [
        ("Pad (x, p)", "Conv (d, w)", [1, 0, 2, 3]),
        ("Pad (x, p, zero)", 'Conv <auto_pad = "VALID"> (d, w)', [1, 0, 2, 3]),
        ('Pad <mode = "constant"> (x, p)', "Conv <pads = [1, 1, 0, 2]> (d, w)", [2, 1, 2, 5]),
        ("Pad (x, rows, , axis)", "Conv <strides = [2, 2]> (d, w)", [2, 0, 1, 0]),
    ],
)
def test_zeros_around_the_image_are_padding_of_the_conv(
    pad: str, conv: str, pads: list[int]
) -> None:
    constants = f"{W}, {PADS}, float zero = {{0}}, int64[2] rows = {{2, 1}}, int64[1] axis = {{-2}}"
    changed = becomes(CONV, IMAGE, constants, f"d = {pad} y = {conv}", "Conv")
    assert nd.attr(changed.graph.nodes[0], "pads") == pads


@pytest.mark.parametrize(
    ("pad", "conv"),
    [
        ("Pad (x, p, one)", "Conv (d, w)"),
        ('Pad <mode = "edge"> (x, p)', "Conv (d, w)"),
        ('Pad <mode = "reflect"> (x, p)', "Conv (d, w)"),
        ("Pad (x, cut)", "Conv (d, w)"),
        ("Pad (x, channels)", "Conv (d, w5)"),
        ("Pad (x, batch)", "Conv (d, w)"),
        ("Pad (x, p)", 'Conv <auto_pad = "SAME_UPPER"> (d, w)'),
        ("Pad (x, p)", "ConvTranspose (d, v)"),
    ],
)
def test_other_padding_of_a_conv_stays(pad: str, conv: str) -> None:
    constants = [
        *(W, PADS, floats("w5", 6, 5, 3, 3), floats("v", 4, 6, 2, 2), "float one = {1}"),
        "int64[8] cut = {0, 0, -1, 0, 0, 0, 0, 0}",
        "int64[8] channels = {0, 1, 0, 0, 0, 0, 0, 0}",
        "int64[8] batch = {0, 0, 0, 0, 1, 0, 0, 0}",
    ]
    signature = IMAGE.replace("(float[N, 6", "(float[M, 6")
    stays(CONV, signature, ", ".join(constants), f"d = {pad} y = {conv}")


def test_a_pad_with_other_users_or_computed_pads_stays() -> None:
    signature = "g (float[N, 4, 7, 6] x, int64[8] q) => (float[N, 6, H, W] y, float[A, B, C, D] z)"
    constants = f"{W}, {PADS}"
    stays(CONV, signature, constants, "z = Pad (x, p) y = Conv (z, w)", run=False)
    stays(CONV, signature, constants, "d = Pad (x, q) y = Conv (d, w) z = Exp (x)", run=False)


# -- Pad into pools


@pytest.mark.parametrize(
    "pool",
    [
        "AveragePool <kernel_shape = [4, 4]> (d)",
        "AveragePool <kernel_shape = [4, 4], pads = [1, 1, 0, 0], count_include_pad = 1> (d)",
        'AveragePool <kernel_shape = [3, 4], strides = [2, 2], auto_pad = "VALID"> (d)',
    ],
)
def test_zero_padding_of_an_average_is_counted(pool: str) -> None:
    becomes(CONV, POOL, PADS, f"d = Pad (x, p) y = {pool}", "AveragePool")


@pytest.mark.parametrize(
    "pool",
    [
        "AveragePool <kernel_shape = [4, 4], pads = [1, 1, 0, 0]> (d)",
        "AveragePool <kernel_shape = [4, 4], ceil_mode = 1, strides = [2, 2]> (d)",
        "AveragePool <kernel_shape = [2, 2]> (d)",  # windows with padding alone
        'AveragePool <kernel_shape = [4, 4], auto_pad = "SAME_UPPER"> (d)',
        "MaxPool <kernel_shape = [4, 4]> (d)",
        "LpPool <kernel_shape = [4, 4]> (d)",
    ],
)
def test_other_pools_stay(pool: str) -> None:
    stays(CONV, POOL, PADS, f"d = Pad (x, p) y = {pool}")


@pytest.mark.parametrize(
    ("nodes", "operators"),
    [
        ("r = Relu (x) d = Pad (r, p)", "Relu MaxPool"),
        ("r = Clip (x, zero, six) d = Pad (r, p)", "Clip MaxPool"),
        ("a = Relu (x) b = Sigmoid (x) r = Add (a, b) d = Pad (r, p)", "Relu Sigmoid Add MaxPool"),
        ("d = Pad (x, p, least)", "MaxPool"),
    ],
)
def test_padding_with_the_minimum_is_folded_into_max_pool(nodes: str, operators: str) -> None:
    constants = f"{PADS}, float least = {{-inf}}, float zero = {{0}}, float six = {{6}}"
    pool = "y = MaxPool <kernel_shape = [4, 4], strides = [2, 2]> (d)"
    becomes(CONV, POOL, constants, f"{nodes} {pool}", operators)


@pytest.mark.parametrize(
    ("before", "pool"),
    [
        ("Clip (x, below)", "MaxPool <kernel_shape = [4, 4]> (d)"),
        ("Tanh (x)", "MaxPool <kernel_shape = [4, 4]> (d)"),
        ("Relu (x)", "MaxPool <kernel_shape = [2, 2]> (d)"),
        ("Relu (x)", "MaxPool <kernel_shape = [4, 4], dilations = [2, 2]> (d)"),
        ("Relu (x)", "MaxPool <kernel_shape = [4, 4], ceil_mode = 1, strides = [2, 2]> (d)"),
    ],
)
def test_padding_that_may_be_the_largest_stays(before: str, pool: str) -> None:
    constants = f"{PADS}, float below = {{-1}}"
    stays(CONV, POOL, constants, f"r = {before} d = Pad (r, p) y = {pool}")


def test_used_indices_of_maxima_keep_the_pad() -> None:
    signature = "g (float[N, 4, 7, 6] x) => (float[N, 4, H, W] y, int64[N, 4, H, W] z)"
    pool = "y, z = MaxPool <kernel_shape = [4, 4]> (d)"
    stays(CONV, signature, PADS, f"r = Relu (x) d = Pad (r, p) {pool}")


# -- space-to-depth

STEM = "g (float[N, 3, 8, 10] x) => (float[N, 5, H, W] y)"
CUTS = ", ".join(
    [
        *("int64[2] s00 = {0, 0}", "int64[2] s01 = {0, 1}", "int64[2] s10 = {1, 0}"),
        *("int64[2] s11 = {1, 1}", "int64[2] all = {9223372036854775807, 9223372036854775807}"),
        *("int64[2] ends = {8, 10}", "int64[2] axes = {2, 3}", "int64[2] two = {2, 2}"),
        *("int64[2] three = {3, 3}", "int64[2] short = {7, 10}", "int64[2] turned = {3, 2}"),
        floats("w", 5, 12, 3, 3),
    ]
)
PIECES = " ".join(f"p{i} = Slice (x, s{i}, all, axes, two)" for i in ("00", "01", "10", "11"))


@pytest.mark.parametrize("order", list(permutations(["p00", "p10", "p01", "p11"]))[::5])
def test_four_slices_and_a_conv_are_one_conv(order: tuple[str, ...]) -> None:
    changed = becomes(
        CONV,
        STEM,
        CUTS,
        f"{PIECES} c = Concat <axis = 1> ({', '.join(order)}) "
        "y = Conv <pads = [1, 1, 1, 1], kernel_shape = [3, 3], dilations = [1, 1]> (c, w)",
        "Conv",
    )
    (node,) = changed.graph.nodes
    assert nd.attr(node, "kernel_shape") == [6, 6]
    assert (nd.attr(node, "strides"), nd.attr(node, "pads")) == ([2, 2], [2, 2, 2, 2])


@pytest.mark.parametrize(
    "conv",
    [
        "Conv (c, w, b)",
        'Conv <strides = [2, 1], auto_pad = "VALID"> (c, w)',
        "Conv <strides = [1, 2], pads = [0, 1, 2, 0]> (c, w)",
        "Conv <dilations = [3, 3]> (c, v)",
    ],
)
def test_stems_of_any_stride_padding_and_size(conv: str) -> None:
    constants = f"{CUTS}, {floats('v', 5, 12, 1, 1)}, {floats('b', 5)}"
    joined = "c = Concat <axis = -3> (p00, p10, p01, p11)"
    becomes(CONV, STEM, constants, f"{PIECES} {joined} y = {conv}", "Conv")


@pytest.mark.parametrize(
    ("pieces", "conv"),
    [
        (PIECES, "Conv <group = 3> (c, grouped)"),
        (PIECES, "Conv <dilations = [1, 2]> (c, w)"),
        (PIECES, 'Conv <auto_pad = "SAME_UPPER"> (c, w)'),
        (PIECES.replace("s11", "s10"), "Conv (c, w)"),  # one twice, one missing
        (PIECES.replace("all", "short"), "Conv (c, w)"),
        (PIECES.replace("p01 = Slice (x", "z = Exp (x) p01 = Slice (z"), "Conv (c, w)"),
        (PIECES.replace("p11 = Slice (x, s11, all, axes, two)", "p11 = Exp (p10)"), "Conv (c, w)"),
    ],
)
def test_other_stems_stay(pieces: str, conv: str) -> None:
    constants = f"{CUTS}, {floats('grouped', 6, 4, 3, 3)}"
    joined = "c = Concat <axis = 1> (p00, p10, p01, p11)"
    signature = STEM.replace("(float[N, 5", "(float[N, C")
    # Without the last row, the shapes of the pieces differ.
    stays(CONV, signature, constants, f"{pieces} {joined} y = {conv}", run="short" not in pieces)


def test_adjacent_pieces_and_a_stack_with_other_users_stay() -> None:
    beside = "c = Concat <axis = 2> (p00, p10, p01, p11) y = Conv (c, w3)"
    stays(CONV, STEM, f"{CUTS}, {floats('w3', 5, 3, 3, 3)}", f"{PIECES} {beside}")
    twice = "c = Concat <axis = 1> (p00, p10, p01, p11) y = Conv (c, w) z = Exp (c)"
    signature = STEM.replace(" y)", " y, float[N, 12, 4, 5] z)")
    stays(CONV, signature, CUTS, f"{PIECES} {twice}")


def test_space_to_depth_and_a_conv_are_one_conv() -> None:
    becomes(
        CONV,
        "g (float[N, 2, 9, 6] x) => (float[N, 5, H, W] y)",
        floats("w", 5, 18, 2, 1),
        "c = SpaceToDepth <blocksize = 3> (x) y = Conv <pads = [1, 0, 0, 0]> (c, w)",
        "Conv",
    )


@pytest.mark.parametrize("perm", ["0, 1, 3, 5, 2, 4", "0, 3, 5, 1, 2, 4", "0, 5, 1, 3, 2, 4"])
def test_pixel_unshuffle_and_a_conv_are_one_conv(perm: str) -> None:
    becomes(
        CONV,
        "g (float[1, 3, 8, 10] x) => (float[1, 5, H, W] y)",
        f"{floats('w', 5, 12, 3, 3)}, int64[6] cut = {{1, 3, 4, 2, 5, 2}}, "
        "int64[4] join = {1, 12, 4, 5}",
        f"a = Reshape (x, cut) t = Transpose <perm = [{perm}]> (a) c = Reshape (t, join) "
        "y = Conv (c, w)",
        "Conv",
    )


@pytest.mark.parametrize("perm", ["0, 1, 3, 5, 4, 2", "0, 1, 2, 5, 3, 4", "1, 0, 3, 5, 2, 4"])
def test_other_shuffles_stay(perm: str) -> None:
    signature = "g (float[2, 3, 8, 8] x) => (float[2, 5, H, W] y)"
    constants = [
        floats("w", 5, 12, 3, 3),
        stored("cut", np.array([2, 3, 4, 2, 4, 2]), "int64"),
        stored("join", np.array([2, 12, 4, 4]), "int64"),
    ]
    nodes = f"a = Reshape (x, cut) t = Transpose <perm = [{perm}]> (a) c = Reshape (t, join)"
    stays(CONV, signature, ", ".join(constants), f"{nodes} y = Conv (c, w)")
