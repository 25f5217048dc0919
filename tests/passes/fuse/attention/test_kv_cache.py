"""Attention with a cache."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from passes.analysis.shapes import Shapes
from passes.fuse.attention.fuse_attention import FuseAttention
from tests.checks import check
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'


@dataclass(frozen=True, slots=True)
class Fuse:
    def run(self, model: Model, ctx: Context) -> None:
        Shapes(annotate=False).run(model, ctx)
        FuseAttention().run(model, ctx)


def graph(body: str, outputs: str = "float[N, 2, P, 4] pk, float[N, 2, P, 4] pv") -> str:
    """Tokens x, c, z, a cache of A keys and values, then `body`."""
    return f"""{HEADER}g (float[N, S, 8] x, float[N, S, 8] c, float[N, S, 8] z,
           float[N, 2, A, 4] ak, float[N, 2, A, 4] av) => (float[N, 2, S, 4] y, {outputs})
        <int64[4] heads = {{0, 0, 2, 4}}> {{
        x4 = Reshape (x, heads) q = Transpose <perm = [0, 2, 1, 3]> (x4)
        c4 = Reshape (c, heads) k = Transpose <perm = [0, 2, 1, 3]> (c4)
        z4 = Reshape (z, heads) v = Transpose <perm = [0, 2, 1, 3]> (z4)
        {body}
    }}"""


JOIN = "pk = Concat <axis = 2> (ak, k) pv = Concat <axis = -2> (av, v)"
ATTEND = """kt = Transpose <perm = [0, 1, 3, 2]> (pk) s = MatMul (q, kt)
    p = Softmax <axis = -1> (s) y = MatMul (p, pv)"""


def test_the_operator_concatenates_the_cache() -> None:
    result = check(Fuse(), graph(f"{JOIN} {ATTEND}"))
    (node,) = [n for n in result.graph.nodes if n.op_type == "Attention"]
    assert list(node.input) == ["x", "c", "z", "", "ak", "av"]
    assert list(node.output)[1:] == ["pk", "pv"]
    assert not [n for n in result.graph.nodes if n.op_type == "Concat"]


def test_an_unused_cache() -> None:
    text = graph(f"{JOIN} {ATTEND} u = Relu (x)", "float[N, S, 8] u")
    result = check(Fuse(), text)
    assert not [n for n in result.graph.nodes if n.op_type == "Concat"]


@pytest.mark.parametrize(
    "join",
    [
        "pk = Concat <axis = 1> (ak, k) pv = Concat <axis = 1> (av, v)",
        "pk = Concat <axis = 2> (ak, k, k) pv = Concat <axis = 2> (av, v, v)",
    ],
    ids=["along the heads", "three parts"],
)
def test_other_concatenations_stay(join: str) -> None:
    text = graph(f"{join} {ATTEND}", "float[N, H, P, 4] pk").replace(
        "(float[N, 2, S, 4] y", "(float[N, H, S, 4] y"
    )
    if "axis = 1" in join:
        text = (
            text.replace("float[N, 2, A, 4]", "float[N, 2, S, 4]")
            .replace("(q, kt)", "(qq, kt)")
            .replace("kt = T", "qq = Concat <axis = 1> (q, q) kt = T")
        )
    result = check(Fuse(), text)
    assert [n.op_type for n in result.graph.nodes].count("Concat") >= 2


def test_a_mask_that_depends_on_the_concatenation_stays() -> None:
    body = f"""{JOIN} kt = Transpose <perm = [0, 1, 3, 2]> (pk) s = MatMul (q, kt)
        r = ReduceSum <keepdims = 1> (pk, axes) m = Transpose <perm = [0, 1, 3, 2]> (r)
        b = Add (s, m) p = Softmax <axis = -1> (b) y = MatMul (p, pv)"""
    text = graph(body).replace("int64[4] heads", "int64[1] axes = {3}, int64[4] heads")
    result = check(Fuse(), text)
    assert [n.op_type for n in result.graph.nodes].count("Concat") >= 2


def test_the_cache_may_come_last() -> None:
    text = graph(f"pk = Concat <axis = 2> (k, ak) pv = Concat <axis = 2> (v, av) {ATTEND}")
    check(Fuse(), text)  # the operator does not distinguish the two


def test_caches_of_keys_and_values_of_different_lengths_stay() -> None:
    """S + A keys and A + S values: as many, but caches of different lengths."""
    text = graph(f"pk = Concat <axis = 2> (k, ak) pv = Concat <axis = 2> (av, v) {ATTEND}")
    result = check(Fuse(), text)
    assert [n.op_type for n in result.graph.nodes].count("Concat") == 2


def test_a_causal_attention_would_count_from_the_cache_on() -> None:
    text = graph(f"{JOIN} y = Attention <is_causal = 1> (q, pk, pv)")
    check(Fuse(), text, near_miss=True)


def test_heads_that_are_repeated_before_they_are_joined() -> None:
    """The cache holds all four heads, so the operator must use all four."""
    text = f"""{HEADER}g (float[N, S, 16] x, float[N, S, 8] c, float[N, S, 8] z,
           float[N, 4, A, 4] ak, float[N, 4, A, 4] av) => (float[N, 4, S, 4] y)
        <int64[4] four = {{0, 0, 4, 4}}, int64[4] two = {{0, 0, 2, 4}}, int64[1] axis = {{2}},
         int64[5] twice = {{1, 1, 2, 1, 1}}, int64[4] all = {{0, 4, -1, 4}}> {{
        x4 = Reshape (x, four) q = Transpose <perm = [0, 2, 1, 3]> (x4)
        c4 = Reshape (c, two) k2 = Transpose <perm = [0, 2, 1, 3]> (c4)
        k5 = Unsqueeze (k2, axis) k6 = Expand (k5, twice) k = Reshape (k6, all)
        z4 = Reshape (z, two) v2 = Transpose <perm = [0, 2, 1, 3]> (z4)
        v5 = Unsqueeze (v2, axis) v6 = Expand (v5, twice) v = Reshape (v6, all)
        {JOIN} {ATTEND}
    }}"""
    check(Fuse(), text)
