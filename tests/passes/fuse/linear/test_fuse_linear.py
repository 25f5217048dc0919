"""`fuse-linear`: maps folded into the weights of MatMul and Gemm, and near misses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from passes.fuse.linear.fuse_linear import FuseLinear
from tests.passes.fuse.constants import batch_norm, becomes, floats, stays, stored
from toolkit.ir import node as nd

LINEAR = FuseLinear()
ROWS = "g (float[N, 4] x) => (float[N, 6] y)"
TOKENS = "g (float[N, S, 4] x) => (float[N, S, 6] y)"
W = floats("w", 4, 6)
B = floats("b", 6)
NORM = "BatchNormalization (c, gamma, beta, mean, variance)"


def fused(signature: str, nodes: str, after: str, *constants: str, **options: Any) -> Any:
    return becomes(LINEAR, signature, ", ".join(constants), nodes, after, **options)


def kept(signature: str, nodes: str, *constants: str, **options: Any) -> None:
    stays(LINEAR, signature, ", ".join(constants), nodes, **options)


# -- Gemm


@pytest.mark.parametrize("bias", ["b", "b2", "s", "s2"])
def test_a_product_of_matrices_and_a_bias_are_a_gemm(bias: str) -> None:
    constants = W, B, floats("b2", 1, 6), "float s = {2}", "float[1, 1] s2 = {3}"
    fused(ROWS, f"c = MatMul (x, w) y = Add ({bias}, c)", "Gemm", *constants)
    both = "g (float[N, 4] x, float[4, 6] v) => (float[N, 6] y)"
    fused(both, f"c = MatMul (x, v) y = Add (c, {bias})", "Gemm", *constants)
    turned = "g (float[N, 4] x, float[6, 4] v) => (float[N, 6] y)"
    gemm = f"c = Gemm <transB = 1, alpha = 0.5, beta = 7.0> (x, v) y = Add (c, {bias})"
    fused(turned, gemm, "Gemm", *constants)


@pytest.mark.parametrize(
    ("signature", "nodes"),
    [
        (TOKENS, "c = MatMul (x, w) y = Add (c, b)"),  # a batch of matrices
        ("g (float[3, 4] x) => (float[3, 6] y)", "c = MatMul (x, w) y = Add (c, full)"),
        ("g (float[3, 4] x) => (float[3, 6] y)", "c = MatMul (x, w) y = Add (c, column)"),
        ("g (float[3, 4] x) => (float[1, 3, 6] y)", "c = MatMul (x, w) y = Add (c, b3)"),
        ("g (float[3, 4] x) => (float[3, 6] y)", "c = MatMul (x, w1) y = Add (c, b)"),
        ("g (float[3, 4] x, float[4, M] v) => (float[3, 6] y)", "c = MatMul (x, v) y = Add (c, b)"),
        ("g (float[3, 4] x, float[6] z) => (float[3, 6] y)", "c = MatMul (x, w) y = Add (c, z)"),
        ("g (float[4] x) => (float[6] y)", "c = MatMul (x, w) y = Add (c, b)"),
    ],
)
def test_other_biases_stay(signature: str, nodes: str) -> None:
    constants = floats("full", 3, 6), floats("column", 3, 1), floats("b3", 1, 1, 6)
    runs = "M" not in signature  # M is unknown
    kept(signature, nodes, W, B, *constants, floats("w1", 4, 1), run=runs)


def test_integers_stay() -> None:
    signature = "g (int32[N, 2] x) => (int32[N, 2] y)"
    constants = "int32[2, 2] w = {1, 2, 3, 4}", "int32[2] b = {1, 2}"
    kept(signature, "c = MatMul (x, w) y = Add (c, b)", *constants)


def test_a_product_with_other_users_stays() -> None:
    signature = "g (float[N, 4] x) => (float[N, 6] y, float[N, 6] c)"
    kept(signature, "c = MatMul (x, w) y = Add (c, b)", W, B)


@pytest.mark.parametrize(
    ("signature", "nodes", "flags"),
    [
        ("float[4, N] x", "t = Transpose (x) y = MatMul (t, w)", (1, 0)),
        ("float[N, 4] x, float[6, 4] v", "t = Transpose (v) y = MatMul (x, t)", (0, 1)),
        (
            "float[4, N] x, float[6, 4] v",
            "t = Transpose <perm = [1, 0]> (x) u = Transpose (v) y = MatMul (t, u)",
            (1, 1),
        ),
        ("float[N, 4] x", "t = Transpose (x) y = Gemm <transA = 1> (t, w, b)", (0, 0)),
        ("float[N, 4] x, float[6, 4] v", "t = Transpose (v) y = Gemm (x, t, b)", (0, 1)),
    ],
)
def test_transposes_of_matrices_are_folded_into_a_gemm(
    signature: str, nodes: str, flags: tuple[int, int]
) -> None:
    signature = f"g ({signature}) => (float[N, 6] y)"
    changed = fused(signature, nodes, "Gemm", W, B)
    (node,) = changed.graph.nodes
    assert (nd.attr(node, "transA", 0), nd.attr(node, "transB", 0)) == flags


def test_other_transposes_stay() -> None:
    batch = "g (float[N, 4, S] x) => (float[N, S, 6] y)"
    kept(batch, "t = Transpose <perm = [0, 2, 1]> (x) y = MatMul (t, w)", W)
    twice = "g (float[4, N] x) => (float[N, 6] y, float[N, 4] z)"
    kept(twice, "t = Transpose (x) y = MatMul (t, w) z = Exp (t)", W)
    kept(
        "g (float[N, 4] x) => (float[N, 6] y)",
        "t = Transpose <perm = [0, 1]> (x) y = MatMul (t, w)",
        W,
    )


def test_factors_of_a_gemm_are_folded_into_its_constants() -> None:
    changed = fused(ROWS, "y = Gemm <alpha = 0.5, beta = 3.0> (x, w, b)", "Gemm", W, B)
    assert not changed.graph.nodes[0].attribute
    # A variable bias keeps its factor.
    signature = "g (float[N, 4] x, float[6] z) => (float[N, 6] y)"
    changed = fused(signature, "y = Gemm <alpha = 0.5, beta = 3.0> (x, w, z)", "Gemm", W)
    assert nd.attrs(changed.graph.nodes[0]) == {"beta": 3.0}


def test_factors_of_a_gemm_stay_where_constants_are_shared_or_fed() -> None:
    signature = "g (float[N, 4] x) => (float[N, 6] y, float[N, 6] z)"
    kept(signature, "y = Gemm <alpha = 0.5> (x, w) z = MatMul (x, w)", W)
    fed = "g (float[N, 4] x, float[4, 6] v) => (float[N, 6] y)"
    kept(fed, "y = Gemm <alpha = 0.5> (x, v)")


# -- scales and shifts behind


@pytest.mark.parametrize(
    "then",
    [
        f"y = {NORM}",
        "y = Mul (c, b)",
        "y = Div (c, s)",
        "d = Sub (s, c) y = Neg (d)",
        "d = Add (c, b) e = Mul (d, b1) y = Sub (e, s)",
    ],
)
@pytest.mark.parametrize(
    "gemm",
    [
        "Gemm (x, w)",
        "Gemm <alpha = 0.5, beta = 2.0> (x, w, b0)",
        "Gemm <transB = 1> (x, v, b1)",
        "Gemm <transB = 1, beta = 0.5> (x, v, s)",
    ],
)
def test_maps_after_a_gemm_are_folded_into_it(gemm: str, then: str) -> None:
    constants = [W, B, floats("v", 6, 4), floats("b0", 6), floats("b1", 1, 6), "float s = {0.3}"]
    fused(ROWS, f"c = {gemm} {then}", "Gemm", *constants, batch_norm(6))


@pytest.mark.parametrize(
    ("then", "after"),
    [
        ("y = Mul (c, b)", "MatMul"),
        ("y = Div (c, s)", "MatMul"),
        ("d = Add (c, b) y = Mul (d, s)", "MatMul Add"),
        ("d = Mul (c, s) y = Add (d, b)", "MatMul Add"),
        ("d = Mul (c, b1) e = Add (d, b) f = Sub (e, s) y = Neg (f)", "MatMul Add"),
    ],
)
def test_maps_after_a_matmul_leave_at_most_one_add(then: str, after: str) -> None:
    constants = W, B, floats("b1", 1, 6), "float s = {0.3}"
    fused(TOKENS, f"c = MatMul (x, w) {then}", after, *constants)


def test_batch_normalization_of_a_matmul_makes_a_gemm() -> None:
    fused(ROWS, f"c = MatMul (x, w) y = {NORM}", "Gemm", W, batch_norm(6))


@pytest.mark.parametrize(
    ("signature", "nodes"),
    [
        # Batch normalization of [N, S, C] is by S.
        ("g (float[N, 6, 4] x) => (float[N, 6, 6] y)", f"c = MatMul (x, w) y = {NORM}"),
        ("g (float[N, 6, 4] x) => (float[N, 6, 6] y)", "c = MatMul (x, w) y = Mul (c, column)"),
        ("g (float[N, 4] x, float[6] z) => (float[N, 6] y)", "c = MatMul (x, w) y = Mul (c, z)"),
        ("g (float[N, 4] x, float[4, 6] v) => (float[N, 6] y)", "c = MatMul (x, v) y = Mul (c, b)"),
        ("g (float[N, 4] x) => (float[N, 6] y)", "c = MatMul (x, w) y = Mul (c, c)"),
        ("g (float[6] x) => (float[4] y)", "c = MatMul (w, x) y = Mul (c, four)"),
    ],
)
def test_maps_of_other_operators_stay(signature: str, nodes: str) -> None:
    kept(signature, nodes, W, B, batch_norm(6), floats("column", 6, 1), floats("four", 4))


def test_a_shared_weight_is_copied_only_when_small() -> None:
    signature = "g (float[N, {k}] x) => (float[N, {n}] y, float[N, {n}] z)"
    nodes = "c = MatMul (x, w) y = Mul (c, s) z = MatMul (x, w)"
    small = signature.format(k=4, n=6)
    fused(small, nodes, "MatMul MatMul", W, "float s = {0.3}")
    large = signature.format(k=300, n=400)
    kept(large, nodes, floats("w", 300, 400), "float s = {0.3}", atol=1e-4)


# -- scales and shifts before


@pytest.mark.parametrize("before", ["d = Mul (x, k)", "e = Sub (x, k) d = Div (e, s)"])
@pytest.mark.parametrize("gemm", ["Gemm (d, w)", "Gemm <transB = 1, alpha = 0.5> (d, v, b)"])
def test_maps_before_a_gemm_are_folded_into_it(before: str, gemm: str) -> None:
    constants = W, B, floats("v", 6, 4), floats("k", 4), "float s = {0.3}"
    fused(ROWS, f"{before} y = {gemm}", "Gemm", *constants)


def test_batch_normalization_before_a_gemm_is_folded_into_it() -> None:
    before = f"d = {NORM.replace('(c', '(x')}"
    fused(ROWS, f"{before} y = Gemm (d, w, b)", "Gemm", W, B, batch_norm(4))


@pytest.mark.parametrize(
    ("nodes", "after"),
    [
        ("d = Mul (x, k) y = MatMul (d, w)", "MatMul"),
        ("d = Add (x, k) c = MatMul (d, w) y = Add (c, b)", "MatMul Add"),
        ("e = Mul (x, k) d = Add (e, k) c = MatMul (d, w) y = Add (b, c)", "MatMul Add"),
        ("e = Mul (x, k) d = Add (e, k) y = MatMul (d, w)", "MatMul Add"),
    ],
)
def test_maps_before_a_matmul_are_folded_into_it_or_after_it(nodes: str, after: str) -> None:
    fused(TOKENS, nodes, after, W, B, floats("k", 4))


@pytest.mark.parametrize(
    ("signature", "nodes"),
    [
        (TOKENS, "d = Add (x, k) y = MatMul (d, w)"),  # an Add would remain after it
        ("g (float[N, S, 1] x) => (float[N, S, 6] y)", "d = Mul (x, k) y = MatMul (d, w)"),
        ("g (float[4] x) => (float[1, 1, 6] y)", "d = Mul (x, k3) y = MatMul (d, w)"),
        ("g (float[4, 4] x) => (float[4, 6] y)", "d = Mul (x, column) y = MatMul (d, w)"),
        ("g (float[4, N] x) => (float[N, 6] y)", "d = Mul (x, k1) y = Gemm <transA = 1> (d, w)"),
    ],
)
def test_other_maps_before_stay(signature: str, nodes: str) -> None:
    constants = floats("k3", 1, 1, 4), floats("column", 4, 1), floats("k1", 4, 1)
    kept(signature, nodes, W, floats("k", 4), *constants)


def test_an_input_with_other_users_stays() -> None:
    signature = "g (float[N, 4] x) => (float[N, 6] y, float[N, 6] z)"
    nodes = "d = Mul (x, k) y = MatMul (d, w) z = MatMul (d, v)"
    kept(signature, nodes, W, floats("v", 4, 6), floats("k", 4))


# -- in a row


@pytest.mark.parametrize(
    ("nodes", "after"),
    [
        ("c = MatMul (x, u) y = MatMul (c, v)", "MatMul"),
        ("d = MatMul (x, u) c = Add (d, b) y = MatMul (c, v)", "MatMul Add"),
        ("d = MatMul (x, u) c = Add (d, b) e = MatMul (c, v) y = Add (b6, e)", "MatMul Add"),
    ],
)
def test_consecutive_linear_layers_are_merged(nodes: str, after: str) -> None:
    constants = floats("u", 4, 8), floats("v", 8, 6), floats("b", 8), floats("b6", 6)
    fused(TOKENS, nodes, after, *constants, atol=1e-4)


@pytest.mark.parametrize("second", ["Gemm (c, v)", "Gemm <transB = 1, alpha = 0.5> (c, t, b6)"])
@pytest.mark.parametrize("first", ["Gemm <alpha = 0.5, beta = 2.0> (x, u, b)", "MatMul (x, u)"])
def test_consecutive_gemms_are_merged(first: str, second: str) -> None:
    constants = [floats("u", 4, 8), floats("v", 8, 6), floats("t", 6, 8), floats("b", 8)]
    fused(ROWS, f"c = {first} y = {second}", "Gemm", *constants, floats("b6", 6), atol=1e-4)


@pytest.mark.parametrize(
    ("inner", "nodes"),
    [
        (2, "c = MatMul (x, u) y = MatMul (c, v)"),  # a bottleneck: 20 weights, 24 if merged
        (8, "c = MatMul (x, u) r = Relu (c) y = MatMul (r, v)"),
        (8, "c = MatMul (x, u) d = Add (c, z) y = MatMul (d, v)"),
        (8, "c = MatMul (x, u) d = MatMul (c, v) e = MatMul (x, u) y = MatMul (e, v)"),
    ],
)
def test_other_consecutive_layers_stay(inner: int, nodes: str) -> None:
    signature = TOKENS.replace(" x)", f" x, float[{inner}] z)")
    constants = floats("u", 4, inner), floats("v", inner, 6)
    if "d = MatMul" in nodes:
        signature = signature.replace(" y)", " y, float[N, S, 6] d)")
    kept(signature, nodes, *constants)


def test_a_map_with_other_users_stays() -> None:
    signature = "g (float[N, 4] x) => (float[N, 6] y, float[N, 8] c)"
    kept(signature, "c = MatMul (x, u) y = MatMul (c, v)", floats("u", 4, 8), floats("v", 8, 6))


# -- one-hot


def hot(rows: int, chosen: list[int]) -> np.ndarray[Any, Any]:
    matrix = np.zeros((rows, len(chosen)))
    matrix[chosen, np.arange(len(chosen))] = 1
    return matrix


@pytest.mark.parametrize(
    ("chosen", "after"),
    [([3, 1, 1, 9], "Gather"), ([2, 3, 4], "Slice"), (list(range(10)), "")],
)
def test_a_one_hot_matrix_selects(chosen: list[int], after: str) -> None:
    count = len(chosen)
    columns, rows = stored("p", hot(10, chosen)), stored("p", hot(10, chosen).T)
    nodes = "a = Exp (x) c = MatMul ({}) y = Neg (c)"
    left = " ".join(f"Exp {after} Neg".split())
    signature = f"g (float[N, S, 10] x) => (float[N, S, {count}] y)"
    fused(signature, nodes.format("a, p"), left, columns)
    signature = f"g (float[N, 10, S] x) => (float[N, {count}, S] y)"
    fused(signature, nodes.format("p, a"), left, rows)


@pytest.mark.parametrize(
    "matrix",
    [
        hot(10, [1, 2, 3]) * 2,
        hot(10, [1, 2, 3]) + hot(10, [1, 5, 3]) * (np.arange(3) == 1),  # two ones
        hot(10, [1, 2, 3]) * (np.arange(3) != 1),  # none
        hot(10, [1, 2, 3]) + hot(10, [0, 0, 0]) * ((np.arange(3) == 1) * 1.0 - (np.arange(3) == 2)),
        hot(4, [0, 1, 2]),  # too small to gain
    ],
)
def test_other_matrices_stay_products(matrix: np.ndarray[Any, Any]) -> None:
    signature = f"g (float[N, {len(matrix)}] x) => (float[N, 3] y)"
    kept(signature, "y = MatMul (x, p)", stored("p", matrix))


# -- half precision


def test_half_precision_is_rounded_once() -> None:
    signature = "g (float16[2, 3] x) => (float16[2, 3] y)"
    constants = [
        stored("w", np.eye(3) + 1, "float16"),
        stored("big", 60000.0, "float16"),
        stored("tiny", 2.0**-15, "float16"),
    ]
    nodes = "c = MatMul (x, w) d = Mul (c, tiny) y = Mul (d, big)"
    fused(signature, nodes, "MatMul", *constants, atol=5e-3)
    kept(signature, "c = MatMul (x, w) y = Mul (c, big)", *constants, inputs=SMALL, atol=1)


SMALL = {"x": np.full((2, 3), 0.1, np.float16)}
