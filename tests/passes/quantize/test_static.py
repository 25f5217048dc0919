"""Static int8: which layers become which kernels of the runtime, and which stay."""

from __future__ import annotations

import pytest

from passes.quantize.static import QuantizeStatic
from tests.checks import model
from tests.passes.fuse.constants import floats
from tests.passes.quantize.static_checks import IMAGE, ROWS, quantized
from toolkit.errors import UsageError
from toolkit.pipeline import Context

CONV = f"{floats('w', 8, 4, 3, 3)}, {floats('b', 8)}"


@pytest.mark.parametrize("bias", ["", ", b"])
@pytest.mark.parametrize("limit", ["", "Relu (c)", "Clip (c, lo, hi)"])
def test_a_convolution(bias: str, limit: str) -> None:
    bounds = "float lo = {0}, float hi = {6}"
    last = f"c = Conv <pads = [1, 1, 1, 1]> (x, w{bias}) y = {limit}"
    if not limit:
        last = f"y = Conv <pads = [1, 1, 1, 1]> (x, w{bias})"
    quantized(IMAGE, f"{CONV}, {bounds}", last, "QLinearConv")


def test_a_gemm_and_a_matmul_end_in_floats() -> None:
    weights = f"{floats('w', 8, 16)}, {floats('b', 8)}, {floats('m', 16, 8)}"
    quantized(ROWS, weights, "y = Gemm <transB = 1> (x, w, b)", "QGemm")
    quantized(ROWS, weights, "y = Gemm (x, m, b)", "QGemm")
    quantized(ROWS, weights, "y = MatMul (x, m)", "MatMulIntegerToFloat")


def test_it_needs_data() -> None:
    text = "g (float[N, 4] x) => (float[N, 4] y) { y = Relu (x) }"
    with pytest.raises(UsageError, match=r"needs calibration data: --calib SOURCE$"):
        QuantizeStatic().run(model(text), Context())
