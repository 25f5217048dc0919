"""Query, key and value in one value: its parts become tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from passes.analysis.shapes import Shapes
from passes.fuse.attention.packed_qkv import packed_heads, split_before_view
from tests.checks import check
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.rewriting.rule import apply_rules

HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'


@dataclass(frozen=True, slots=True)
class Unpack:
    """The rule, after shape inference."""

    def run(self, model: Model, ctx: Context) -> None:
        Shapes(annotate=False).run(model, ctx)
        apply_rules(model, (packed_heads,), ctx)


APART = "a = Reshape (x, five) t = Transpose <perm = [2, 0, 3, 1, 4]> (a)"
ENTRIES = "q = Gather (t, i0) k = Gather (t, i1) v = Gather (t, i2)"
BESIDE = APART.replace("five", "other").replace("[2, 0, 3, 1, 4]", "[3, 0, 2, 1, 4]")
"""The parts of each head are adjacent."""
MERGED = APART + " t3 = Reshape (t, four)"
SPLIT = "q1, k1, v1 = Split <axis = 0> (t3, ones)"
SQUEEZED = " ".join(f"{name} = Squeeze ({name}1, a0)" for name in "qkv")
SUM = "qk = Add (q, k) y = Sub (qk, v)"
HEADS = "float[2, 4, N, 5] y"


def graph(nodes: str, result: str = HEADS, source: str = "float[2, N, 60] x") -> str:
    return f"""{HEADER}g ({source}) => ({result})
        <int64[5] five = {{2, -1, 3, 4, 5}}, int64[5] other = {{2, -1, 4, 3, 5}},
         int64[4] four = {{3, 8, -1, 5}}, int64[4] uneven = {{6, 4, -1, 5}},
         int64 i0 = {{0}}, int64 i1 = {{1}}, int64 i2 = {{-1}}, int64[2] both = {{0, 1}},
         int64[3] ones = {{1, 1, 1}}, int64[3] odd = {{2, 1, 0}}, int64[1] a0 = {{0}},
         int64[1] b1 = {{1}}, int64[1] b2 = {{2}}, int64[1] b3 = {{3}}> {{
        {nodes}
    }}"""


FEED = {"x": np.random.default_rng(0).standard_normal((2, 6, 60)).astype(np.float32)}


def unpacked(text: str, feed: dict[str, Any] | None = None) -> Counter[str]:
    found = check(Unpack(), text, inputs=feed or FEED)
    return Counter(node.op_type for node in found.graph.nodes)


def test_entries_of_the_first_axis_are_parts_of_the_last() -> None:
    found = unpacked(graph(f"{APART} {ENTRIES} {SUM}"))
    assert found == {"Split": 1, "Reshape": 3, "Transpose": 3, "Add": 1, "Sub": 1}


def test_an_entry_that_is_used_twice_or_not_at_all() -> None:
    found = unpacked(graph(f"{APART} q = Gather (t, i1) k = Gather (t, i1) y = Mul (q, k)"))
    assert found == {"Split": 1, "Reshape": 1, "Transpose": 1, "Mul": 1}


@pytest.mark.parametrize(
    "entries",
    [
        f"{SPLIT} {SQUEEZED}",
        "q1 = Slice (t3, a0, b1, a0) k1 = Slice (t3, b1, b2, a0) v1 = Slice (t3, b2, b3, a0) "
        + SQUEEZED,
        ENTRIES.replace("(t,", "(t3,"),
    ],
)
def test_batch_and_heads_may_be_merged_before(entries: str) -> None:
    found = unpacked(graph(f"{MERGED} {entries} {SUM}", "float[8, N, 5] y"))
    assert not found["Gather"]
    assert found["Split"] == 1
    assert found["Transpose"] == 3


def test_an_image_is_flattened_to_tokens() -> None:
    source = "float[2, 2, 3, 60] x"
    feed = {"x": FEED["x"].reshape(2, 2, 3, 60)}
    found = unpacked(graph(f"{APART} {ENTRIES} {SUM}", "float[2, 4, 6, 5] y", source), feed)
    assert found["Split"] == 1
    assert found["Reshape"] == 6  # to tokens, then to heads


@pytest.mark.parametrize(
    ("nodes", "result"),
    [
        (f"{BESIDE} {ENTRIES} {SUM}", HEADS),
        (f"{APART} {ENTRIES} {SUM}", f"{HEADS}, float[3, 2, 4, N, 5] t"),
        (f"{APART} q = Gather (t, both) y = Neg (q)", "float[2, 2, 4, N, 5] y"),
        (f"{APART} q = Slice (t, a0, b2, a0) y = Neg (q)", "float[2, 2, 4, N, 5] y"),
        (f"{APART} q = Gather <axis = 2> (t, i0) y = Neg (q)", "float[3, 2, N, 5] y"),
        (f"{APART} q = Gather (t, i0) k = Exp (t) y = Add (q, k)", "float[3, 2, 4, N, 5] y"),
        (f"{MERGED} y, z = Split <axis = 0> (t3, both2)".replace("both2", "lengths"),
         "float[2, 8, N, 5] y, float[1, 8, N, 5] z"),
        (f"{APART} t3 = Reshape (t, uneven) {ENTRIES.replace('(t,', '(t3,')} {SUM}",
         "float[4, N, 5] y"),
    ],
)  # fmt: skip
def test_other_users_than_single_parts_stay(nodes: str, result: str) -> None:
    text = graph(nodes, result).replace("int64 i0", "int64[2] lengths = {2, 1}, int64 i0")
    check(Unpack(), text, near_miss=True, inputs=FEED)


def test_a_value_captured_by_a_branch_stays() -> None:
    nodes = f"""{APART} {ENTRIES} {SUM} c = Constant <value = bool {{1}}> ()
        z = If (c) <then_branch = a () => (float[3, 2, 4, N, 5] p) {{ p = Exp (t) }},
                    else_branch = b () => (float[3, 2, 4, N, 5] r) {{ r = Neg (t) }}>"""
    check(Unpack(), graph(nodes, f"{HEADS}, float[3, 2, 4, N, 5] z"), near_miss=True, inputs=FEED)


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ("y = Gather (t, i2) z = Gather (t, last)", f"{HEADS}, {HEADS[:-1]}z"),
        ("y = Gather (t, i2) q = Gather (t, last) z = Neg (q)", f"{HEADS}, {HEADS[:-1]}z"),
        ("q = Slice (t, a0, b1, a0) y = Squeeze (q, a0) z = Squeeze (q, a0)",
         f"{HEADS}, {HEADS[:-1]}z"),
        ("q = Slice (t, a0, b1, a0) y = Squeeze (q, a0) z = Neg (q)",
         f"{HEADS}, float[1, 2, 4, N, 5] z"),
    ],
)  # fmt: skip
def test_a_part_that_is_an_output_has_other_users(nodes: str, outputs: str) -> None:
    text = graph(f"{APART} {nodes}", outputs).replace("int64 i0", "int64 last = {2}, int64 i0")
    assert unpacked(text)["Split"] == 1


# -- one key and value for many queries


@dataclass(frozen=True, slots=True)
class SplitFirst:
    def run(self, model: Model, ctx: Context) -> None:
        Shapes(annotate=False).run(model, ctx)
        apply_rules(model, (split_before_view,), ctx)


def viewed(nodes: str, outputs: str = "float[N, 1, S, 4] y, float[N, 1, S, 2] z") -> str:
    return f"""{HEADER}g (float[N, S, 6] x) => ({outputs})
        <int64[1] one = {{1}}, int64[2] both = {{0, -1}}, int64[2] sizes = {{4, 2}}> {{
        {nodes}
    }}"""


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        ("v = Unsqueeze (x, one) y, z = Split <axis = 3> (v, sizes)", None),
        ("v = Unsqueeze (x, one) y, z = Split <axis = -1> (v, sizes)", None),
        (
            "v = Unsqueeze (x, both) y, z = Split <axis = 3> (v, sizes)",
            "float[1, N, S, 4, 1] y, float[1, N, S, 2, 1] z",
        ),
    ],
)
def test_an_axis_of_size_1_moves_after_the_split(nodes: str, outputs: str | None) -> None:
    found = check(SplitFirst(), viewed(nodes, outputs) if outputs else viewed(nodes))
    kinds = [node.op_type for node in found.graph.nodes]
    assert kinds == ["Split", "Unsqueeze", "Unsqueeze"]


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (
            "v = Unsqueeze (x, one) y, z = Split <axis = 1> (v, none)",
            "float[N, 1, S, 6] y, float[N, 0, S, 6] z",
        ),
        (
            "v = Unsqueeze (x, one) y, z = Split <axis = 3> (v, sizes)",
            "float[N, 1, S, 4] y, float[N, 1, S, 2] z, float[N, 1, S, 6] v",
        ),
        (
            "v = Unsqueeze (x, one) a, z = Split <axis = 3> (v, sizes) y = Exp (v)",
            "float[N, 1, S, 6] y, float[N, 1, S, 2] z",
        ),
    ],
)
def test_other_views_stay_before_their_split(nodes: str, outputs: str) -> None:
    text = viewed(nodes, outputs).replace("int64[1] one", "int64[2] none = {1, 0}, int64[1] one")
    check(SplitFirst(), text, near_miss=True)
