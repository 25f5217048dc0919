"""Models as others leave them: quantized already, in 16 bits, with layers in subgraphs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    quantize_dynamic,
    quantize_static,
)

import toolkit
from tests.checks import parse
from toolkit.calibrate.data import Calib
from toolkit.ir.model import Model
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.registry import parse_passes
from toolkit.pass_manager.result import PassResult

PASSES = ("quantize", "quantize-dynamic", "quantize-weights", "quantize-static")
RNG = np.random.default_rng(0)
NET = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N,3,8,8] x) => (float[N,10] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, k) b = Relu (a) p = GlobalAveragePool (b)
    h = Flatten (p) i = MatMul (h, w) j = Relu (i) y = Gemm (j, v, c) }"""
SHAPES = {"k": (64, 3, 3, 3), "w": (64, 128), "v": (128, 10), "c": (10,)}
BODIES = """g (float[N,64] x, int64 n) => (float[N,64] y, float[N,64] z)
<bool t = {1}> {
    s = Scan <num_scan_inputs = 1, body = b (float[64] r) => (float[64] o)
        { m = MatMul (r, w1) o = Relu (m) }> (x)
    y = Loop <body = l (int64 i, bool c, float[N,64] v) => (bool d, float[N,64] u)
        { d = Identity (c) k = MatMul (v, w2) u = Tanh (k) }> (n, t, s)
    z = com.microsoft.FusedMatMul <alpha = 0.5> (x, w3) }"""


def weights(*shape: int) -> Any:
    return (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


def with_constants(text: str, **constants: Any) -> Model:
    proto = parse(text)
    for name, value in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    return Model.from_proto(proto)


def run(subject: Model, passes: str, feeds: list[dict[str, Any]]) -> PassResult:
    pipeline = Pipeline(parse_passes(passes), calib=Calib(feeds), measure=False)
    (done,) = pipeline.run(subject).passes
    return done


# Quantized already -------------------------------------------------------------------------------


class Reader(CalibrationDataReader):
    def __init__(self) -> None:
        self.left = iter(np.random.default_rng(1).standard_normal((4, 1, 3, 8, 8)))

    def get_next(self) -> Any:
        found = next(self.left, None)
        return None if found is None else {"x": found.astype(np.float32)}


def by_blocks(source: Path, target: Path) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    made: Any = MatMulNBitsQuantizer(onnx.load(source), bits=4, block_size=32, is_symmetric=True)
    made.process()
    onnx.save(made.model.model, target)


def static(source: Path, target: Path, **options: Any) -> None:
    quantize_static(source, target, Reader(), **options)


QDQ, QOP = {"quant_format": QuantFormat.QDQ}, {"quant_format": QuantFormat.QOperator}
CONVOLUTIONS: dict[str, Any] = {"op_types_to_quantize": ["Conv"]}
QUANTIZERS = {
    "dynamic": quantize_dynamic,
    "dynamic convolutions": lambda s, t: quantize_dynamic(s, t, **CONVOLUTIONS),
    "qdq": lambda s, t: static(s, t, **QDQ),
    "operators": lambda s, t: static(s, t, **QOP),
    "qdq, convolutions alone": lambda s, t: static(s, t, **QDQ, **CONVOLUTIONS),
    "operators, convolutions alone": lambda s, t: static(s, t, **QOP, **CONVOLUTIONS),
    "blocks of 4 bits": by_blocks,
}


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_model_that_the_runtime_has_quantized_stays(quantizer: str, tmp_path: Path) -> None:
    logging.getLogger().setLevel(logging.ERROR)
    net = with_constants(NET, **{name: weights(*shape) for name, shape in SHAPES.items()})
    net.save(tmp_path / "float.onnx")
    QUANTIZERS[quantizer](tmp_path / "float.onnx", tmp_path / "int8.onnx")
    feeds = [{"x": weights(1, 3, 8, 8)} for _ in range(2)]
    for passes in PASSES:
        done = run(toolkit.load(tmp_path / "int8.onnx"), passes, feeds)
        assert done.status == "unchanged"
        assert "the model is quantized already" in " ".join(done.notes)


# 16 bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [*PASSES, "quantize:mode=static"])
def test_a_model_in_16_bits_stays_and_says_why(passes: str) -> None:
    text = "g (float16[N,64] x) => (float16[N,64] y) { a = MatMul (x, w) y = Relu (a) }"
    subject = with_constants(text, w=weights(64, 64).astype(np.float16))
    done = run(subject, passes, [{"x": weights(2, 64).astype(np.float16)}])
    assert done.status == "unchanged"
    said = "weights of float16, and only 32-bit floats are quantized; run the pass fp32 first"
    assert said in " ".join(done.notes)


# Subgraphs ---------------------------------------------------------------------------------------


def bodies() -> tuple[Model, list[dict[str, Any]]]:
    subject = with_constants(BODIES, **{name: weights(64, 64) for name in ("w1", "w2", "w3")})
    return subject, [{"x": weights(4, 64) * 8, "n": np.array(count)} for count in (1, 2, 3)]


@pytest.mark.parametrize(
    ("passes", "made"),
    [
        ("quantize", "MatMulInteger"),
        ("quantize-dynamic", "MatMulInteger"),
        ("quantize-weights:weights=int8", "MatMulNBits"),
    ],
)
def test_layers_in_bodies_of_loops_are_quantized(passes: str, made: str) -> None:
    subject, feeds = bodies()
    assert run(subject, passes, feeds).status == "applied"
    for body in list(subject.graphs())[1:]:
        assert any(node.op_type == made for node in body.nodes)


@pytest.mark.parametrize("passes", ["quantize-static", "quantize:mode=static"])
def test_static_plans_have_layers_of_bodies_and_fused_ones(passes: str) -> None:
    subject, feeds = bodies()
    done = run(subject, passes, feeds)
    assert done.status == "applied"
    assert not [note for note in done.notes if note.startswith("left float")]
    for graph in subject.graphs():
        (layer,) = (node for node in graph.nodes if node.op_type == "MatMul")
        for name in layer.input:
            maker = graph.producer(name)
            assert maker is not None
            assert maker.op_type == "DequantizeLinear"


def test_static_plans_leave_what_they_cannot_have_and_say_so() -> None:
    text = """g (float[N,64] x, float[M,64] r) => (float[N,M] y)
        { y = com.microsoft.FusedMatMul <transB = 1> (x, r) }"""
    feeds = [{"x": weights(3, 64), "r": weights(2, 64)}]
    done = run(with_constants(text), "quantize-static", feeds)
    assert done.status == "unchanged"
    assert "FusedMatMul 'y' (two activations, scaled or transposed" in " ".join(done.notes)
