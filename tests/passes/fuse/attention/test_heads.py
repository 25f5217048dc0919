"""The forms of attention operands: tokens, separate heads, merged heads."""

from __future__ import annotations

from passes.analysis.shapes import Shapes
from passes.fuse.attention.heads import AttentionOperand, heads_restored, mismatch
from tests.checks import model
from toolkit.ir.graph import Graph
from toolkit.pass_manager.protocol import Context

SPLIT = "h = Reshape (x, heads) y = Transpose <perm = [0, 2, 1, 3]> (h)"


def graph(nodes: str, declared: str = "float[N, S, 12] x") -> Graph:
    text = f"""<ir_version: 10, opset_import: ["" : 23]> g ({declared}) => (float[] y)
        <int64[4] heads = {{0, 0, 3, 4}}, int64[3] merged = {{-1, 5, 4}},
         int64[4] four = {{1, 3, 2, 1}}, float half = {{0.5}}> {{ {nodes} }}"""
    found = model(text)
    Shapes(annotate=False).run(found, Context())
    return found.graph


def test_split_heads_are_traced_to_tokens() -> None:
    form = AttentionOperand(graph(SPLIT), "y").tokens()
    assert form is not None
    assert (form.source.value, form.heads, form.size, form.steps) == ("x", 3, 4, 0)
    assert form.on_tokens
    assert form.keeps_heads


def test_heads_not_computed_from_tokens_stay_separate() -> None:
    operand = AttentionOperand(graph("y = Relu (x)", "float[N, 3, S, 4] x"), "y")
    assert operand.tokens() is None or operand.tokens() == operand.merged()
    form = operand.separate()
    assert form is not None
    assert (form.source.value, form.heads, form.size) == ("y", 3, 4)
    assert not form.on_tokens


def test_a_scaled_source_is_used_only_if_allowed() -> None:
    g = graph(SPLIT.replace("y =", "s = Mul (h, half) y =").replace("> (h)", "> (s)"))
    form = AttentionOperand(g, "y").tokens()
    assert form is not None
    assert (form.source.value, form.source.scale) == ("x", 0.5)
    unscaled = AttentionOperand(g, "y", scaled=False).tokens()
    assert unscaled is not None
    assert unscaled.source.value == "s"


def test_merged_heads_are_restored() -> None:
    g = graph(f"{SPLIT.replace('y =', 't =')} y = Reshape (t, merged)", "float[N, 5, 12] x")
    assert heads_restored(g, "y", g.nodes[-1]) == "t"


def test_forms_that_do_not_fit_together() -> None:
    one = AttentionOperand(graph(SPLIT), "y").tokens()
    other = AttentionOperand(graph(SPLIT, "float[M, S, 12] x"), "y").tokens()
    assert one is not None
    assert other is not None
    assert mismatch(one, one, one) == ""
    assert "batches differ" in mismatch(one, one, other)
