"""Groups of linear layers with a common input, for `compact`."""

from __future__ import annotations

import pytest

from passes.fuse.compact.merge_linear import groups
from tests.checks import model
from tests.passes.fuse.constants import floats, typed

W = floats("w", 4, 6)


def test_layers_with_the_same_input_form_a_group() -> None:
    text = typed(
        "g (float[S, 4] x) => (float[S, 6] q, float[S, 3] k, float[S, 3] v, float[S, 4] o)",
        f"{W}, {floats('wk', 4, 3)}, {floats('wv', 4, 3)}, {floats('wo', 6, 4)}",
        "q = MatMul (x, w) k = MatMul (x, wk) v = MatMul (x, wv) o = MatMul (q, wo)",
    )
    (found,) = groups(model(text).graph)
    assert [(layer.result, layer.size) for layer in found] == [("q", 6), ("k", 3), ("v", 3)]


@pytest.mark.parametrize(
    "nodes",
    [
        "e = Exp (x) y = MatMul (x, w) z = MatMul (e, w)",
        "y = MatMul (x, w) z = MatMul (x, f)",
        "y = MatMul (x, w) z = Gemm (x, v)",
        "y = Gemm (x, w) z = Gemm <transB = 1> (x, t)",
        "y = Gemm (x, w) z = Gemm <alpha = 2.0> (x, v)",
    ],
)
def test_layers_with_other_differences_are_not_grouped(nodes: str) -> None:
    signature = "g (float[N, 4] x, float[4, 6] f) => (float[N, 6] y, float[N, 6] z)"
    constants = f"{W}, {floats('v', 4, 6)}, {floats('t', 6, 4)}"
    assert not groups(model(typed(signature, constants, nodes)).graph)
