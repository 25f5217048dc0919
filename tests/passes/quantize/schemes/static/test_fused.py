"""FusedMatMul, which is a MatMul once its weights have taken in the factor and the transpose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from passes.quantize.schemes.static.quantize_static import QuantizeStatic
from tests import ort
from tests.checks import check, model
from tests.passes.fuse.constants import floats
from tests.passes.quantize.schemes.static.checks import ALL, Calibrated, deployed, normal, operators
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.quantization.qparams import QParams

FEEDS: Any = [{"x": normal(3, 16, seed=1)}, {"x": normal(3, 16, seed=2)}]


ROWS = "g (float[N, 16] x) => (float[N, 8] y)"


def text(node: str, constants: str, signature: str = ROWS) -> str:
    return f"{signature} <{constants}> {{ {node} }}"


def fused(attributes: str, *, weight: str = "w") -> str:
    return f"y = com.microsoft.FusedMatMul <{attributes}> (x, {weight})"


def quantized(written: str, item: QuantizeStatic = ALL, feeds: Any = FEEDS) -> Model:
    return check(Calibrated(item, feeds), written, atol=0.3, inputs=feeds[0])


def wanted(x: Any, weights: Any, alpha: float, channels: bool = True) -> Any:
    """alpha x W, in integers, for weights [inputs, outputs]."""
    seen = np.concatenate([feed["x"] for feed in FEEDS])
    params = QParams.from_range(float(seen.min()), float(seen.max()))
    scale = np.abs(weights).max(0 if channels else None) / np.float32(127)
    codes = np.rint(weights / scale).astype(int)
    exact = (params.quantize(x).astype(int) - params.zero_point) @ codes
    return exact * (np.float64(params.scale) * scale * alpha)


@pytest.mark.parametrize("form", ["qdq", "qop"])
@pytest.mark.parametrize("channels", [True, False])
@pytest.mark.parametrize(
    ("attributes", "shape", "alpha"),
    [
        ("alpha = 1.0", (16, 8), 1),
        ("transB = 1", (8, 16), 1),
        ("alpha = 0.125", (16, 8), 0.125),
        ("transB = 1, alpha = 3.0, transA = 0, transBatchB = 0", (8, 16), 3),
    ],
)
def test_the_arithmetic(
    attributes: str, shape: tuple[int, int], alpha: float, channels: bool, form: Any
) -> None:
    item = QuantizeStatic(per_channel=channels, format=form)
    written = text(fused(attributes), floats("w", *shape))
    subject = quantized(written, item)
    assert deployed(subject) == ["MatMulIntegerToFloat"]
    weights = model(written).graph.const("w")
    assert weights is not None
    weights = weights if shape == (16, 8) else weights.T
    for feed in FEEDS:
        (found,) = ort.run(subject.inlined_proto(), feed)
        np.testing.assert_allclose(
            found, wanted(feed["x"], weights, alpha, channels), rtol=1e-5, atol=1e-6
        )
    if form == "qdq":
        (node,) = (n for n in subject.graph.nodes if n.op_type == "MatMul")
        assert (node.domain, len(node.attribute)) == ("", 0)


def test_a_plan_has_the_axis_of_the_weights_as_they_are_stored() -> None:
    ctx = Context()
    subject = model(text(fused("transB = 1"), floats("w", 8, 16)))
    Calibrated(ALL, FEEDS).run(subject, ctx)
    (entry,) = ctx.report.plans[0].entries
    assert (entry.op, entry.scheme, entry.axis) == ("com.microsoft::FusedMatMul", "static", 0)
    assert "w" not in subject.graph.initializers


def test_weight_with_other_users() -> None:
    """One reads it as it is, one turned, one as floats."""
    nodes = f"""{fused("transB = 1, alpha = 0.5")} z = MatMul (x, w) t = Neg (w)"""
    signature = "g (float[N, 16] x) => (float[N, 16] y, float[N, 16] z, float[16, 16] t)"
    written = text(nodes, floats("w", 16, 16), signature)
    subject = quantized(written)
    assert operators(subject)["DequantizeLinear"] == 3
    weights = model(written).graph.const("w")
    assert weights is not None
    y, z, t = ort.run(subject.inlined_proto(), FEEDS[0])
    np.testing.assert_allclose(y, wanted(FEEDS[0]["x"], weights.T, 0.5), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(z, wanted(FEEDS[0]["x"], weights, 1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(t, -weights)


def test_weights_that_are_integers_already() -> None:
    codes = np.random.default_rng(0).integers(-127, 128, (8, 16))
    stored = f"int8[8, 16] k = {{{', '.join(map(str, codes.reshape(-1)))}}}, float s = {{0.01}}"
    nodes = f"w = DequantizeLinear (k, s) {fused('transB = 1')}"
    subject = quantized(text(nodes, stored))
    assert deployed(subject) == ["MatMulIntegerToFloat"]
    (found,) = ort.run(subject.inlined_proto(), FEEDS[0])
    weights = codes.T * np.float32(0.01)
    np.testing.assert_allclose(found, wanted(FEEDS[0]["x"], weights, 1), rtol=1e-4, atol=1e-5)


def test_in_a_body() -> None:
    signature = "g (bool c, float[N, 16] x) => (float[N, 8] z)"
    node = f"""z = If (c) <then_branch = t () => (float[N, 8] y) {{ {fused("alpha = 0.5")} }},
                           else_branch = e () => (float[N, 8] q) {{ q = MatMul (x, w) }}>"""
    feeds = [{"c": np.array(i == 0), **feed} for i, feed in enumerate(FEEDS)]
    written = text(node, floats("w", 16, 8), signature)
    subject = quantized(written, feeds=feeds)
    weights = model(written).graph.const("w")
    assert weights is not None
    for feed, alpha in zip(feeds, (0.5, 1), strict=True):
        (found,) = ort.run(subject.inlined_proto(), feed)
        np.testing.assert_allclose(found, wanted(feed["x"], weights, alpha), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("node", "signature", "said"),
    [
        (fused("transA = 1"), "g (float[16, N] x) => (float[N, 8] y)", "a transposed input"),
        (fused("alpha = -1.0"), "", "a factor that is not positive"),
        (fused("alpha = 0.0"), "", "a factor that is not positive"),
        (fused("transBatchA = 1"), "g (float[16, N, 16] x) => (y)", "a transposed input"),
        (fused("alpha = 1.0", weight="k"), "g (float[3, N, 16] x) => (y)", "are not a matrix"),
        (
            "y = com.microsoft.FusedMatMul <alpha = 0.5> (x, z)",
            "g (float[N, 16] x, float[16, 8] z) => (float[N, 8] y)",
            "two activations",
        ),
    ],
)
def test_unsupported_patterns_stay(node: str, signature: str, said: str) -> None:
    written = text(node, f"{floats('w', 16, 8)}, {floats('k', 3, 16, 8)}", signature or ROWS)
    pass_ = Calibrated(QuantizeStatic(products=True))
    run = "transBatchA" not in node  # which wants batches on both sides
    if run:
        check(pass_, written, near_miss=True)
    ctx = Context()
    subject = model(written)
    sites, left = ALL.candidates(subject)
    assert not sites
    assert said in " ".join(left.values())
    if run:
        pass_.run(subject, ctx)
        assert said in " ".join(ctx.notes)


def test_other_operators_are_asked_for() -> None:
    written = text(fused("alpha = 0.5"), floats("w", 16, 8))
    check(Calibrated(QuantizeStatic(ops=("Conv",))), written, near_miss=True)
