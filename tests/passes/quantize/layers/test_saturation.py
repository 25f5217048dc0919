"""The check for processors without VNNI: which pairs of weights overflow, and who would know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from passes.quantize.layers.saturation import has_vnni, overflows, saturating
from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from passes.quantize.schemes.static.quantize_static import QuantizeStatic
from tests.checks import model, random_feeds
from tests.passes.fuse.constants import floats, typed
from toolkit.calibrate.data import Calib
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context


@pytest.mark.parametrize(
    ("pair", "wanted"),
    [
        ((127, 1), False),
        ((127, 2), True),
        ((-127, -1), False),
        ((-127, -2), True),
        ((127, -127), False),
        ((64, 64), False),
        ((-64, -64), False),
    ],
)
def test_pairs(pair: tuple[int, int], wanted: bool) -> None:
    first, second = pair
    rows = np.array([[0, 0, first, second]], np.int8)
    assert overflows(rows) is wanted
    assert (255 * (first + second) > 32767 or 255 * (first + second) < -32768) is wanted
    assert not overflows(np.array([[0, first, second, 0]], np.int8))  # of two different pairs


def test_a_row_of_odd_length_or_none() -> None:
    assert not overflows(np.array([[127]], np.int8))
    assert overflows(np.array([[100, 100, 1]], np.int8))


def matmul(*column: int) -> Model:
    numbers = ", ".join(f"{value}, 1" for value in column)
    text = f"""g (float[2, {len(column)}] x) => (float[2, 2] y)
        <int8[{len(column)}, 2] w = {{{numbers}}}, float s = {{0.1}}, int8 z = {{0}}> {{
        d = DequantizeLinear (w, s, z) y = MatMul (x, d)
    }}"""
    return model(text)


def test_sums_are_along_the_inputs() -> None:
    assert saturating(matmul(127, 100)) == ["MatMul 'y'"]
    assert saturating(matmul(127, 0, 100, 0)) == []


@pytest.mark.parametrize(("first", "wanted"), [(127, True), (2, False)])
def test_a_convolution_sums_over_channels(first: int, wanted: bool) -> None:
    text = f"""g (float[1, 2, 4, 4] x) => (float[1, 1, 4, 3] y)
        <int8[1, 2, 1, 2] w = {{{first}, 1, 100, 1}}, float s = {{0.1}}, int8 z = {{0}}> {{
        d = DequantizeLinear (w, s, z) y = Conv (x, d)
    }}"""
    assert bool(saturating(model(text))) is wanted


@pytest.mark.parametrize("reduce_range", [False, True])
def test_a_reduced_range_never_does(reduce_range: bool) -> None:
    numbers = ", ".join(str((i * 37 % 29) / 7) for i in range(256))
    subject = model(f"""g (float[N, 16] x) => (float[N, 16] y)
        <float[16, 16] w = {{{numbers}}}> {{ y = MatMul (x, w) }}""")
    assert saturating(subject) == []
    QuantizeDynamic(min_elements=1, reduce_range=reduce_range).run(subject, Context())
    assert bool(saturating(subject)) is not reduce_range


@pytest.mark.parametrize("item", [QuantizeDynamic(min_elements=1), QuantizeStatic(format="qop")])
def test_operators_on_integers(item: Any) -> None:
    """Those of the runtime as well."""
    signature = "g (float[3, N, 16] x) => (float[3, 1, N, 4] y)"
    shapes = {"m": (16, 16), "u": (1, 16, 16), "r": (1, 16, 4)}
    large = [floats(name, *shape, low=0.5, high=1.0) for name, shape in shapes.items()]
    nodes = "h = MatMul (x, m) y = LSTM <hidden_size = 4> (h, u, r)"
    subject = model(typed(signature, ", ".join(large), nodes, 21))
    data = Calib([random_feeds(subject)]).open(subject)
    item.run(subject, Context(calibration=data))
    ops = {label.split()[0] for label in saturating(subject)}
    static = isinstance(item, QuantizeStatic)
    dynamic = {"MatMulInteger", "DynamicQuantizeLSTM"}
    assert ops == ({"MatMulIntegerToFloat"} if static else dynamic)


def test_the_processor(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags\t\t: fpu avx2 avx512_vnni\n")
    assert has_vnni(path, "x86_64") is True
    path.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f\n")
    assert has_vnni(path, "x86_64") is False
    assert has_vnni(path, "aarch64") is None
    path.write_text("nothing\n")
    assert has_vnni(path, "AMD64") is None
    assert has_vnni(tmp_path / "missing", "x86_64") is None
