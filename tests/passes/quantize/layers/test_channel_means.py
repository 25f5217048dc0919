"""What rounding weights shifts, by the means of what a layer reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from passes.quantize.layers.channel_means import input_means
from passes.quantize.schemes.static.apply import apply_static
from passes.quantize.schemes.static.quantize_static import QuantizeStatic
from tests.checks import model
from tests.passes.fuse.constants import floats, stored, typed
from tests.passes.quantize.schemes.static.checks import context, normal, outputs, planned
from toolkit.ir.graph import Array
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.plan import Plan

IMAGE = "g (float[N, 8, 6, 6] x) => (float[N, 8, 6, 6] y)"
ANY = QuantizeStatic(ops=("Conv", "ConvTranspose", "Gemm"))
ROWS = "g (float[N, 16] x) => (float[N, 8] y)"


def positive(*shape: int) -> list[dict[str, Any]]:
    """Feeds as behind a Relu, with means that are not zero."""
    return [{"x": np.abs(normal(*shape, seed=seed)) + np.float32(0.5)} for seed in range(8)]


def shift(model: Model, floats: Model, feeds: list[dict[str, Any]]) -> Array:
    """How far each channel's mean is from the floats', over all feeds."""
    off: list[Array] = [outputs(model, f)[0] - outputs(floats, f)[0] for f in feeds]
    whole = np.concatenate(off).astype(np.float64)
    return whole.mean(axis=tuple(a for a in range(whole.ndim) if a != 1))


LAYERS = {
    "with a bias": (IMAGE, floats("b", 8), "y = Conv (x, w, b)", (8, 8, 1, 1)),
    "without": (IMAGE, "", "y = Conv (x, w)", (8, 8, 1, 1)),
    "groups": (IMAGE, floats("b", 8), "y = Conv <group = 2> (x, w, b)", (8, 4, 1, 1)),
    "transposed": (
        IMAGE,
        floats("b", 8),
        "y = ConvTranspose <group = 2> (x, w, b)",
        (8, 4, 1, 1),
    ),
    "gemm": (ROWS, floats("b", 8), "y = Gemm <alpha = 0.5> (x, w, b)", (16, 8)),
    "turned": (ROWS, floats("b", 8), "y = Gemm <transB = 1> (x, w, b)", (8, 16)),
}


def quantized(case: str) -> tuple[Model, Model, Model, list[dict[str, Any]]]:
    """The floats, the layer in int8, and the same with means known."""
    signature, constants, node, shape = LAYERS[case]
    # Weights of few sizes: what is rounded is rounded the same way, and adds up.
    weights: Array = np.round(normal(*shape), 1) + np.float32(0.003)
    kept = ", ".join(filter(None, (stored("w", weights), constants)))
    feeds = positive(*((2, 8, 6, 6) if signature == IMAGE else (4, 16)))
    subject, plan = planned(typed(signature, kept, node, 21), ANY, feeds=feeds)
    plain, moved = subject.copy(), subject.copy()
    apply_static(plain, plan, Context())
    apply_static(moved, plan, Context(), means=input_means(subject, plan, context(subject, feeds)))
    return subject, plain, moved, feeds


@pytest.mark.parametrize("case", LAYERS)
def test_the_bias_takes_the_shift_back(case: str) -> None:
    subject, plain, moved, feeds = quantized(case)
    before, after = (np.abs(shift(made, subject, feeds)).mean() for made in (plain, moved))
    assert after < before / 2


def test_by_the_formula() -> None:
    text = f"{IMAGE} <{floats('w', 8, 8, 1, 1)}, {floats('b', 8)}> {{ y = Conv (x, w, b) }}"
    subject = model(text)
    weights = subject.graph.const("w")
    bias = subject.graph.const("b")
    assert weights is not None
    assert bias is not None
    feeds = positive(2, 8, 6, 6)
    _, plan = planned(typed(IMAGE, f"{floats('w', 8, 8, 1, 1)}, {floats('b', 8)}",
                            "y = Conv (x, w, b)", 21), feeds=feeds)  # fmt: skip
    means = input_means(subject, plan, context(subject, feeds))
    whole = np.concatenate([feed["x"] for feed in feeds])
    np.testing.assert_allclose(means["x"], whole.mean((0, 2, 3)), rtol=1e-5)
    made = subject.copy()
    apply_static(made, plan, Context(), means=means)
    g = made.graph
    conv = next(node for node in g.nodes if node.op_type == "Conv")
    codes, scale = (_read(made, conv.input[1], slot) for slot in (0, 1))
    found = _read(made, conv.input[2], 0) * _read(made, conv.input[2], 1).astype(np.float64)
    rounded = codes.astype(np.float64) * scale.reshape(-1, 1, 1, 1)
    expected = bias + ((weights - rounded)[:, :, 0, 0] @ means["x"])
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_nothing_without_data_or_layers() -> None:
    subject, plan = planned(typed(IMAGE, floats("w", 8, 8, 1, 1), "y = Conv (x, w)", 21))
    assert input_means(subject, plan, Context()) == {}
    assert input_means(subject, Plan(), context(subject)) == {}


def test_a_product_of_matrices_has_no_bias_to_move() -> None:
    subject, plan = planned(typed(ROWS, floats("w", 16, 8), "y = MatMul (x, w)", 21))
    assert input_means(subject, plan, context(subject)) == {}


def _read(made: Model, value: str, slot: int) -> Array:
    """What a DequantizeLinear reads."""
    view = made.graph.producer(value)
    assert view is not None
    known = made.graph.const(view.input[slot])
    assert known is not None
    return known
