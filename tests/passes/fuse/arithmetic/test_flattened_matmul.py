"""Products of flattened rows, which `fuse-arithmetic` writes along the last axis."""

from __future__ import annotations

from typing import Any

import pytest

from passes.fuse.arithmetic.fuse_arithmetic import FuseArithmetic
from tests.checks import check
from tests.passes.fuse.constants import becomes, floats, stays

FUSE = FuseArithmetic()
W = floats("w", 4, 6)
B = floats("b", 6)
FLAT = "int64[2] rows = {-1, 4}, int64[3] back = {0, 0, 6}, int64[3] whole = {2, 5, 6}"


def fused(signature: str, nodes: str, after: str, *constants: str, **options: Any) -> Any:
    return becomes(FUSE, signature, ", ".join(constants), nodes, after, **options)


def kept(signature: str, nodes: str, *constants: str, **options: Any) -> None:
    stays(FUSE, signature, ", ".join(constants), nodes, **options)


@pytest.mark.parametrize(
    ("product", "after"),
    [
        ("Gemm (f, w, b)", "MatMul Add"),
        ("Gemm <transB = 1> (f, t, b1)", "MatMul Add"),
        ("Gemm <beta = 2.0> (f, w)", "MatMul"),
        ("MatMul (f, w)", "MatMul"),
    ],
)
def test_a_product_of_flattened_rows_is_a_matmul(product: str, after: str) -> None:
    constants = [FLAT, W, B, floats("t", 6, 4), floats("b1", 1, 6)]
    nodes = f"f = Reshape (x, rows) c = {product} y = Reshape (c, whole)"
    fused("g (float[2, 5, 4] x) => (float[2, 5, 6] y)", nodes, after, *constants)
    heads = "g (float[2, 5, 2, 2] x) => (float[2, 5, 6] y)"
    fused(heads, nodes, f"Reshape {after}", *constants)


@pytest.mark.parametrize(
    ("signature", "nodes"),
    [
        # The rows come out in another order of dimensions, or in other pieces.
        ("float[2, 5, 4] x) => (float[2, 15, 2] y", "c = Gemm (f, w, b) y = Reshape (c, other)"),
        ("float[2, 5, 4] x) => (float[10, 6] y", "c = Gemm (f, w, b) y = Reshape (c, flat)"),
        ("float[2, 5, 4] x) => (float[2, 5, 6] y", "c = Gemm (f, w, full) y = Reshape (c, whole)"),
        (
            "float[2, 5, 4] x, float[6, 4] v) => (float[2, 5, 6] y",
            "c = Gemm <transB = 1> (f, v) y = Reshape (c, whole)",
        ),
        (
            "float[2, 5, 4] x, float[6] z) => (float[2, 5, 6] y",
            "c = Gemm (f, w, z) y = Reshape (c, whole)",
        ),
        (
            "float[2, 5, 2, 2] x) => (float[2, 5, 6] y, float[10, 4] z",
            "c = Gemm (f, w) y = Reshape (c, whole) z = Exp (f)",
        ),
        # The rows are an output, or what is added to them differs.
        (
            "float[2, 5, 4] x) => (float[2, 5, 6] y, float[10, 6] c",
            "c = Gemm (f, w) y = Reshape (c, whole)",
        ),
        (
            "float[2, 5, 4] x) => (float[2, 5, 6] y",
            "c = MatMul (f, w) d = Add (c, full) y = Reshape (d, whole)",
        ),
    ],
)
def test_other_reshapes_around_a_product_stay(signature: str, nodes: str) -> None:
    more = "int64[3] other = {2, 15, 2}", "int64[2] flat = {10, 6}", floats("full", 10, 6)
    kept(f"g ({signature})", f"f = Reshape (x, rows) {nodes}", FLAT, W, B, *more)


def test_a_bias_of_the_rows_moves_with_the_product() -> None:
    nodes = "f = Reshape (x, rows) c = MatMul (f, w) d = Add (b, c) y = Reshape (d, whole)"
    fused("g (float[2, 5, 4] x) => (float[2, 5, 6] y)", nodes, "MatMul Add", FLAT, W, B)


def test_heads_split_after_the_product_stay_split() -> None:
    apart = "int64[5] apart = {2, 5, 2, 3, 1}"
    nodes = "f = Reshape (x, rows) c = MatMul (f, w) y = Reshape (c, apart)"
    signature = "g (float[2, 5, 4] x) => (float[2, 5, 2, 3, 1] y)"
    fused(signature, nodes, "MatMul Reshape", FLAT, apart, W)
    joined = "g (float[2, 5, 1, 2, 2] x) => (float[2, 5, 2, 3, 1] y)"
    fused(joined, nodes, "Reshape MatMul Reshape", FLAT, apart, W)


@pytest.mark.parametrize("product", ["Gemm (f, w, b)", "MatMul (f, w)"])
def test_other_users_of_the_rows_get_flattened_rows(product: str) -> None:
    """A second product of them is then one of flattened rows, too."""
    signature = "g (float[2, 5, 4] x) => (float[2, 5, 6] y, float[2, 5, 3] z)"
    nodes = f"""f = Reshape (x, rows) c = {product} y = Reshape (c, whole)
        d = MatMul (c, v) z = Reshape (d, thirds)"""
    more = floats("v", 6, 3), "int64[3] thirds = {2, 5, 3}"
    added = "MatMul Add MatMul" if "b)" in product else "MatMul MatMul"
    fused(signature, nodes, added, FLAT, W, B, *more)


def test_layers_that_share_a_transposed_weight() -> None:
    signature = "g (float[2, 5, 4] x) => (float[2, 5, 4] z)"
    layer = "{1} = Reshape ({0}, rows) {2} = Gemm <transB = 1> ({1}, t) {3} = Reshape ({2}, back) "
    nodes = layer.format("x", "f", "c", "y") + layer.format("y", "d", "e", "z")
    shapes = "int64[2] rows = {-1, 4}, int64[3] back = {2, 5, 4}"
    fused(signature, nodes, "MatMul MatMul", shapes, floats("t", 4, 4))
    both = signature.replace("z)", "z, float[2, 5, 4] u)")
    kept(both, nodes + "u = MatMul (x, t)", shapes, floats("t", 4, 4))


def test_rows_may_be_split_along_other_axes() -> None:
    nodes = "f = Reshape (x, rows) c = MatMul (f, w) y = Reshape (c, whole)"
    fused("g (float[5, 2, 4] x) => (float[2, 5, 6] y)", nodes, "Reshape MatMul", FLAT, W)


def test_batch_and_length_may_vary() -> None:
    before = f"""<ir_version: 10, opset_import: ["" : 23]>
    g (float[N, S, 4] x) => (float[N, S, 2, 3] y) <int64[2] rows = {{-1, 4}},
        int64[2] heads = {{2, 3}}, {W}, float[M, 4] f, float[M, 6] c> {{
        n = Shape <start = 0, end = 2> (x) target = Concat <axis = 0> (n, heads)
        f = Reshape (x, rows) c = MatMul (f, w) y = Reshape (c, target) }}"""
    changed = check(FUSE, before)
    kinds = [node.op_type for node in changed.graph.nodes]
    assert kinds[-2:] == ["MatMul", "Reshape"]
    assert kinds.count("Reshape") == 1


def test_a_product_along_the_last_axis_stays() -> None:
    """Its heads are joined before: written anew, it would match for ever."""
    nodes = "f = Reshape (x, joined) c = MatMul (f, w) y = Reshape (c, apart)"
    constants = "int64[3] joined = {2, 5, 4}, int64[4] apart = {2, 5, 2, 3}"
    kept("g (float[2, 5, 2, 2] x) => (float[2, 5, 2, 3] y)", nodes, constants, W)
