"""Rotary embeddings: all forms become one operator, and near misses stay."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from passes.analysis.shapes import Shapes
from passes.fuse.rotary.fuse_rotary import FuseRotary
from tests.checks import check
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'


@dataclass(frozen=True, slots=True)
class Fuse:
    """The pass, after shape inference."""

    def run(self, model: Model, ctx: Context) -> None:
        Shapes(annotate=False).run(model, ctx)
        FuseRotary().run(model, ctx)


HALVES = """lo = Slice (x, b0, b2, last) hi = Slice (x, b2, b4, last) no = Neg (hi)
    r = Concat <axis = -1> (no, lo)"""
NEIGHBOURS = """even = Slice (x, b0, b4, last, step) odd = Slice (x, b1, b4, last, step)
    no = Neg (odd) e5 = Unsqueeze (even, end) o5 = Unsqueeze (no, end)
    pairs = Concat <axis = -1> (o5, e5) xs = Shape (x) r = Reshape (pairs, xs)"""
TURN = "xc = Mul (x, cos) rs = Mul (r, sin) y = Add (xc, rs)"
DOUBLED = "f2 = Concat <axis = -1> (f, f) c = Cos (f2) s = Sin (f2)"
REPEATED = """f1 = Unsqueeze (f, end) f4 = Expand (f1, twice) fs = Reshape (f4, four)
    c = Cos (fs) s = Sin (fs)"""


def graph(
    rotate: str = HALVES,
    angles: str = DOUBLED,
    shape: str = "N, 3, S, 4",
    place: int = 1,
    turn: str = TURN,
    size: int = 4,
) -> str:
    """Return a model that rotates x by the angles f [1, S, 2], equal for all heads."""
    return f"""{HEADER}g (float[{shape}] x0, float[1, S, 2] f) => (float[{shape}] y)
        <int64[1] b0 = {{0}}, int64[1] b1 = {{1}}, int64[1] b2 = {{2}}, int64[1] b4 = {{{size}}},
         int64[1] last = {{3}}, int64[1] step = {{2}}, int64[1] end = {{-1}},
         int64[1] place = {{{place}}}, int64[4] twice = {{1, 1, 1, 2}},
         int64[3] four = {{1, -1, 4}}> {{
        x = Relu (x0)
        {angles} cos = Unsqueeze (c, place) sin = Unsqueeze (s, place)
        {rotate} {turn}
    }}"""


def fused(text: str) -> Any:
    result = check(Fuse(), text)
    counted = Counter(node.op_type for node in result.graph.nodes)
    assert counted["RotaryEmbedding"] == 1
    assert not counted["Neg"]
    node = next(n for n in result.graph.nodes if n.op_type == "RotaryEmbedding")
    return result, {a.name: a.i for a in node.attribute}


def test_halves_of_heads_before_the_sequence() -> None:
    _, attributes = fused(graph())
    assert attributes == {}


def test_halves_of_heads_after_the_sequence() -> None:
    _, attributes = fused(graph(shape="N, S, 3, 4", place=2))
    assert attributes == {"num_heads": 3}


def test_neighbours() -> None:
    _, attributes = fused(graph(NEIGHBOURS, REPEATED))
    assert attributes == {"interleaved": 1}


STACKED = """f1 = Unsqueeze (f, end) f4 = Concat <axis = -1> (f1, {other}) fs = Reshape (f4, four)
    c = Cos (fs) s = Sin (fs)"""


def test_neighbours_with_angles_stacked_in_pairs() -> None:
    _, attributes = fused(graph(NEIGHBOURS, STACKED.format(other="f1")))
    assert attributes == {"interleaved": 1}


def test_pairs_of_different_angles_are_a_near_miss() -> None:
    other = STACKED.format(other="g1").replace("f4 =", "g0 = Neg (f) g1 = Unsqueeze (g0, end) f4 =")
    check(Fuse(), graph(NEIGHBOURS, other), near_miss=True)
    check(Fuse(), graph(HALVES, STACKED.format(other="f1")), near_miss=True)


def test_split_heads_are_rotated_as_tokens() -> None:
    text = f"""{HEADER}g (float[N, S, 12] t, float[S, 2] f) => (float[N, 3, S, 4] y)
        <int64[4] heads = {{0, 0, 3, 4}}, int64[2] parts = {{2, 2}}> {{
        t4 = Reshape (t, heads) x = Transpose <perm = [0, 2, 1, 3]> (t4)
        f2 = Concat <axis = -1> (f, f) cos = Cos (f2) sin = Sin (f2)
        lo, hi = Split <axis = -1> (x, parts) no = Neg (hi) r = Concat <axis = 3> (no, lo)
        xc = Mul (cos, x) rs = Mul (sin, r) y = Add (rs, xc)
    }}"""
    result, attributes = fused(text)
    assert attributes == {"num_heads": 3}
    node = next(n for n in result.graph.nodes if n.op_type == "RotaryEmbedding")
    assert node.input[0] == "t"


@pytest.mark.parametrize(
    "taken",
    [
        "x = Gather (t, first)",
        "h = Gather (t, first) x = LayerNormalization (h, scale)",
    ],
)
def test_one_part_of_a_packed_projection_is_rotated_as_tokens(taken: str) -> None:
    packed = "a = Reshape (x0, five) t = Transpose <perm = [2, 0, 3, 1, 4]> (a)"
    stored = "int64[5] five = {0, 0, 3, 3, 4}, float[4] scale = {1, 2, 3, 4}, int64 first = {1}"
    text = graph().replace("x = Relu (x0)", f"{packed} {taken}")
    text = text.replace("float[N, 3, S, 4] x0", "float[N, S, 36] x0").replace(
        "<int64", f"<{stored}, int64", 1
    )
    _, attributes = fused(text)
    assert attributes == {"num_heads": 3}


@pytest.mark.parametrize("moved", [True, False])
def test_a_factor_of_the_heads_moves_after_the_rotation(moved: bool) -> None:
    """ESM scales its queries before it rotates them."""
    place = "x0 = Transpose <perm = [0, 2, 1, 3]> (t4)" if moved else "x0 = Identity (t4)"
    shape = "N, 3, S, 4" if moved else "N, S, 3, 4"
    text = f"""{HEADER}g (float[N, S, 12] t, float[S, {1 if moved else "1, 2"}] f0)
        => (float[{shape}] y)
        <int64[4] heads = {{0, 0, 3, 4}}, int64[2] parts = {{2, 2}}, float half = {{0.5}}> {{
        t4 = Reshape (t, heads) {place} x = Mul (x0, half)
        f = Concat <axis = -1> (f0, f0) f2 = Concat <axis = -1> (f, f)
        cos = Cos (f2) sin = Sin (f2)
        lo, hi = Split <axis = -1> (x, parts) no = Neg (hi) r = Concat <axis = 3> (no, lo)
        xc = Mul (cos, x) rs = Mul (sin, r) y = Add (rs, xc)
    }}"""
    if not moved:
        text = text.replace("f = Concat <axis = -1> (f0, f0)", "f = Identity (f0)")
    result, attributes = fused(text)
    assert attributes == {"num_heads": 3}
    nodes = list(result.graph.nodes)
    turn = next(n for n in nodes if n.op_type == "RotaryEmbedding")
    assert turn.input[0] == "t"
    last = result.graph.producer("y")
    assert last is not None
    assert last.op_type == "Mul"
    assert result.graph.const(last.input[1]) == 0.5


PARTIAL = """part = Slice (x, b0, b4, last) rest = Slice (x, b4, end6, last)
    lo = Slice (part, b0, b2, last) hi = Slice (part, b2, b4, last) no = Neg (hi)
    r = Concat <axis = -1> (no, lo) xc = Mul (part, cos) rs = Mul (r, sin) t = Add (xc, rs)
    y = Concat <axis = -1> (t, rest)"""


def partial(body: str = PARTIAL) -> str:
    text = graph(rotate="", turn=body, shape="N, 3, S, 6")
    return text.replace("int64[1] b0", "int64[1] end6 = {6}, int64[1] b5 = {5}, int64[1] b0")


def test_only_the_first_elements_are_rotated() -> None:
    _, attributes = fused(partial())
    assert attributes == {"rotary_embedding_dim": 4}


def test_pieces_with_a_gap_stay() -> None:
    text = partial(PARTIAL.replace("(x, b4, end6, last)", "(x, b5, end6, last)"))
    text = text.replace("=> (float[N, 3, S, 6] y)", "=> (float[N, 3, S, 5] y)")
    check(Fuse(), text, near_miss=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("no = Neg (hi)", "no = Identity (hi)"),
        ("(no, lo)", "(lo, no)"),
        ("lo = Slice (x, b0, b2, last)", "lo = Slice (x, b2, b4, last)"),
        ("f2 = Concat <axis = -1> (f, f)", "g = Neg (f) f2 = Concat <axis = -1> (f, g)"),
        ("rs = Mul (r, sin)", "rs = Mul (r, cos) u = Mul (x, sin)"),
    ],
    ids=["no sign", "sign on the other", "the same half twice", "two angles for a pair", "unused"],
)
def test_near_misses(old: str, new: str) -> None:
    text = graph().replace(old, new)
    if "u =" in new:
        fused(text)  # cos in place of sin is still a pair of products: linear in both
        return
    check(Fuse(), text, near_miss=True)


def test_interleaved_pairs_with_angles_of_halves() -> None:
    check(Fuse(), graph(NEIGHBOURS, DOUBLED), near_miss=True)


def test_angles_for_each_head_are_a_near_miss() -> None:
    text = graph(angles="f2 = Concat <axis = -1> (f, f) c0 = Cos (f2) s0 = Sin (f2)")
    text = text.replace(
        "cos = Unsqueeze (c, place)", "c1 = Unsqueeze (c0, place) cos = Expand (c1, by)"
    )
    text = text.replace(
        "sin = Unsqueeze (s, place)", "s1 = Unsqueeze (s0, place) sin = Expand (s1, by)"
    )
    text = text.replace("int64[1] b0", "int64[4] by = {1, 3, 1, 1}, int64[1] b0")
    check(Fuse(), text, near_miss=True)


def test_constant_tables() -> None:
    angles = np.arange(10, dtype=np.float32).reshape(5, 2)
    both = np.concatenate([angles, angles], 1)

    def table(array: Any) -> str:
        return "{" + ", ".join(f"{v:.6f}" for v in array.reshape(-1)) + "}"

    text = graph(angles="c = Gather (cosines, at) s = Gather (sines, at)")
    text = text.replace("float[1, S, 2] f", "int64[N, S] at").replace(
        "int64[1] b0",
        f"float[5, 4] cosines = {table(np.cos(both))}, float[5, 4] sines = {table(np.sin(both))},"
        " int64[1] b0",
    )
    fused(text)
    wrong = np.cos(both)
    wrong[2, 3] += 0.5
    check(Fuse(), text.replace(table(np.cos(both)), table(wrong)), near_miss=True)


# -- pairs turned on their own


PRODUCTS = """ac = Mul (a, cos) bs = Mul (b, sin) y1 = Sub (ac, bs)
    bc = Mul (b, cos) as = Mul (sin, a) y2 = Add (as, bc)"""
HALVED = """a = Slice (x, b0, b2, last) b = Slice (x, b2, b4, last) PRODUCTS
    y = Concat <axis = -1> (y1, y2)"""
PAIRED = """a = Slice (x, b0, b4, last, step) b = Slice (x, b1, b4, last, step) PRODUCTS
    u1 = Unsqueeze (y1, end) u2 = Unsqueeze (y2, end) u = Concat <axis = -1> (u1, u2)
    xs = Shape (x) y = Reshape (u, xs)"""
COLUMNS = PAIRED.replace(
    "a = Slice (x, b0, b4, last, step) b = Slice (x, b1, b4, last, step)",
    "c2 = Reshape (x, pairs) a = Gather <axis = -1> (c2, nought) b = Gather <axis = 4> (c2, one)",
)
ONCE = "c = Cos (f) s = Sin (f)"


def pairs(turn: str, **more: Any) -> str:
    text = graph(rotate="", angles=ONCE, turn=turn.replace("PRODUCTS", PRODUCTS), **more)
    return text.replace(
        "int64[1] b0",
        "int64[5] pairs = {0, 0, 0, 2, 2}, int64 nought = {0}, int64 one = {1}, int64[1] b0",
    )


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("turn", [HALVED, PAIRED, COLUMNS], ids=["halves", "steps", "columns"])
def test_pairs_with_every_angle_once(turn: str, place: int) -> None:
    shape = "N, 3, S, 4" if place == 1 else "N, S, 3, 4"
    _, attributes = fused(pairs(turn, shape=shape, place=place))
    interleaved = {} if turn == HALVED else {"interleaved": 1}
    assert attributes == interleaved | ({} if place == 1 else {"num_heads": 3})


@pytest.mark.parametrize("turn", [HALVED, PAIRED, COLUMNS], ids=["halves", "steps", "columns"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("y1 = Sub (ac, bs)", "y1 = Sub (bs, ac)"),
        ("y1 = Sub (ac, bs)", "y1 = Add (ac, bs)"),
        ("bc = Mul (b, cos)", "bc = Mul (b, sin)"),
        ("(y1, y2)", "(y2, y1)"),
        ("(u1, u2)", "(u2, u1)"),
    ],
)
def test_pairs_that_are_not_rotated(turn: str, old: str, new: str) -> None:
    text = pairs(turn)
    if old in text:
        check(Fuse(), text.replace(old, new), near_miss=True)


def test_a_pair_from_another_value_stays() -> None:
    """Elements 0 and 1 rotated with 1 and 2, or columns of three."""
    text = pairs(HALVED).replace("b = Slice (x, b2, b4, last)", "b = Slice (x, b1, b3, last)")
    check(Fuse(), text.replace("int64[1] b0", "int64[1] b3 = {3}, int64[1] b0"), near_miss=True)
    text = pairs(COLUMNS, shape="N, 3, S, 6", size=6).replace("{0, 0, 0, 2, 2}", "{0, 0, 0, 2, 3}")
    text = text.replace("xs = Shape (x) y = Reshape (u, xs)", "y = Identity (u)")
    check(
        Fuse(),
        text.replace("=> (float[N, 3, S, 6] y)", "=> (float[N, 3, S, 2, 2] y)"),
        near_miss=True,
    )


def test_neighbours_as_columns_of_pairs() -> None:
    """x * cos + rotate(x) * sin, with pairs gathered from x as [.., 2, 2]."""
    columns = """c2 = Reshape (x, groups) even = Gather <axis = 4> (c2, nought)
        odd = Gather <axis = 4> (c2, one) no = Neg (odd)"""
    rotate = columns + NEIGHBOURS[NEIGHBOURS.index("no = Neg (odd)") + len("no = Neg (odd)") :]
    text = graph(rotate, REPEATED).replace(
        "int64[1] b0",
        "int64[5] groups = {0, 0, 0, 2, 2}, int64 nought = {0}, int64 one = {1}, int64[1] b0",
    )
    _, attributes = fused(text)
    assert attributes == {"interleaved": 1}


def test_angles_concatenated_with_themselves() -> None:
    stacked = """f1 = Unsqueeze (f, end) f4 = Concat <axis = -1> (f1, f1) fs = Reshape (f4, four)
        c = Cos (fs) s = Sin (fs)"""
    _, attributes = fused(graph(NEIGHBOURS, stacked))
    assert attributes == {"interleaved": 1}
    check(Fuse(), graph(HALVES, stacked), near_miss=True)


def test_a_table_that_is_cut_to_the_length() -> None:
    """A table cut to min(rows, length) rows: with fewer rows than `length` the original fails."""
    cut = """xl = Shape <start = 2, end = 3> (x)
        c = Slice (t, b0, xl, b0) s = Slice (u, b0, xl, b0)"""
    table = "{" + ", ".join(f"{v:.3f}" for v in np.linspace(-1, 1, 18)) + "}"
    text = pairs(HALVED).replace(ONCE, cut).replace("float[1, S, 2] f", "float[1] f")
    text = text.replace("Unsqueeze (c, place)", "Unsqueeze (c, b0)").replace(
        "Unsqueeze (s, place)", "Unsqueeze (s, b0)"
    )
    text = text.replace(
        "int64[1] b0", f"float[9, 2] t = {table}, float[9, 2] u = {table}, int64[1] b0"
    )
    fused(text)
    # One row is one for all positions.
    check(
        Fuse(),
        text.replace("float[9, 2]", "float[1, 2]").replace(table, "{0.5, 0.25}"),
        near_miss=True,
    )
