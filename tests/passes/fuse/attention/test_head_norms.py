"""Norms of heads are moved before the Transpose, where they use views of tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from passes.analysis.shapes import Shapes
from passes.fuse.attention.head_norms import norm_before_move
from tests.checks import check
from tests.passes.fuse.attention.test_fuse_attention import attributes, fused
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.rewriting.rule import apply_rules

HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'


@dataclass(frozen=True, slots=True)
class Swap:
    """The rule, after shape inference."""

    def run(self, model: Model, ctx: Context) -> None:
        Shapes(annotate=False).run(model, ctx)
        apply_rules(model, (norm_before_move,), ctx)


MOVE = "t = Transpose <perm = [0, 2, 1, 3]> (x)"


def graph(nodes: str, outputs: str = "float[N, 2, S, 4] y") -> str:
    return f"""{HEADER}g (float[N, S, 2, 4] x) => ({outputs})
        <float[4] w = {{1, 2, 3, 4}}, float[4] b = {{0.5, 1, 1.5, 2}}, float[2] v = {{1, 2}}> {{
        {nodes}
    }}"""


@pytest.mark.parametrize(
    "norm",
    [
        "y = LayerNormalization <axis = -1, epsilon = 0.01> (t, w, b)",
        "y = LayerNormalization <axis = 3> (t, w)",
        "y = RMSNormalization (t, w)",
    ],
)
def test_a_norm_moves_before_the_transpose_of_the_heads(norm: str) -> None:
    found = check(Swap(), graph(f"{MOVE} {norm}"))
    assert [node.op_type for node in found.graph.nodes][-1] == "Transpose"


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (f"{MOVE} y = LayerNormalization <axis = 2> (t, w)", "float[N, 2, S, 4] y"),
        ("t = Transpose <perm = [0, 1, 3, 2]> (x) y = LayerNormalization (t, v)",
         "float[N, S, 4, 2] y"),
        (f"{MOVE} y = LayerNormalization (t, w)", "float[N, 2, S, 4] y, float[N, 2, S, 4] t"),
        (f"{MOVE} n = LayerNormalization (t, w) y = Add (n, t)", "float[N, 2, S, 4] y"),
        (f"{MOVE} y, m = LayerNormalization (t, w)", "float[N, 2, S, 4] y, float[N, 2, S, 1] m"),
    ],
)  # fmt: skip
def test_other_norms_stay_after_the_transpose(nodes: str, outputs: str) -> None:
    check(Swap(), graph(nodes, outputs), near_miss=True)


@pytest.mark.parametrize("norm", ["LayerNormalization", "RMSNormalization"])
@pytest.mark.parametrize("scale", ["3, 1, 4", "3, 4", "1, 3, 1, 4", "2, 1, 1, 4"])
def test_a_scale_along_other_axes_stays(norm: str, scale: str) -> None:
    text = f"""{HEADER}g (float[2, 3, 3, 4] x, float[{scale}] s) => (float[2, 3, 3, 4] y) {{
        {MOVE} y = {norm} (t, s)
    }}"""
    check(Swap(), text, near_miss=True)
    alike = ", ".join(["1"] * scale.count(",") + ["4"])
    check(Swap(), text.replace(f"float[{scale}]", f"float[{alike}]"))


def test_attention_takes_normalized_queries_and_keys_as_tokens() -> None:
    heads = " ".join(
        f"{n}4 = Reshape ({n}0, apart) {n}t = Transpose <perm = [0, 2, 1, 3]> ({n}4)" for n in "qkv"
    )
    text = f"""{HEADER}g (float[N, S, 8] q0, float[N, S, 8] k0, float[N, S, 8] v0)
        => (float[N, 2, S, 4] y)
        <int64[4] apart = {{0, 0, 2, 4}}, float[4] w = {{1, 2, 3, 4}}, float half = {{0.5}}> {{
        {heads} q = LayerNormalization (qt, w) k = LayerNormalization (kt, w)
        kk = Transpose <perm = [0, 1, 3, 2]> (k) qk = MatMul (q, kk) s = Mul (qk, half)
        p = Softmax <axis = -1> (s) y = MatMul (p, vt)
    }}"""
    result, node = fused(text)
    assert attributes(node) == {"scale": 0.5, "q_num_heads": 2, "kv_num_heads": 2}
    assert node.input[2] == "v0"
    assert Counter(n.op_type for n in result.graph.nodes)["LayerNormalization"] == 2
