"""The analysis of attention scores: scales, biases, masks and caps before the softmax."""

from __future__ import annotations

import numpy as np
import pytest

from passes.analysis.shapes import Shapes
from passes.fuse.attention.scores import Scores, read_scores
from tests.checks import model
from toolkit.pass_manager.protocol import Context
from toolkit.rewriting.rule import MatchFailure


def scores(nodes: str) -> Scores:
    text = f"""<ir_version: 10, opset_import: ["" : 23]>
        g (float[N, 2, S, 4] q, float[N, 2, 4, T] k, float[S, T] m, bool[S, T] c) => (float[] y)
        <float half = {{0.5}}, float four = {{4}}, float low = {{-3.4028235e38}},
         float zero = {{0}}, float[2, 1, 1] by_head = {{1, 2}}> {{
        p = MatMul (q, k) {nodes} }}"""
    found = model(text)
    Shapes(annotate=False).run(found, Context())
    return read_scores(found.graph, "y")


def test_scales_before_and_after_a_bias() -> None:
    found = scores("s = Mul (p, half) b = Add (s, m) y = Div (b, four)")
    assert (found.query, found.key, found.scale) == ("q", "k", 0.125)
    (bias,) = found.biases
    assert (bias.value, bias.factor, bias.rank) == ("m", 0.25, 4)


def test_a_mask_is_added_or_selected() -> None:
    (added,) = scores("w = Where (c, zero, low) y = Add (p, w)").biases
    assert (added.value, added.where_true, added.replaces) == ("c", False, False)
    (selected,) = scores("y = Where (c, low, p)").biases
    assert (selected.value, selected.where_true, selected.replaces) == ("c", True, True)
    assert selected.masked == np.finfo(np.float32).min


def test_a_cap_and_a_scale_per_head() -> None:
    capped = scores("a = Div (p, four) t = Tanh (a) y = Mul (t, four)")
    assert (capped.cap, capped.scale) == (4.0, 0.25)
    assert scores("y = Mul (p, by_head)").head_scale == "by_head"


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ("y = Sub (m, p)", "subtracts the scores"),
        ("y = Relu (p)", "is between"),
        ("b = Add (p, m) t = Tanh (b) y = Mul (t, four)", "precedes the soft cap"),
        ("s = Sigmoid (m) y = Add (s, m)", "does not add to a product"),
    ],
)
def test_other_values_are_not_scores(nodes: str, reason: str) -> None:
    with pytest.raises(MatchFailure, match=reason):
        scores(nodes)
