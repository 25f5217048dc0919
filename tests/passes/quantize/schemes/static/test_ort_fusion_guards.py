"""What stays float between layers in 8 bits stays so in the runtime."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime import InferenceSession
from onnxruntime.capi.onnxruntime_pybind11_state import SessionOptions

from passes.quantize.schemes.static.quantize_static import QuantizeStatic
from tests import ort
from tests.checks import model, parse, random_feeds
from tests.passes.fuse.constants import floats, typed
from tests.passes.quantize.schemes.static.checks import (
    IMAGE,
    Calibrated,
    deployed,
    operators,
    outputs,
    quantized,
)
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.settings import Settings

CONSTANTS = f"{floats('w', 8, 4, 3, 3)}, {floats('v', 8, 8, 1, 1)}, {floats('b', 8)}"
FIRST = "a = Conv <pads = [1, 1, 1, 1]> (x, w, b)"


@pytest.mark.parametrize("limit", ["", "r = Relu (c)"])
def test_a_float_convolution_between_two(limit: str) -> None:
    """Without a fence the runtime quantizes its weights, with one scale for all of them."""
    nodes = f"{FIRST} [keep] c = Conv (a, v, b) {limit} y = Conv ({limit[:1] or 'c'}, v)"
    item = QuantizeStatic(exclude=("keep",))
    subject = model(typed(IMAGE, CONSTANTS, nodes, 21))
    Calibrated(item).run(subject, Context())
    found = deployed(subject)
    assert "Conv" in found or "FusedConv" in found
    assert found.count("QLinearConv") == 2
    assert operators(subject)["Sum"] == 1
    bare = model(typed(IMAGE, CONSTANTS, nodes, 21))
    Calibrated(item).run(bare, Context(Settings(target="onnx")))
    assert operators(bare)["Sum"] == 0
    assert deployed(bare).count("QLinearConv") == 3, "no fence is needed any more"


@pytest.mark.parametrize("move", ["", "Relu (c)", "Transpose <perm = [0, 1, 3, 2]> (c)"])
@pytest.mark.parametrize("op", ["Conv (a, v, b)", "Softmax <axis = 1> (a)"])
def test_an_output_does_not_keep_the_runtime_from_it(op: str, move: str) -> None:
    """It would be given what the Q behind it leaves, or be computed with other weights."""
    signature = IMAGE.replace(" y)", " y, float[N, 8, 8, 8] c)")
    last = f"m = {move} y = Conv (m, v)" if move else "y = Conv (c, v)"
    text = typed(signature, CONSTANTS, f"{FIRST} [keep] c = {op} {last}", 21)
    subject = model(text)
    Calibrated(QuantizeStatic(exclude=("keep",))).run(subject, Context())
    fed = random_feeds(subject)
    proto = subject.inlined_proto()
    as_deployed: Any = InferenceSession(proto.SerializeToString()).run(["c"], fed)[0]
    np.testing.assert_allclose(as_deployed, ort.run(proto, fed, ["c"])[0], atol=1e-5)


def test_only_patterns_that_the_runtime_fuses_are_guarded() -> None:
    """A float layer with a reader of floats, or with a float input, is left alone."""
    item = QuantizeStatic(exclude=("keep",))
    nodes = f"{FIRST} [keep] c = Conv (a, v, b) t = Tanh (c) u = Add (c, t) y = Conv (u, v)"
    subject = model(typed(IMAGE, CONSTANTS, nodes, 21))
    Calibrated(item).run(subject, Context())
    assert operators(subject)["Sum"] == 0
    nodes = "[keep] c = Conv <pads = [1, 1, 1, 1]> (x, w, b) y = Conv (c, v)"
    subject = model(typed(IMAGE, CONSTANTS, nodes, 21))
    Calibrated(item).run(subject, Context())
    assert operators(subject)["Sum"] == 0
    assert deployed(subject).count("QLinearConv") == 1


@pytest.mark.parametrize("between", ["", "Transpose <perm = [0, 1, 3, 2]> (c)"])
def test_a_pool_behind_float_layers_stays_float(between: str) -> None:
    """Without a fence the runtime pools bytes, channels first."""
    last = f"m = {between} y = Conv (m, v)" if between else "y = Conv (c, v)"
    nodes = f"[keep] {FIRST} c = MaxPool <kernel_shape = [2, 2]> (a) {last}"
    text = typed(IMAGE.replace("8, 8, 8] y", "8, H, W] y"), CONSTANTS, nodes, 21)
    item = QuantizeStatic(exclude=("keep", "MaxPool"))
    subject = model(text)
    Calibrated(item).run(subject, Context())
    assert operators(subject)["Sum"] == 1
    assert pooled_bytes(subject) == 0
    bare = model(text)
    Calibrated(item).run(bare, Context(Settings(target="onnx")))
    assert pooled_bytes(bare) == 1, "no fence is needed any more"


def test_a_pool_between_int8_layers_pools_bytes() -> None:
    nodes = f"{FIRST} c = MaxPool <kernel_shape = [2, 2]> (a) y = Conv (c, v)"
    subject = model(typed(IMAGE.replace("8, 8, 8] y", "8, H, W] y"), CONSTANTS, nodes, 21))
    Calibrated(QuantizeStatic()).run(subject, Context())
    assert operators(subject)["Sum"] == 0


def pooled_bytes(subject: Model) -> int:
    """How many pools of the runtime read 8 bits: what a Q has made."""
    with tempfile.TemporaryDirectory() as folder:
        options = SessionOptions()
        options.optimized_model_filepath = os.path.join(folder, "model.onnx")
        InferenceSession(subject.inlined_proto().SerializeToString(), options)
        graph = onnx.load(options.optimized_model_filepath).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    pools = [node for node in graph.node if node.op_type == "MaxPool"]
    return sum(made.get(pool.input[0]) == "QuantizeLinear" for pool in pools)


def test_a_float_gemm_between_two() -> None:
    signature = "g (float[N, 16] x) => (float[N, 8] y)"
    constants = f"{floats('m', 16, 8)}, {floats('n', 8, 8)}"
    nodes = "h = Gemm (x, m) [keep] r = Gemm (h, n) y = Gemm (r, n)"
    subject = model(typed(signature, constants, nodes, 21))
    Calibrated(QuantizeStatic(exclude=("keep",))).run(subject, Context())
    assert sorted(deployed(subject)) == ["Gemm", "QGemm", "QGemm"]


def test_an_average_pool_stays_float() -> None:
    nodes = f"{FIRST} p = AveragePool <kernel_shape = [2, 2]> (a) y = Conv (p, v)"
    free = IMAGE.replace("8, 8, 8] y", "8, H, W] y")
    quantized(free, CONSTANTS, nodes, "QLinearConv AveragePool Sum QLinearConv", atol=0.5)


def test_a_silu_that_stays_float_is_one_operator() -> None:
    nodes = f"{FIRST} s = Sigmoid (a) y = Mul (a, s)"
    text = typed(IMAGE, CONSTANTS, nodes, 21)
    subject = model(text)
    Calibrated().run(subject, Context())
    assert operators(subject)["QuickGelu"] == 1
    fed = random_feeds(subject)
    (before,), (after,) = ort.run(parse(text), fed), ort.run(subject.inlined_proto(), fed)
    assert np.abs(before - after).max() < 0.2
    read_twice = typed(IMAGE.replace(" y)", " y, float[N, 8, 8, 8] s)"), CONSTANTS, nodes, 21)
    subject = model(read_twice)
    Calibrated().run(subject, Context())
    assert operators(subject)["QuickGelu"] == operators(subject)["Sigmoid"] == 1


def test_a_bias_behind_a_matmul() -> None:
    """The runtime would make a Gemm of floats of matrices; in front of a Q, one of bytes."""
    rows = "g (float[N, 16] x) => (float[N, 8] y)"
    deep = "g (float[N, S, 16] x) => (float[N, S, 8] y)"
    constants = f"{floats('m', 16, 8)}, {floats('n', 8, 8)}, {floats('b', 8)}"
    one = "h = MatMul (x, m) y = Add (h, b)"
    quantized(rows, constants, one, "MatMulIntegerToFloat Sum")
    quantized(deep, constants, one, "MatMulIntegerToFloat Add")
    known = "g (float[2, 5, 16] x) => (float[2, 5, 8] y)"
    quantized(known, constants, one, "MatMulIntegerToFloat Sum")
    two = "h = MatMul (x, m) a = Add (h, b) r = Relu (a) y = MatMul (r, n)"
    quantized(rows, constants, two, "QGemm MatMulIntegerToFloat", atol=0.5)


def test_bias_added_to_a_matmul() -> None:
    """A residual becomes a part of that Gemm as a bias does; a product of three axes has none."""
    rows = "g (float[N, 8] x) => (float[N, 8] y)"
    deep = "g (float[N, S, 8] x) => (float[N, S, 8] y)"
    nodes = "h = MatMul (x, n) r = Add (x, h) y = Tanh (r)"
    quantized(rows, floats("n", 8, 8), nodes, "MatMulIntegerToFloat Sum Tanh")
    quantized(deep, floats("n", 8, 8), nodes, "MatMulIntegerToFloat Add Tanh")


SIGNED = QuantizeStatic(activations="int8")
MOVES = (
    *("MaxPool <kernel_shape = [2, 2]> (a)", "Reshape (a, flat)", "Transpose (a)"),
    *("Squeeze (a)", "Unsqueeze (a, one)", "Slice (a, one, two)"),
)


def signed(move: str, opset: int = 21, item: QuantizeStatic = SIGNED) -> int:
    """The number of Qs in a model whose last Conv is moved, which must run as deployed."""
    indices = "int64[2] flat = {2, -1}, int64[1] one = {1}, int64[1] two = {2}"
    signature = "g (float[2, 4, 8, 8] x) => (float y)"
    text = typed(signature, f"{CONSTANTS}, {indices}", f"{FIRST} m = {move} y = Tanh (m)", opset)
    proto = parse(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    subject = Model.from_proto(proto)
    Calibrated(item).run(subject, Context())
    subject.graph.verify()
    assert "QLinearConv" in deployed(subject)
    fed = random_feeds(subject)
    assert np.abs(ort.run(proto, fed)[0] - outputs(subject, fed)[0]).max() < 0.2
    return operators(subject)["QuantizeLinear"]


@pytest.mark.parametrize("move", MOVES)
def test_data_movement_of_int8_has_its_own_pair(move: str) -> None:
    """Without it the runtime does not load the model."""
    assert signed(move) == 3


def test_unsigned_older_opset_and_unmoved_operators_need_no_pair() -> None:
    assert signed("Transpose (a)", opset=20) == 2
    assert signed("Transpose (a)", item=QuantizeStatic()) == 2
    assert signed("Flatten (a)") == 2


def test_a_bias_behind_a_signed_product() -> None:
    """With any target: what the runtime would make of it, it does not load."""
    signature = "g (float[2, 5, 16] x) => (float[2, 5, 8] y)"
    constants = f"{floats('m', 16, 8)}, {floats('b', 8)}"
    for opset, op in ((21, "Sum"), (20, "Add")):
        subject = model(typed(signature, constants, "h = MatMul (x, m) y = Add (h, b)", opset))
        Calibrated(SIGNED).run(subject, Context(Settings(target="onnx")))
        assert operators(subject)[op] == 1
        InferenceSession(subject.inlined_proto().SerializeToString())
    unsigned = model(typed(signature, constants, "h = MatMul (x, m) y = Add (h, b)", 21))
    Calibrated().run(unsigned, Context(Settings(target="onnx")))
    assert operators(unsigned)["Add"] == 1
