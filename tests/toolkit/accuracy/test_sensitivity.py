"""The noise of single layers and of all values, compared with formulas."""

from __future__ import annotations

import numpy as np
import pytest

from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from tests.checks import model
from tests.toolkit.accuracy.nets import FEEDS, W, coarse, linear
from tests.toolkit.accuracy.test_pipeline_accuracy import TWO, Coarse, two
from toolkit import Context, Model, UsageError
from toolkit.accuracy.ablation import quantize_by
from toolkit.accuracy.evaluator import Evaluator
from toolkit.accuracy.sensitivity import layer_noise, value_noise

V = np.ascontiguousarray(W[:8, :8])


def run(w: np.ndarray, v: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.sin(np.maximum(x @ w, 0) @ v)


def wanted(w: np.ndarray, v: np.ndarray) -> float:
    x = np.concatenate([feed["x"] for feed in FEEDS[:8]])
    floats, others = run(W, V, x), run(w, v, x)
    return float(np.square(floats - others).sum() / np.square(floats).sum())


def table(item, floats: Model):
    evaluator = Evaluator(floats, FEEDS, most=8)
    found = quantize_by(item, floats, Context)
    return found, layer_noise(evaluator, found.variants, 8)


def test_each_layer_alone():
    _, rows = table(Coarse(levels=15), two())
    assert [row.label for row in rows] == ["coarse a", "coarse m"]
    assert rows[0].noise == pytest.approx(wanted(coarse(W, 15), V), rel=1e-3)
    assert rows[1].noise == pytest.approx(wanted(W, coarse(V, 15)), rel=1e-3)


def test_a_pass_with_a_plan():
    floats = two()
    found, rows = table(QuantizeDynamic(min_elements=16), floats)
    assert [row.label for row in rows] == ["MatMul a", "MatMul m"]
    whole = Evaluator(floats, FEEDS, most=8).evaluate(found.whole).noise
    for row in rows:
        assert row.noise is not None
        assert 0 < row.noise < 2 * whole
    assert not any(node.op_type == "MatMulInteger" for node in floats.graph.nodes)


def test_errors_accumulate_along_the_graph():
    floats = two()
    found, _ = table(Coarse(levels=15), floats)
    rows = {row.label: row for row in value_noise(floats, found.whole, FEEDS, samples=8)}
    assert list(rows) == ["a", "b", "m", "y"]
    x = np.concatenate([feed["x"] for feed in FEEDS[:8]])
    a, other = x @ W, x @ coarse(W, 15)
    noise = float(np.square(a - other).sum() / np.square(a).sum())
    assert rows["a"].noise == pytest.approx(noise, rel=1e-3)
    assert rows["y"].noise == pytest.approx(wanted(coarse(W, 15), coarse(V, 15)), rel=1e-3)


def test_errors_in_a_subgraph_accumulate_over_iterations():
    text = """g (int64 n, float[2] x) => (float[2] y) <bool t = {{1}}, float[1] k = {{{k}}}> {{
        y = Loop (n, t, x) <body = b (int64 i, bool go, float[2] v) => (bool on, float[2] u)
            {{ on = Identity (go) u = Mul (v, k) }}> }}"""
    feed = {"n": np.array(2), "x": np.array([1, 0], np.float32)}
    rows = value_noise(model(text.format(k=2)), model(text.format(k=1)), [feed], samples=1)
    found = {row.label: row.noise for row in rows}
    assert found["u"] == pytest.approx((1 + 9) / (4 + 16))  # 1 for 2, and 1 for 4
    assert found["v"] == pytest.approx((0 + 1) / (1 + 4))
    assert found["y"] == pytest.approx(9 / 16)


def test_values_are_observed_in_sweeps():
    floats = two()
    found, _ = table(Coarse(levels=15), floats)
    one, many = (value_noise(floats, found.whole, FEEDS, samples=4, budget=b) for b in (1, 1 << 20))
    assert one == many


def test_nothing_to_quantize():
    with pytest.raises(UsageError, match="finds nothing to quantize: left float"):
        quantize_by(QuantizeDynamic(), linear(W, TWO, v=V), Context)
