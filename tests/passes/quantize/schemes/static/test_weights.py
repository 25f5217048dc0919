"""Weights and biases of static layers as integers: exact, within 32 bits, and not larger."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from passes.quantize.layers.int8_weights import Unfit, quantize, quantize_affine, unsigned
from passes.quantize.schemes.static.quantizable_ops import Int8Site, site_of
from passes.quantize.schemes.static.weights import QLayer, encode
from tests.checks import model, parse
from tests.passes.fuse.constants import floats, stored, typed
from tests.passes.quantize.schemes.static.checks import Calibrated, normal, quantized
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.plan import Entry
from toolkit.quantization.qparams import QTensor

STATIC = Entry(output="y", op="Conv", scheme="static", axis=0)
_MOST = 2**31 - 1


def site(constants: str, node: str, signature: str = "") -> Int8Site:
    signature = signature or "g (float[N, 2, 8, 8] x) => (float[N, 3, 8, 8] y)"
    graph = model(f"{signature} <{constants}> {{ {node} }}").graph
    found = site_of(graph, graph.nodes[-1])
    assert found is not None
    assert found.weight is not None
    return found


def coded(weights: Any, bias: Any, x_scale: float = 0.1, entry: Entry = STATIC) -> QLayer:
    found = site(f"{stored('w', weights)}, {stored('b', bias)}", "y = Conv (x, w, b)")
    assert found.weight is not None
    return encode(found.weight, entry, x_scale)


def bias_of(layer: QLayer) -> QTensor:
    assert layer.bias is not None
    return layer.bias


def test_the_formulas() -> None:
    weights, bias = normal(3, 2, 1, 1), normal(3, seed=1)
    found = coded(weights, bias)
    scale = np.abs(weights).max(axis=(1, 2, 3)) / np.float32(127)
    np.testing.assert_allclose(found.weight.params.scale, scale, rtol=1e-6)
    assert np.abs(found.weight.codes).max(axis=(1, 2, 3)).tolist() == [127] * 3
    np.testing.assert_array_equal(
        bias_of(found).params.scale, np.float32(0.1) * found.weight.params.scale
    )
    steps = np.rint(bias.astype(np.float64) / bias_of(found).params.scale)
    assert bias_of(found).codes.dtype == np.int32
    np.testing.assert_allclose(bias_of(found).codes, steps, atol=1)
    per_tensor = coded(weights, bias, entry=Entry(output="y", op="Conv", scheme="static"))
    assert per_tensor.weight.params.scale == pytest.approx(np.abs(weights).max() / 127)


def test_a_channel_whose_bias_does_not_fit_is_widened() -> None:
    weights = np.ones((3, 2, 1, 1), np.float32)
    weights[1] = 1e-9
    found = coded(weights, [0.5, 100.0, 0.5])
    assert np.abs(bias_of(found).codes.astype(np.int64)).max() < _MOST - 2 * 255 * 127
    np.testing.assert_allclose(bias_of(found)[:], [0.5, 100.0, 0.5], rtol=1e-3)
    assert (
        found.weight.params.scale[0]
        == found.weight.params.scale[2]
        == np.float32(1) / np.float32(127)
    )
    assert found.weight.params.scale[1] > 1e-9 / 127


@pytest.mark.parametrize("bias", [3.7, -1e-6, 1e6])
def test_a_channel_without_weights_resolves_its_bias(bias: float) -> None:
    weights = normal(3, 2, 1, 1)
    weights[1] = 0
    found = coded(weights, [0.5, bias, 0.5])
    assert bias_of(found).codes[1] * float(bias_of(found).params.scale[1]) == pytest.approx(
        bias, rel=1e-6
    )
    nothing = coded(weights, [0.5, 0.0, 0.5])
    assert nothing.weight.params.scale[1] == 1
    assert bias_of(nothing).codes[1] == 0


def test_weights_of_nothing_but_zeros_still_run() -> None:
    constants = f"{stored('w', np.zeros((3, 2, 1, 1)))}, {stored('b', [1.0, -2.0, 0.25])}"
    signature = "g (float[N, 2, 8, 8] x) => (float[N, 3, 8, 8] y)"
    quantized(signature, constants, "y = Conv (x, w, b)", "QLinearConv", atol=0.02)


def test_bytes_without_a_sign() -> None:
    weights = normal(3, 2, 1, 1)
    entry = Entry(output="y", op="Conv", scheme="static", axis=0, weight="uint8")
    signed, found = coded(weights, np.ones(3)), coded(weights, np.ones(3), entry=entry)
    assert found.weight.params.zero_point.tolist() == [128] * 3
    np.testing.assert_array_equal(found.weight.codes.astype(int) - 128, signed.weight.codes)
    lopsided = Entry(output="y", op="Conv", scheme="static", weight="uint8", symmetric=False)
    found = coded(np.abs(weights), np.ones(3), entry=lopsided)
    assert found.weight.params.zero_point == 0
    assert found.weight.codes.max() == 255


def test_affine_codes_cover_the_range() -> None:
    weights = normal(20, 7) + 1
    found = quantize_affine(weights)
    back = (found.codes.astype(np.float64) - found.params.zero_point) * float(found.params.scale)
    assert np.abs(back - weights).max() <= float(found.params.scale) * 0.75
    assert unsigned(quantize(weights, 0)).codes.min() >= 1
    with pytest.raises(Unfit, match="NaN"):
        quantize_affine(np.array([[np.nan]], np.float32))
    empty = quantize_affine(np.zeros((0, 4), np.float32))
    assert (empty.codes.shape, float(empty.params.scale), empty.params.zero_point) == (
        (0, 4),
        1.0,
        0,
    )


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"axis": 1}, "its outputs are along axis 0"),
        ({"weight": "int4"}, "they are int8 or uint8"),
        ({"symmetric": False}, "asymmetric weights are uint8"),
        ({"symmetric": False, "weight": "uint8", "axis": 0}, "with one scale"),
    ],
)
def test_weights_that_no_kernel_takes(entry: dict[str, Any], said: str) -> None:
    asked = Entry(output="y", op="Conv", scheme="static", **entry)
    with pytest.raises(UsageError, match=said):
        coded(normal(3, 2, 1, 1), np.ones(3), entry=asked)


# -- weights that are integers already

_ROWS = "g (float[N, 4, 6, 6] x) => (float[N, 8, 6, 6] y)"


def dequantized(kind: str, scale: str, zero: str, attributes: str = "") -> tuple[str, str]:
    numbers = np.random.default_rng(0).integers(*((-128, 128) if kind == "int8" else (0, 256)),
                                                (8, 4, 1, 1))  # fmt: skip
    constants = f"{stored('w', numbers, kind)}, {scale}, {kind} {zero}, {floats('b', 8)}"
    return constants, f"d = DequantizeLinear {attributes} (w, s, z) y = Conv (x, d, b)"


@pytest.mark.parametrize("scale", ["float s = {0.01}", floats("s", 8, low=0.01, high=0.02)])
def test_signed_bytes_stay_as_they_are(scale: str) -> None:
    by_channel = "[8]" in scale
    zero = "[8] z = {0, 0, 0, 0, 0, 0, 0, 0}" if by_channel else "z = {0}"
    constants, nodes = dequantized("int8", scale, zero, "<axis = 0>" if by_channel else "")
    changed = quantized(_ROWS, constants, nodes, "QLinearConv", atol=0.3)
    assert changed.graph.initializers["w"].data_type == TensorProto.INT8
    assert sum(t.dims == [8, 4, 1, 1] for t in changed.graph.initializers.values()) == 1


def test_other_bytes_are_quantized_again_and_not_kept_twice() -> None:
    constants, nodes = dequantized("uint8", "float s = {0.01}", "z = {100}")
    changed = quantized(_ROWS, constants, nodes, "QLinearConv", atol=0.3)
    assert "w" not in changed.graph.initializers
    kinds = [t.data_type for t in changed.graph.initializers.values() if len(t.dims) == 4]
    assert kinds == [TensorProto.INT8]


def test_a_model_of_bytes_does_not_grow() -> None:
    constants, nodes = dequantized("int8", "float s = {0.01}", "z = {0}")
    before = parse(typed(_ROWS, constants, nodes, 21))
    subject = Model.from_proto(before)
    Calibrated().run(subject, Context())
    tensors = sum(t.ByteSize() for t in before.graph.initializer)
    assert subject.nbytes() <= tensors + 64


# -- more shapes


def test_a_transposed_convolution_shares_scales_between_groups() -> None:
    constants = f"{stored('w', normal(4, 3, 2, 2))}, {stored('b', normal(6, seed=2))}"
    signature = "g (float[N, 4, 5, 5] x) => (float[N, 6, 6, 6] y)"
    found = site(constants, "y = ConvTranspose <group = 2> (x, w, b)", signature)
    assert found.weight is not None
    kernel = found.weight.kernel
    assert (kernel.outputs, kernel.axis, kernel.depth) == (6, 1, 8)
    entry = Entry(output="y", op="ConvTranspose", scheme="static", axis=1)
    made = encode(found.weight, entry, 0.1)
    assert made.weight.params.scale.shape == (3,)
    assert bias_of(made).codes.shape == (6,)
    np.testing.assert_array_equal(bias_of(made).params.scale[:3], bias_of(made).params.scale[3:])


@pytest.mark.parametrize(("turned", "axis"), [(0, 1), (1, 0)])
def test_the_factors_of_a_gemm(turned: int, axis: int) -> None:
    weights = normal(8, 4) if not turned else normal(4, 8)
    constants = f"{stored('w', weights)}, {stored('b', np.ones((1, 4)))}"
    node = f"y = Gemm <transB = {turned}, alpha = 0.5, beta = 3.0> (x, w, b)"
    found = site(constants, node, "g (float[N, 8] x) => (float[N, 4] y)")
    assert found.weight is not None
    entry = Entry(output="y", op="Gemm", scheme="static", axis=axis)
    made = encode(found.weight, entry, 0.1)
    most = np.abs(weights).max(axis=1 - axis)
    np.testing.assert_allclose(made.weight.params.scale, most / 2 / 127, rtol=1e-6)
    np.testing.assert_allclose(bias_of(made).codes * bias_of(made).params.scale, 3, rtol=1e-3)
