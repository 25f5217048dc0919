"""Layers with constant weights: what is found, and why others stay float."""

from __future__ import annotations

import pytest

from passes.quantize.layers.find_layers import matrices_in, users_of, weighted_in
from passes.quantize.layers.layers import Linear, MatrixLayer, Table
from tests.checks import model
from tests.passes.fuse.constants import floats

INPUTS = """g (float[2, 3, 4] x, int64[5] i, float[1, 4, 5, 5] image, float[7, 1, 4] steps,
    float[8, 4] computed, float[6] b) => (y)"""
ZEROS = ", ".join(["0"] * 32)
STORED = f"""{floats("w", 4, 8)}, {floats("turned", 8, 4)}, {floats("c", 8)},
    {floats("k", 3, 4, 2, 2)}, {floats("gates", 1, 8, 4)}, {floats("again", 1, 8, 2)},
    {floats("few", 1, 6, 4)}, {floats("packed", 4, 12)}, {floats("packed_bias", 12)},
    {floats("deep", 2, 4, 8)}, float[0, 8] empty = {{}},
    float16[4, 8] half = {{{ZEROS}}}, double[4, 8] double = {{{ZEROS}}}"""


def found(nodes: str, convolutions: bool = True) -> list[tuple[str, str]]:
    """Return kind, or reason, of each layer with the output that it computes."""
    subject = model(f"{INPUTS} <{STORED}> {{ {nodes} }}")
    items = weighted_in(subject, convolutions)
    return [(i.node.output[0], i.layer.kind if i.layer else i.reason) for i in items]


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        ("y = MatMul (x, w)", "a linear layer"),
        ("t = Transpose (turned) y = MatMul (x, t)", "a linear layer"),
        ("y = Gemm <transB = 1, beta = 2.0> (x, turned, c)", "a linear layer"),
        ("y = com.microsoft.FusedMatMul <alpha = 0.5> (x, w)", "a linear layer"),
        ("y = Gather (w, i)", "a table"),
        ("y = Gather <axis = -2> (w, i)", "a table"),
        ("y = Conv (image, k)", "a convolution"),
        ("y = LSTM <hidden_size = 2> (steps, gates, again)", "a recurrent layer"),
        (
            "y = com.microsoft.Attention <num_heads = 2> (x, packed, packed_bias)",
            "packed attention",
        ),
    ],
)
def test_kinds(node: str, kind: str) -> None:
    assert found(node) == [("y", kind)]


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ("y = MatMul (w, computed)", "a weight on the left"),
        ("y = Gemm <transA = 1> (x, w)", "a transposed input"),
        ("y = com.microsoft.FusedMatMul <transBatchA = 1> (x, w)", "a transposed input"),
        ("y = Gemm <beta = 2.0> (x, w, b)", "a bias that is computed and scaled"),
        ("y = Conv (image, k, b)", "a bias that is computed"),
        ("y = MatMul (x, deep)", "weights of rank 3, not 2"),
        ("y = MatMul (x, empty)", "empty weights"),
        (
            "y = MatMul (x, half)",
            "weights of float16, and only 32-bit floats are quantized; run the pass fp32 first",
        ),
        ("y = MatMul (x, double)", "weights of double, and only 32-bit floats are quantized"),
        ("y = Gather <axis = 1> (w, i)", "a table that is not gathered by rows"),
        ("y = Gather (turned, i)", "rows of fewer than 8 numbers"),
        ("y = GRU <hidden_size = 2> (steps, few, few)", "a recurrent layer without an int8 kernel"),
        (
            "y = LSTM <hidden_size = 2, layout = 1> (steps, gates, again)",
            "a recurrent layer with the batch first, which the int8 kernel lacks",
        ),
        ("y = LSTM <hidden_size = 2> (steps, few, again)", "weights without four equal gates"),
        ("y = LSTM <hidden_size = 2> (steps, gates, w)", "weights of rank 2, not 3"),
        (
            "y = com.microsoft.Attention <num_heads = 2> (x, packed, packed_bias, , , b)",
            "packed attention with an attention bias or a past buffer",
        ),
        (
            "y = com.microsoft.Attention <num_heads = 2, do_rotary = 1> (x, packed, packed_bias)",
            "packed attention with do_rotary, which the int8 kernel lacks",
        ),
    ],
)
def test_layers_that_stay_float_have_a_reason(node: str, reason: str) -> None:
    assert found(node) == [("y", reason)]


@pytest.mark.parametrize(
    "node",
    [
        "y = MatMul (x, computed)",  # computed weights
        "t = Transpose (computed) y = MatMul (x, t)",
        "t = Transpose <perm = [0, 2, 1]> (deep) y = MatMul (x, t)",
        "y = MatMul (w, turned)",  # constants, which folding computes
        "y = Gather (i, i)",
        "y = GRU <hidden_size = 2> (steps, x, x)",
        "y = LSTM <hidden_size = 2> (steps, gates, x)",
        "y = Add (x, x)",
    ],
)
def test_operators_without_constant_weights_are_no_layers(node: str) -> None:
    assert found(node) == []


def test_convolutions_are_found_on_request() -> None:
    assert found("y = Conv (image, k)", convolutions=False) == []


def test_layers_of_subgraphs_are_found_with_the_graph_of_their_weight() -> None:
    subject = model(f"""g (float[2, 4] x, bool on) => (float[2, 8] y) <{floats("w", 4, 8)}>
        {{ y = If (on) <then_branch = t () => (a) {{ a = MatMul (x, w) }},
                        else_branch = e () => (n) {{ m = MatMul (x, w) n = Neg (m) }}> }}""")
    layers = [item.layer for item in matrices_in(subject)]
    assert [layer.weight.graph is subject.graph for layer in layers if layer] == [True, True]


def test_a_transposed_weight_is_the_same_weight() -> None:
    subject = model(f"""g (float[2, 8] x, int64[5] i) => (float[2, 20] y, float[5, 8] z)
        <{floats("w", 20, 8)}> {{ z = Gather (w, i) t = Transpose (w) y = MatMul (x, t) }}""")
    table, linear = (item.layer for item in matrices_in(subject))
    assert isinstance(table, Table)
    assert isinstance(linear, Linear)
    assert table.weight.key == linear.weight.key
    assert (table.weight.turned, linear.weight.turned) == (False, True)
    assert (linear.outputs, linear.size, table.indices) == (20, 160, "i")
    users = users_of(table.weight)
    assert users is not None
    assert sorted(user.output[0] for user in users) == ["y", "z"]


def test_a_weight_that_is_an_output_has_users_outside_of_the_graph() -> None:
    subject = model(f"""g (float[2, 8] x) => (float[2, 20] y, float[8, 20] t) <{floats("w", 20, 8)}>
        {{ t = Transpose (w) y = MatMul (x, t) }}""")
    [item] = matrices_in(subject)
    assert isinstance(item.layer, MatrixLayer)
    assert users_of(item.layer.weight) is None


def test_matrices_are_linear_layers_and_tables() -> None:
    subject = model(f"{INPUTS} <{STORED}> {{ y = LSTM <hidden_size = 2> (steps, gates, again) }}")
    [item] = matrices_in(subject)
    assert (item.layer, item.reason) == (None, "a recurrent layer")


@pytest.mark.parametrize(
    ("attributes", "bias"),
    [("", "c"), ("<beta = 0.0>", ""), ("<beta = 0.5>", "c")],
)
def test_a_bias_times_zero_is_none(attributes: str, bias: str) -> None:
    subject = model(f"{INPUTS} <{STORED}> {{ y = Gemm {attributes} (x, w, c) }}")
    [item] = matrices_in(subject)
    assert isinstance(item.layer, Linear)
    assert item.layer.bias == bias
