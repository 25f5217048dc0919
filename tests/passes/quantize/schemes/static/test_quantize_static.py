"""Static int8: which nodes become which kernels of the runtime, and which stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from passes.quantize.schemes.static.quantize_static import DEFAULT_OPS, QuantizeStatic
from tests import ort
from tests.checks import model, parse, random_feeds
from tests.passes.fuse.constants import batch_norm, floats, stored, typed
from tests.passes.quantize.schemes.static.checks import (
    COARSE,
    IMAGE,
    ROWS,
    Calibrated,
    deployed,
    operators,
    outputs,
    quantized,
    stays,
)
from toolkit.calibrate.data import Calib
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Context
from toolkit.pass_manager.registry import parse_passes
from toolkit.settings import Settings

CONV = f"{floats('w', 8, 4, 3, 3)}, {floats('b', 8)}"
TWO = f"{CONV}, {floats('v', 8, 8, 1, 1)}"
SAME = "Conv <pads = [1, 1, 1, 1]>"

# -- products


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize("limit", ["", "Relu (c)", "Clip (c, lo, hi)"])
def test_a_convolution(bias: str, limit: str) -> None:
    bounds = "float lo = {0}, float hi = {6}"
    nodes = f"c = {SAME} (x, w{bias}) y = {limit}" if limit else f"y = {SAME} (x, w{bias})"
    quantized(IMAGE, f"{CONV}, {bounds}", nodes, "QLinearConv")


@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ("N, 4, 9", (8, 4, 3), "strides = [2]"),
        ("N, 4, 8, 8", (8, 4, 3, 3), "strides = [2, 2], dilations = [2, 2], pads = [1, 0, 2, 1]"),
        ("N, 4, 8, 8", (8, 2, 3, 3), "group = 2"),
        ("N, 8, 8, 8", (8, 1, 3, 3), 'group = 8, auto_pad = "SAME_UPPER"'),
        ("N, 2, 5, 5, 5", (4, 2, 2, 2, 2), "pads = [0, 1, 0, 0, 0, 0]"),
    ],
)
def test_convolutions_of_all_kinds(x: str, w: tuple[int, ...], attributes: str) -> None:
    constants = f"{floats('w', *w)}, {floats('b', w[0])}"
    nodes = f"c = Conv <{attributes}> (x, w, b) y = Relu (c)"
    free = f"g (float[{x}] x) => (float[{', '.join(f'D{i}' for i in range(len(w)))}] y)"
    quantized(free, constants, nodes, "QLinearConv")


def test_a_gemm_and_a_matmul_end_in_floats() -> None:
    weights = f"{floats('w', 8, 16)}, {floats('b', 8)}, {floats('m', 16, 8)}"
    quantized(ROWS, weights, "y = Gemm <transB = 1> (x, w, b)", "QGemm")
    quantized(ROWS, weights, "y = Gemm (x, m, b)", "QGemm")
    quantized(ROWS, weights, "y = Gemm (x, m)", "QGemm")
    quantized(ROWS, weights, "y = MatMul (x, m)", "MatMulIntegerToFloat")


@pytest.mark.parametrize("bias", [floats("b", 8), floats("b", 1, 8), floats("b")])
def test_the_factors_of_a_gemm(bias: str) -> None:
    nodes = "y = Gemm <alpha = 0.5, beta = 2.0> (x, m, b)"
    quantized(ROWS, f"{floats('m', 16, 8)}, {bias}", nodes, "QGemm", atol=0.1)
    none = "y = Gemm <beta = 0.0> (x, m, b)"
    quantized(ROWS, f"{floats('m', 16, 8)}, {bias}", none, "QGemm", atol=0.1)


def test_linear_layers_in_a_row_pass_bytes_on() -> None:
    weights = f"{floats('m', 16, 8)}, {floats('n', 8, 8)}, {floats('b', 8)}"
    nodes = "h = Gemm (x, m, b) r = Relu (h) y = Gemm (r, n, b)"
    quantized(ROWS, weights, nodes, "QGemm QGemm")
    deep = "g (float[N, S, 16] x) => (float[N, S, 8] y)"
    nodes = "h = MatMul (x, m) y = MatMul (h, n)"
    quantized(deep, weights, nodes, "QLinearMatMul MatMulIntegerToFloat", atol=0.5)


def test_linear_layer_with_a_float_user_has_a_float_result() -> None:
    signature = ROWS.replace(" y)", " y, float[N, 8] z)")
    weights = f"{floats('m', 16, 8)}, {floats('n', 8, 8)}"
    nodes = "h = MatMul (x, m) y = MatMul (h, n) z = Tanh (h)"
    kernels = "MatMulIntegerToFloat Sum MatMulIntegerToFloat Tanh"
    quantized(signature, weights, nodes, kernels, atol=0.5)


def test_a_product_of_activations_when_asked_for() -> None:
    signature = "g (float[N, 4, 8] x, float[N, 8, 4] z) => (float[N, 4, 4] y)"
    assert "product of two" in stays(signature, "", "y = MatMul (x, z)")[0]
    item = QuantizeStatic(products=True)
    quantized(signature, "", "y = MatMul (x, z)", "MatMulIntegerToFloat", item)


def test_matmul_of_half_precision_activations_stays_float() -> None:
    """Nobody says what is between the inputs and the product."""
    signature = "g (float16[N, 4, 8] x, float16[N, 8, 4] z) => (float16[N, 4, 4] y)"
    nodes = "a = Relu (x) b = Relu (z) y = MatMul (a, b)"
    notes = stays(signature, "", nodes, QuantizeStatic(products=True), run=False)
    assert "not 32-bit floats" in notes[0]


def test_weights_behind_a_transpose_are_no_activations() -> None:
    nodes = "t = Transpose (m) y = MatMul (x, t)"
    notes = stays(ROWS, floats("m", 8, 16), nodes, QuantizeStatic(products=True))
    assert "transposed at run time" in notes[0]


def test_a_transposed_convolution_when_asked_for() -> None:
    """The runtime has no kernel on integers for it; the form is right all the same."""
    signature = "g (float[N, 4, 5, 5] x) => (float[N, 6, 11, 11] y)"
    constants = f"{floats('w', 4, 3, 3, 3)}, {floats('b', 6)}"
    nodes = "y = ConvTranspose <group = 2, strides = [2, 2]> (x, w, b)"
    (note,) = stays(signature, constants, nodes)
    assert note == "left float: ConvTranspose 'y' (onnxruntime has no int8 kernel for it)"
    item = QuantizeStatic(ops=(*DEFAULT_OPS, "ConvTranspose"))
    changed = quantized(signature, constants, nodes, "ConvTranspose", item)
    (scales,) = (
        node.input[1]
        for node in changed.graph.nodes
        if node.op_type == "DequantizeLinear" and node.input[0].startswith("w")
    )
    assert changed.graph.shape(scales) == (3,)


# -- what stands between


def test_a_residual_block() -> None:
    nodes = f"""a = {SAME} (x, w, b) r = Relu (a) c = Conv (r, v) s = Add (c, r) t = Relu (s)
                y = Conv (t, v, b)"""
    quantized(IMAGE, TWO, nodes, "QLinearConv QLinearConv QLinearAdd QLinearConv", atol=0.6)


def test_silu_between_convolutions() -> None:
    nodes = f"a = {SAME} (x, w, b) s = Sigmoid (a) m = Mul (a, s) y = Conv (m, v)"
    kernels = "QLinearConv QLinearSigmoid QLinearMul QLinearConv"
    quantized(IMAGE, TWO, nodes, kernels, atol=0.5)


@pytest.mark.parametrize(
    ("between", "kernel"),
    [
        ("MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (r)", "MaxPool"),
        ("Transpose <perm = [0, 1, 3, 2]> (r)", "Transpose"),
        ("Reshape (r, shape)", "Reshape"),
        ("LeakyRelu <alpha = 0.1> (a)", "QLinearLeakyRelu"),
        ("Slice (r, starts, ends, axes)", "Slice"),
    ],
)
def test_operators_between_convolutions(between: str, kernel: str) -> None:
    more = """int64[4] shape = {0, 8, 4, 16}, int64[1] starts = {1}, int64[1] ends = {8},
              int64[1] axes = {2}"""
    nodes = f"a = {SAME} (x, w, b) r = Relu (a) p = {between} y = Conv (p, v)"
    if "(a)" in between:
        nodes = nodes.replace("r = Relu (a)", "")
    free = IMAGE.replace("8, 8, 8] y", "8, H, W] y")
    quantized(free, f"{TWO}, {more}", nodes, f"QLinearConv {kernel} QLinearConv", atol=0.5)


def test_resize_and_split() -> None:
    nodes = f"""a = {SAME} (x, w, b) p, q = Split <axis = 1, num_outputs = 2> (a)
                u = Resize <mode = "nearest"> (p, , scales) d = Conv (q, k)
                c = Conv (u, k)"""
    constants = f"{CONV}, {floats('k', 2, 4, 1, 1)}, float[4] scales = {{1, 1, 2, 2}}"
    signature = "g (float[N, 4, 8, 8] x) => (float[N, 2, 16, 16] c, float[N, 2, 8, 8] d)"
    quantized(signature, constants, nodes, "QLinearConv Split Resize QLinearConv QLinearConv")


def test_the_head_of_a_classifier() -> None:
    nodes = f"""a = {SAME} (x, w, b) r = Relu (a) p = GlobalAveragePool (r) f = Flatten (p)
                y = Gemm (f, m)"""
    signature = "g (float[N, 4, 8, 8] x) => (float[N, 8] y)"
    kernels = "QLinearConv QLinearGlobalAveragePool Flatten QGemm"
    quantized(signature, f"{CONV}, {floats('m', 8, 8)}", nodes, kernels)


def test_squeeze_and_excite() -> None:
    nodes = f"""a = {SAME} (x, w, b) r = Relu (a) p = GlobalAveragePool (r) c = Conv (p, v)
                s = Sigmoid (c) m = Mul (r, s) y = Conv (m, v)"""
    kernels = """QLinearConv QLinearGlobalAveragePool QLinearConv QLinearSigmoid QLinearMul
                 QLinearConv"""
    quantized(IMAGE, TWO, nodes, kernels, atol=0.5)


def test_a_constant_operand() -> None:
    nodes = f"a = {SAME} (x, w) s = Add (a, k) r = Relu (s) y = Conv (r, v)"
    constants = f"{TWO}, {floats('k', 8, 1, 1)}"
    quantized(IMAGE, constants, nodes, "QLinearConv QLinearAdd QLinearConv", atol=0.5)


def test_operator_without_int8_neighbours_stays_float() -> None:
    nodes = f"a = {SAME} (x, w, b) s = Sigmoid (a) y = Mul (a, s)"
    changed = quantized(IMAGE, TWO, nodes, "QLinearConv QuickGelu")
    assert operators(changed)["Sigmoid"] == 0
    nodes = "t = Tanh (x) d = Add (t, x) a = Conv <pads = [1, 1, 1, 1]> (d, w) y = Relu (a)"
    quantized(IMAGE, TWO, nodes, "Tanh Add QLinearConv")


def test_combining_operator_after_a_linear_layer_stays_float() -> None:
    weights = f"{floats('m', 16, 8)}, {floats('n', 8, 8)}"
    nodes = "h = MatMul (x, m) s = Sigmoid (h) p = Mul (h, s) y = MatMul (p, n)"
    kernels = "MatMulIntegerToFloat QuickGelu MatMulIntegerToFloat"
    quantized(ROWS, weights, nodes, kernels, atol=0.5)


def test_an_output_inside() -> None:
    signature = IMAGE.replace(" y)", " y, float[N, 8, 8, 8] r)")
    nodes = f"a = {SAME} (x, w, b) r = Relu (a) y = Conv (r, v)"
    changed = quantized(signature, TWO, nodes, "QLinearConv QLinearConv", atol=0.5)
    assert operators(changed)["QuantizeLinear"] == 3


def test_one_pair_a_tensor_and_one_weight_for_all() -> None:
    signature = IMAGE.replace(" y)", " y, float[N, 8, 8, 8] z)")
    nodes = f"y = {SAME} (x, w, b) z = {SAME} (x, w)"
    changed = quantized(signature, CONV, nodes, "QLinearConv QLinearConv")
    counted = operators(changed)
    assert counted["QuantizeLinear"] == 3
    assert counted["DequantizeLinear"] == 3 + 1 + 1  # weights, bias
    bytes_of = [t for t in changed.graph.initializers.values() if len(t.dims) == 4]
    assert len(bytes_of) == 1


# -- what stays


def test_unsupported_layers_stay_float() -> None:
    half = "g (float16[N, 16] x) => (float16[N, 8] y)"
    notes = stays(half, stored("m", np.ones((16, 8)), "float16"), "y = MatMul (x, m)")
    assert "weights of float16" in notes[0]
    computed = "g (float[N, 4, 8, 8] x, float[8, 4, 1, 1] w) => (float[N, 8, 8, 8] y)"
    assert "weights that are computed" in stays(computed, "", "y = Conv (x, w)")[0]
    bias = "g (float[N, 16] x, float[8] b) => (float[N, 8] y)"
    assert "bias that is computed" in stays(bias, floats("m", 16, 8), "y = Gemm (x, m, b)")[0]
    rows = "g (float[3, 16] x) => (float[3, 8] y)"
    constants = f"{floats('m', 16, 8)}, {floats('b', 3, 8)}"
    assert "not one number" in stays(rows, constants, "y = Gemm (x, m, b)")[0]
    turned = "g (float[16, N] x) => (float[N, 8] y)"
    notes = stays(turned, floats("m", 16, 8), "y = Gemm <transA = 1> (x, m)")
    assert "transposed input" in notes[0]
    infinite = np.ones((16, 8))
    infinite[3, 3] = np.inf
    notes = stays(ROWS, stored("m", infinite), "y = MatMul (x, m)")
    assert notes[-1] == "MatMul 'y' stays float: it has infinite weights"


def test_options_that_leave_layers() -> None:
    small = QuantizeStatic(min_elements=129)
    assert "fewer than 129" in stays(ROWS, floats("m", 16, 8), "y = MatMul (x, m)", small)[0]
    without = QuantizeStatic(exclude=("MatMul", "Cov"))
    notes = stays(ROWS, floats("m", 16, 8), "y = MatMul (x, m)", without)
    assert notes == ["no node matches 'Cov'", "left float: MatMul 'y' (excluded)"]
    other = QuantizeStatic(ops=("Conv",))
    assert stays(ROWS, floats("m", 16, 8), "y = MatMul (x, m)", other) == []


def test_a_model_that_is_quantized_already() -> None:
    constants = f"{floats('m', 16, 8)}, float s = {{0.1}}, uint8 z = {{7}}"
    nodes = "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = MatMul (d, m)"
    assert "quantized already" in stays(ROWS, constants, nodes)[0]


def test_a_tensor_without_a_range() -> None:
    """Log of zero: the layers around it stay float, and the note says why."""
    nodes = "l = Log (x) y = MatMul (l, m)"
    feeds = [{"x": np.zeros((2, 16), np.float32)}]
    notes = stays(ROWS, floats("m", 16, 8), nodes, feeds=feeds, inputs=feeds[0], run=False)
    assert "'l': holds infinity" in notes[0]


def test_it_needs_data() -> None:
    text = "g (float[N, 4] x) => (float[N, 4] y) { y = Relu (x) }"
    with pytest.raises(UsageError, match=r"needs calibration data: --calib SOURCE$"):
        QuantizeStatic().run(model(text), Context())


# -- opsets and options


@pytest.mark.parametrize("opset", [9, 11, 12])
def test_an_older_opset_is_lifted(opset: int) -> None:
    nodes = f"c = {SAME} (x, w, b) y = Relu (c)"
    changed = quantized(IMAGE, CONV, nodes, "QLinearConv", opset=opset)
    assert changed.opsets[""] == 13
    notes = stays(IMAGE, CONV, nodes, _Kept(), opset=opset)
    assert "needs opset 13, but the model must stay" in notes[0]


def test_operators_that_the_opset_lift_splits_are_planned_afterwards() -> None:
    """Before opset 13 Softmax works on a matrix: lifted, its result is made by a Reshape."""
    item = QuantizeStatic(ops=("Conv", "Softmax", "Reshape"))
    nodes = f"c = {SAME} (x, w, b) s = Softmax (c) y = Conv (s, v)"
    text = typed(IMAGE, TWO, nodes, 11)
    subject = model(text)
    Calibrated(item).run(subject, Context())
    assert deployed(subject).count("QLinearConv") == 2
    fed = random_feeds(subject)
    assert np.abs(ort.run(parse(text), fed)[0] - outputs(subject, fed)[0]).max() < COARSE


def test_a_model_without_layers_is_not_lifted() -> None:
    stays(IMAGE, "", "y = Concat <axis = 1> (x, x)", opset=11)


class _Kept:
    """The pass where the user wants the opset kept."""

    def run(self, subject: Model, ctx: Context) -> None:
        ctx.settings = Settings(opset="keep")
        QuantizeStatic().run(subject, ctx)


@pytest.mark.parametrize(
    "options",
    [
        {"activations": "int8"},
        {"activations": "int8", "symmetric": True},
        {"symmetric": True},
        {"per_channel": False},
        {"weights": "uint8"},
        {"reduce_range": True},
        *({"observer": name} for name in ("average", "percentile", "entropy", "mse")),
    ],
)
@pytest.mark.parametrize("form", ["qdq", "qop"])
def test_options(options: dict[str, Any], form: Any) -> None:
    item = QuantizeStatic(format=form, **options)
    nodes = f"c = {SAME} (x, w, b) r = Relu (c) y = Conv (r, v)"
    text = typed(IMAGE, TWO, nodes, 21)
    subject = Model.from_proto(parse(text))
    Calibrated(item).run(subject, Context())
    found = [n for n in deployed(subject) if n != "Relu"]
    assert found == ["QLinearConv", "QLinearConv"]
    fed = random_feeds(subject)
    (before,), (after,) = ort.run(parse(text), fed), ort.run(subject.inlined_proto(), fed)
    assert np.sqrt(np.mean((before - after) ** 2)) < (1 if item.observer == "entropy" else COARSE)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"percent": 0}, "percent is 0; it must be above 0"),
        ({"activations": "int8", "weights": "uint8"}, "no kernel supports activations=int8 with"),
        (
            {"ops": ("Conv", "Maxpool")},
            "'Maxpool' is not an operator to quantize: did you mean 'M",
        ),
        ({"ops": ("LSTM",)}, "'LSTM' is not an operator to quantize: choose from Conv, "),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        QuantizeStatic(**options)
    assert said in str(raised.value)


# -- composed


def test_behind_fusion() -> None:
    constants = f"{CONV}, {batch_norm(8)}, {floats('v', 8, 8, 1, 1)}, {floats('k', 8, 1, 1)}"
    nodes = f"""c = {SAME} (x, w) n = BatchNormalization (c, gamma, beta, mean, variance)
                r = Relu (n) d = Conv (r, v) e = Add (d, k) y = Relu (e)"""
    proto = parse(typed(IMAGE, constants, nodes, 17))
    subject = Model.from_proto(proto)
    feeds = [random_feeds(subject, seed) for seed in range(4)]
    passes = [*parse_passes("fuse"), QuantizeStatic()]
    result = Pipeline(passes, validate="off", calib=Calib(feeds)).run(subject)
    assert [r.rules for r in result.passes if r.name == "quantize-static"] == [
        {"quantize-static": 2}
    ]
    assert deployed(subject) == ["QLinearConv", "QLinearConv"]
    (before,), (after,) = ort.run(proto, feeds[0]), ort.run(subject.inlined_proto(), feeds[0])
    assert np.abs(before - after).max() < COARSE


def test_a_pipeline_proves_it() -> None:
    subject = model(typed(IMAGE, TWO, f"c = {SAME} (x, w, b) y = Relu (c)", 21))
    feeds = [random_feeds(subject, seed) for seed in range(8)]
    result = Pipeline(parse_passes("quantize-static:observer=minmax"), calib=Calib(feeds)).run(
        subject
    )
    assert result.passes[0].status == "applied"
