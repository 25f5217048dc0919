"""Dynamic int8 of linear layers: what is written, what it computes, and what stays as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from tests import ort as plain
from tests.checks import check, parse, random_feeds
from tests.passes.fuse.constants import floats, stored
from tests.passes.quantize.schemes.dynamic.checks import (
    ALL,
    COARSE,
    LAYER,
    ROWS,
    X_Y,
    fused_by_runtime,
    matrices,
    quantized,
    stays,
)
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

# -- linear layers


def test_a_matmul() -> None:
    changed = quantized(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", LAYER)
    assert list(matrices(changed).values()) == [TensorProto.INT8]
    assert changed.graph.outputs == ["y"]


def test_the_same_numbers_as_in_numpy() -> None:
    changed = quantized(
        X_Y, f"{floats('w', 16, 8)}, {floats('b', 8)}", "a = MatMul (x, w) y = Add (a, b)",
        f"{LAYER} Add",
    )  # fmt: skip
    feeds = random_feeds(changed)
    constants = parse(f"{X_Y} <{floats('w', 16, 8)}, {floats('b', 8)}> {{ y = MatMul (x, w) }}")
    w, b = (onnx.numpy_helper.to_array(t) for t in constants.graph.initializer)
    x = feeds["x"]
    low, high = min(x.min(), np.float32(0)), max(x.max(), np.float32(0))
    x_scale = (high - low) / np.float32(255)
    zero = np.clip(np.rint(-low / x_scale), 0, 255)
    integers = np.clip(np.rint(x / x_scale) + zero, 0, 255).astype(np.int32)
    w_scale = np.abs(w).max(axis=0) / np.float32(127)
    w_integers = np.clip(np.rint(w / w_scale), -127, 127).astype(np.int32)
    sums = (integers - np.int32(zero)) @ w_integers
    wanted = sums.astype(np.float32) * (x_scale * w_scale) + b
    (found,) = plain.run(changed.inlined_proto(), feeds)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("attributes", "shape"),
    [("", "16, 8"), ("<transB = 1>", "8, 16"), ("<alpha = -2.5, transB = 1>", "8, 16")],
)
@pytest.mark.parametrize("bias", ["", "8", "1, 8", "1", "1, 1"])
def test_gemm(attributes: str, shape: str, bias: str) -> None:
    sizes = [int(size) for size in shape.split(", ")]
    constants = floats("w", *sizes)
    if bias:
        constants += ", " + floats("b", *map(int, bias.split(", ")))
    node = f"y = Gemm {attributes} (x, w{', b' if bias else ''})"
    quantized(ROWS, constants, node, f"{LAYER} Add" if bias else LAYER)


def test_a_gemm_that_scales_its_bias() -> None:
    constants = f"{floats('w', 16, 8)}, {floats('b', 8)}"
    quantized(ROWS, constants, "y = Gemm <beta = 3.0> (x, w, b)", f"{LAYER} Add")
    quantized(ROWS, constants, "y = Gemm <beta = 0.0> (x, w, b)", LAYER)


def test_a_gemm_with_a_bias_that_differs_by_row_or_is_computed() -> None:
    signature = "g (float[3, 16] x, float[3, 8] c) => (float[3, 8] y)"
    quantized(signature, floats("w", 16, 8), "y = Gemm (x, w, c)", f"{LAYER} Add")
    constants = f"{floats('w', 16, 8)}, {floats('b', 3, 1)}"
    quantized(signature, constants, "y = Gemm <beta = 2.0> (x, w, b)", f"{LAYER} Add")
    notes = stays(signature, floats("w", 16, 8), "y = Gemm <beta = 2.0> (x, w, c)")
    assert "a bias that is computed and scaled" in notes[0]


def test_a_gemm_with_a_transposed_input_stays() -> None:
    signature = "g (float[16, N] x) => (float[N, 8] y)"
    notes = stays(signature, floats("w", 16, 8), "y = Gemm <transA = 1> (x, w)")
    assert "a transposed input" in notes[0]


def test_a_fused_matmul() -> None:
    header = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>\n'
    for attributes, changes in (("transB = 1, alpha = 0.5", True), ("transA = 1", False)):
        shape = (8, 16) if changes else (16, 8)
        signature = X_Y if changes else "g (float[N, 16, 4] x) => (float[N, 4, 8] y)"
        node = f"y = com.microsoft.FusedMatMul <{attributes}> (x, w)"
        text = f"{header}{signature} <{floats('w', *shape)}> {{ {node} }}"
        check(ALL, text, atol=COARSE, near_miss=not changes)


def test_layers_of_one_input_share_its_quantizer(tmp_path: Path) -> None:
    signature = "g (float[N, S, 16] x) => (float[N, S, 8] q, float[N, S, 8] k, float[N, S, 8] v)"
    constants = ", ".join(floats(name, 16, 8) for name in "abc")
    nodes = "q = MatMul (x, a) k = MatMul (x, b) v = MatMul (x, c)"
    each = LAYER.removeprefix("DynamicQuantizeLinear ")
    changed = quantized(signature, constants, nodes, f"{LAYER} {each} {each}")
    names = fused_by_runtime(changed, tmp_path)
    assert sorted(names) == ["DynamicQuantizeLinear", *["MatMulIntegerToFloat"] * 3]


@pytest.mark.parametrize(
    "nodes",
    ["a = MatMul (x, w) y = Add (a, b)", "a = MatMul (x, w) y = Sum (b, a)"],
)
@pytest.mark.parametrize("bias", ["8", "1, 1, 8"])
def test_the_runtime_makes_one_operator_of_a_layer(tmp_path: Path, nodes: str, bias: str) -> None:
    constants = f"{floats('w', 16, 8)}, {floats('b', *map(int, bias.split(', ')))}"
    changed = quantized(X_Y, constants, nodes, f"{LAYER} Add")
    assert fused_by_runtime(changed, tmp_path) == ["DynamicQuantizeMatMul"]


def test_the_runtime_makes_one_operator_of_a_gemm(tmp_path: Path) -> None:
    constants = f"{floats('w', 8, 16)}, {floats('b', 1, 8)}"
    changed = quantized(ROWS, constants, "y = Gemm <transB = 1> (x, w, b)", f"{LAYER} Add")
    assert fused_by_runtime(changed, tmp_path) == ["DynamicQuantizeMatMul"]


def test_a_sum_that_is_no_bias_stays_a_sum() -> None:
    signature = "g (float[N, S, 16] x, float[N, S, 8] r) => (float[N, S, 8] y)"
    nodes = "a = MatMul (x, w) y = Sum (a, r)"
    quantized(signature, floats("w", 16, 8), nodes, f"{LAYER} Sum")
    both = signature.replace(" y)", " y, float[N, S, 8] a)")
    constants = f"{floats('w', 16, 8)}, {floats('b', 8)}"
    quantized(both, constants, nodes.replace("r)", "b)"), f"{LAYER} Sum")


def test_a_bias_that_raises_the_rank_keeps_its_shape() -> None:
    signature = "g (float[N, 16] x) => (float[1, N, 8] y)"
    constants = f"{floats('w', 16, 8)}, {floats('b', 1, 1, 8)}"
    quantized(signature, constants, "a = MatMul (x, w) y = Add (a, b)", f"{LAYER} Add")


def test_weight_with_two_users_is_stored_once() -> None:
    signature = "g (float[N, 16] x) => (float[N, 16] y)"
    nodes = "a = MatMul (x, w) t = Tanh (a) y = MatMul (t, w)"
    changed = quantized(signature, floats("w", 16, 16), nodes, f"{LAYER} Tanh {LAYER}")
    assert len(matrices(changed)) == 1
    assert len(changed.graph.initializers) == 2


def test_layers_right_behind_each_other() -> None:
    constants = f"{floats('v', 16, 16)}, {floats('w', 8, 16)}, {floats('b', 8)}"
    nodes = "a = MatMul (x, v) y = Gemm <transB = 1> (a, w, b)"
    quantized(ROWS, constants, nodes, f"{LAYER} {LAYER} Add")
    signature = "g (float[2, 16] x) => (float[2, 8] y)"
    nodes = "a = MatMul (x, v) c = MatMul (x, u) y = Gemm (a, w, c)"
    constants = ", ".join([floats("v", 16, 16), floats("u", 16, 8), floats("w", 16, 8)])
    each = LAYER.removeprefix("DynamicQuantizeLinear ")
    quantized(signature, constants, nodes, f"{LAYER} {each} {LAYER} Add")


def test_weight_with_a_float_user_is_kept_for_it() -> None:
    signature = "g (float[N, 16] x) => (float[N, 8] y, float[16, 8] z)"
    nodes = "y = MatMul (x, w) z = Neg (w)"
    changed = quantized(signature, floats("w", 16, 8), nodes, f"{LAYER} Neg")
    assert matrices(changed)["w"] == TensorProto.FLOAT


def test_one_scale_for_all() -> None:
    item = QuantizeDynamic(min_elements=1, per_channel=False)
    changed = quantized(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", LAYER, item)
    assert sorted(len(t.dims) for t in changed.graph.initializers.values()) == [0, 2]


def test_reduced_range() -> None:
    item = QuantizeDynamic(min_elements=1, reduce_range=True)
    changed = quantized(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", LAYER, item)
    (name,) = matrices(changed)
    integers = changed.graph.const(name)
    assert integers is not None
    assert np.abs(integers.astype(int)).max() == 64


@pytest.mark.parametrize("size", [0, 1])
def test_inputs_without_rows_and_of_one_dimension(size: int) -> None:
    rows = np.ones((2, size, 16), np.float32)
    quantized(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", LAYER, inputs={"x": rows})
    vector = "g (float[16] x) => (float[8] y)"
    quantized(vector, floats("w", 16, 8), "y = MatMul (x, w)", LAYER)


# -- what stays


def test_small_layers_stay() -> None:
    notes = stays(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", QuantizeDynamic())
    assert notes == ["left float: MatMul 'y' (fewer than 4096 weights)"]
    at_least = QuantizeDynamic(min_elements=16 * 8)
    quantized(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", LAYER, at_least)


@pytest.mark.parametrize("pattern", ["MatMul", "y", "*"])
def test_excluded_layers_stay(pattern: str) -> None:
    item = QuantizeDynamic(min_elements=1, exclude=(pattern,))
    assert "excluded" in stays(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", item)[-1]


def test_only_included_layers_are_written() -> None:
    item = QuantizeDynamic(min_elements=1, include=("Gemm", "Gem"))
    notes = stays(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", item)
    assert notes[:2] == ["no node matches 'Gemm'", "no node matches 'Gem'"]


def test_products_of_activations_and_constants_on_the_left_stay() -> None:
    signature = "g (float[N, 4, 16] x, float[N, 16, 8] z) => (float[N, 4, 8] y)"
    assert stays(signature, "", "y = MatMul (x, z)") == []
    left = "g (float[16, N] x) => (float[8, N] y)"
    (note,) = stays(left, floats("w", 8, 16), "y = MatMul (w, x)")
    assert note == "left float: MatMul 'y' (a weight on the left)"


def test_weight_that_is_a_graph_input_stays_float() -> None:
    signature = "g (float[N, 16] x, float[16, 8] w) => (float[N, 8] y)"
    assert stays(signature, floats("w", 16, 8), "y = MatMul (x, w)") == []


def test_weights_of_rank_3_stay_float() -> None:
    signature = "g (float[2, 4, 16] x) => (float[2, 4, 8] y)"
    notes = stays(signature, floats("w", 2, 16, 8), "y = MatMul (x, w)")
    assert "weights of rank 3, not 2" in notes[0]


def test_matmul_without_elements_stays_float() -> None:
    """The runtime leaves whatever is in memory for a sum of no products of integers."""
    signature = "g (float[N, 0] x) => (float[N, 8] y)"
    fed = {"x": np.zeros((3, 0), np.float32)}
    notes = stays(signature, "float[0, 8] w = {}", "y = MatMul (x, w)", inputs=fed)
    assert "empty weights" in notes[0]


@pytest.mark.parametrize("kind", ["float16", "double"])
def test_other_element_types_stay(kind: str) -> None:
    signature = X_Y.replace("float[", f"{kind}[")
    numbers = np.random.default_rng(0).uniform(-1, 1, (16, 8))
    notes = stays(signature, stored("w", numbers, kind), "y = MatMul (x, w)")
    assert f"weights of {kind}" in notes[0]


def test_convolutions_and_recurrent_layers_stay() -> None:
    signature = "g (float[N, 3, 9, 9] x) => (float[N, 4, 7, 7] y)"
    assert stays(signature, floats("w", 4, 3, 3, 3), "y = Conv (x, w)") == []
    signature = "g (float[5, N, 6] x) => (float[5, 1, N, 4] y)"
    constants = f"{floats('w', 1, 12, 6)}, {floats('r', 1, 12, 4)}"
    notes = stays(signature, constants, "y = GRU <hidden_size = 4> (x, w, r)")
    assert "a recurrent layer" in notes[0]


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_weights_with_nan_or_infinity_stay_float(bad: str) -> None:
    before = parse(f"{X_Y} <{floats('w', 16, 8)}> {{ y = MatMul (x, w) }}")
    numbers = onnx.numpy_helper.to_array(before.graph.initializer[0]).copy()
    numbers[2, 2] = float(bad)
    before.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(numbers, "w"))
    subject, ctx = Model.from_proto(before), Context()
    ALL.run(subject, ctx)
    assert not len(subject.journal)
    what = "NaN among its weights" if bad == "nan" else "infinite weights"
    assert ctx.notes[-1] == f"MatMul 'y' stays float: it has {what}"


def test_quantized_model_is_unchanged() -> None:
    signature = "g (float[N, 16] x) => (float[N, 8] y)"
    constants = f"{floats('w', 16, 8)}, float s = {{0.1}}, uint8 z = {{128}}"
    nodes = "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = MatMul (d, w)"
    notes = stays(signature, constants, nodes)
    assert "quantized already" in notes[0]


def test_old_opset_is_unchanged() -> None:
    notes = stays(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", opset=10)
    assert notes == ["dynamic quantization needs opset 11, and the model has 10"]
    quantized(X_Y, floats("w", 16, 8), "y = MatMul (x, w)", LAYER, opset=11)


# -- subgraphs


def test_layers_in_branches_share_the_weight_around_them() -> None:
    signature = "g (bool c, float[N, 16] x) => (float[N, 8] y)"
    then = "then_branch = t () => (float[N, 8] p) { p = MatMul (x, w) }"
    other = "else_branch = e () => (float[N, 8] q) { n = Neg (x) q = MatMul (n, w) }"
    nodes = f"y = If (c) <{then}, {other}>"
    text = f"{signature} <{floats('w', 16, 8)}> {{ {nodes} }}"
    for chosen in (True, False):
        feeds = {"c": np.array(chosen), "x": np.random.default_rng(0).random((3, 16), np.float32)}
        changed = check(ALL, text, atol=COARSE, inputs=feeds)
    assert list(matrices(changed).values()) == [TensorProto.INT8]
    found = [[n.op_type for n in graph.nodes] for graph in changed.graphs()]
    assert sorted(found[1]) == sorted(LAYER.split())
    assert sorted(found[2]) == sorted(["Neg", *LAYER.split()])
