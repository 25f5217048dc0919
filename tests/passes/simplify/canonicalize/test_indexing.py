"""Gathers by affine indices and slices of views: rewrites and near misses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from passes.analysis.shapes import Shapes
from passes.simplify.canonicalize.cleanup import Cleanup
from passes.simplify.dce import RemoveDead
from tests.checks import check
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context


@dataclass(frozen=True, slots=True)
class Clean:
    """Run `cleanup` on a model with inferred shapes, as the pipeline does."""

    def run(self, model: Model, ctx: Context) -> None:
        Shapes(annotate=False).run(model, ctx)
        Cleanup().run(model, ctx)
        RemoveDead().run(model, ctx)


def left(text: str, inputs: dict[str, Any] | None = None) -> Counter[str]:
    """Return the operators of the rewritten model, after comparing its results."""
    result = check(Clean(), text, inputs=inputs)
    return Counter(node.op_type for node in result.graph.nodes)


COUNTING = """
    s = Shape (m)  b = Gather (s, zero)  l = Gather (s, one)
    rows = Range (zero, b, one)  cols = Range (zero, l, one)
    r = Unsqueeze (rows, a123)  c = Unsqueeze (cols, a012)
"""
CONSTANTS = """<int64 zero = {0}, int64 one = {1}, int64[3] a123 = {1, 2, 3},
    int64[3] a012 = {0, 1, 2}, int64[1] last = {-1}, int64[1] flat = {-1}>"""


def masked(body: str, output: str = "bool[B, 1, 1, L] y") -> str:
    return f"agraph (bool[B, L] m) => ({output}) {CONSTANTS} {{ {COUNTING} {body} }}"


def test_all_elements_by_gather_nd_are_a_view() -> None:
    body = """shape = Concat <axis = 0> (s4, ones4)  e = Max (r, c)  es = Shape (e)
        re = Expand (r, es)  ce = Expand (c, es)
        ri = Unsqueeze (re, last)  ci = Unsqueeze (ce, last)
        at = Concat <axis = -1> (ri, ci)  y = GatherND (m, at)"""
    body = body.replace("shape = Concat <axis = 0> (s4, ones4)  ", "")
    assert left(masked(body)) == {"Unsqueeze": 1}


def test_gather_nd_with_the_indices_changed_stays() -> None:
    body = """e = Max (r, c)  es = Shape (e)  re = Expand (r, es)  ce = Expand (c, es)
        ri = Unsqueeze (re, last)  ci = Unsqueeze (ce, last)
        at = Concat <axis = -1> (ci, ri)  y = GatherND (m, at)"""
    square = {"m": np.array([[True, False], [False, False]])}
    assert left(masked(body), square)["GatherND"] == 1


def test_all_rows_of_a_flattened_matrix_are_a_view() -> None:
    body = """f = Flatten <axis = 2> (m)  rl = Mul (r, l)  at = Add (rl, c)
        t = Gather (f, at)  ts = Shape (at)  u = Reshape (t, flat)  y = Reshape (u, ts)"""
    assert left(masked(body)) == {"Unsqueeze": 1}


@pytest.mark.parametrize("at", ["rl = Mul (r, b) at = Add (rl, c)", "at = Add (r, c)"])
def test_other_rows_of_a_flattened_matrix_stay(at: str) -> None:
    body = f"f = Flatten <axis = 2> (m) {at} t = Gather (f, at) u = Reshape (t, flat) "
    body += "ts = Shape (at) y = Reshape (u, ts)"
    square = {"m": np.array([[True, False], [False, False]])}
    assert left(masked(body), square)["Gather"] >= 1


TABLE = "float[6, 2] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}"
POSITIONS = f"""agraph (float[B, L, 2] x) => (float[B, L, 2] y) <{TABLE}, int64 zero = {{0}},
    int64 one = {{1}}, int64 two = {{2}}, int64 axis = {{1}}, int64[1] a0 = {{0}}>"""


def positioned(body: str) -> str:
    return f"""{POSITIONS} {{
        s = Shape (x) l = Gather (s, axis) cols = Range (zero, l, one) {body}
    }}"""


@pytest.mark.parametrize("at", ["at = Identity (cols)", "at = Add (cols, two)"])
def test_positions_are_a_slice_of_their_table(at: str) -> None:
    body = f"{at} u = Unsqueeze (at, a0) p = Gather (table, u) y = Add (x, p)"
    found = left(positioned(body), {"x": np.ones((2, 4, 2), np.float32)})
    assert found == {"Shape": 1, "Slice": 1, "Add": 1}


@pytest.mark.parametrize(
    "body",
    [
        # A step of 2; from the back; rows whose number no other operand determines.
        "at = Mul (cols, two) p = Gather (table, at) y = Add (x, p)",
        "at = Sub (cols, two) p = Gather (table, at) y = Add (x, p)",
        "p = Gather (table, cols) q = Softmax <axis = 0> (p) y = Add (x, q)",
    ],
)
def test_other_positions_are_gathered(body: str) -> None:
    assert left(positioned(body), {"x": np.ones((2, 3, 2), np.float32)})["Gather"] >= 1


def test_one_row_for_all_is_broadcast() -> None:
    body = "s2 = Slice (s, a0, two1) z = Expand (zero, s2) p = Gather (table, z) y = Add (x, p)"
    text = positioned(body).replace("int64 zero", "int64[1] two1 = {2}, int64 zero")
    assert left(text) == {"Add": 1}


def test_a_uniform_gather_that_enlarges_the_sum_stays() -> None:
    text = f"""agraph (float[2] x, int64[2] s) => (float[B, L, 2] y)
        <{TABLE}, int64 zero = {{0}}> {{
        z = Expand (zero, s) p = Gather (table, z) y = Add (x, p)
    }}"""
    feeds = {"x": np.ones(2, np.float32), "s": np.array([3, 4])}
    assert left(text, feeds)["Gather"] == 1


def test_a_condition_decided_by_counts_is_removed() -> None:
    body = "t = GreaterOrEqual (cols, zero) y = And (m, t)"
    assert left(masked(body, "bool[B, L] y")) == {"Identity": 1}


def test_a_true_condition_that_broadcasts_stays() -> None:
    body = "t = GreaterOrEqual (c, zero) y = And (t, m)"
    assert left(masked(body, "bool[1, 1, B, L] y"))["And"] == 1


# -- slices of views

PACKED = """agraph (float[B, L, 12] x) => (float[B, L, 4] q, float[B, L, 4] k, float[B, L, 4] v)
    <int64[5] apart = {0, 0, 3, 2, 2}, int64[3] back = {0, 0, 4}, int64[1] a = {0},
     int64[1] b = {1}, int64[1] c = {2}, int64[1] d = {3}, int64[1] axis = {2}>"""


def test_parts_of_the_last_axis_are_a_split() -> None:
    text = f"""{PACKED} {{
        p = Reshape (x, apart)
        s = Slice (p, a, b, axis)  q0 = Reshape (s, back)  q = Relu (q0)
        t = Slice (p, b, c, axis)  k0 = Reshape (t, back)  k = Relu (k0)
        u = Slice (p, c, d, axis)  v0 = Reshape (u, back)  v = Relu (v0)
    }}"""
    assert left(text) == {"Split": 1, "Relu": 3}


def test_two_slices_that_are_graph_outputs() -> None:
    text = """g (float[B, L, 8] x) => (float[B, L, 4] y, float[B, L, 4] u, float[B, L, 4] v)
        <int64[4] s = {0, 0, 2, 4}, int64 i = {0}, int64 j = {1}, int64 k = {-2}> {
        r = Reshape (x, s)
        y = Gather <axis = 2> (r, i) u = Gather <axis = 2> (r, k) v = Gather <axis = 2> (r, j)
    }"""
    assert left(text) == {"Split": 1, "Identity": 1}


def test_slices_that_do_not_cover_the_axis_stay() -> None:
    text = f"""{PACKED} {{
        p = Reshape (x, apart)
        s = Slice (p, a, b, axis)  q0 = Reshape (s, back)  q = Relu (q0)
        t = Slice (p, b, c, axis)  k0 = Reshape (t, back)  k = Relu (k0)
        v = Neg (k0)
    }}"""
    assert left(text)["Slice"] == 2


def test_parts_with_their_heads_apart_are_outputs_of_a_split() -> None:
    text = """agraph (float[B, L, 8] x) => (float[B, 2, L, 2] q, float[B, L, 4] k)
        <int64[5] apart = {0, 0, 2, 2, 2}, int64[3] back = {0, 0, 4}, int64 i = {0},
         int64 j = {1}> {
        p = Reshape (x, apart)
        s = Gather <axis = 2> (p, i)  q = Transpose <perm = [0, 2, 1, 3]> (s)
        t = Gather <axis = 2> (p, j)  k = Reshape (t, back)
    }"""
    assert left(text) == {"Split": 1, "Reshape": 1, "Transpose": 1}


def test_an_entry_of_a_transposed_axis() -> None:
    signature = "agraph (float[A, B, 3, C] x) => (float[A, B, C] y) <int64 i = {1}>"
    moved = f"{signature} {{ t = Transpose <perm = [2, 0, 1, 3]> (x) y = Gather (t, i) }}"
    assert left(moved) == {"Gather": 1}
    turned = moved.replace("[2, 0, 1, 3]", "[2, 1, 0, 3]").replace(
        "float[A, B, C]", "float[B, A, C]"
    )
    assert left(turned) == {"Transpose": 1, "Gather": 1}


def test_a_slice_of_a_concat_moves_before_elementwise_operators() -> None:
    signature = """agraph (float[B, 4] x) => (float[B, 1, 4] y)
        <int64[1] a = {0}, int64[1] b = {4}, int64[1] axis = {2}, int64[1] one = {1}>"""
    body = """j = Concat <axis = -1> (x, x)  c = Cos (j)  u = Unsqueeze (c, one)
        y = Slice (u, a, b, axis)"""
    assert left(f"{signature} {{ {body} }}") == {"Cos": 1, "Unsqueeze": 1}
    beside = f"{signature} {{ {body} }}".replace("{4}", "{3}").replace(
        "float[B, 1, 4]", "float[B, 1, 3]"
    )
    assert left(beside)["Slice"] == 1


def test_a_slice_of_a_value_with_other_users_stays() -> None:
    text = """agraph (float[B, 4] x) => (float[B, 4] y, float[B, 8] z)
        <int64[1] a = {0}, int64[1] b = {4}, int64[1] axis = {1}> {
        j = Concat <axis = -1> (x, x)  c = Cos (j)  y = Slice (c, a, b, axis)  z = Neg (c)
    }"""
    assert left(text)["Slice"] == 1


# -- other rewrites


def test_axes_that_are_inserted_permuted_and_removed() -> None:
    text = """agraph (float[A, B, C] x) => (float[C, A, B] y)
        <int64[1] front = {0}, int64[1] third = {2}> {
        u = Unsqueeze (x, front) t = Transpose <perm = [3, 1, 0, 2]> (u) y = Squeeze (t, third)
    }"""
    assert left(text) == {"Transpose": 1}
    other = text.replace("float[A, B, C] x", "float[1, B, C] x").replace(
        "float[C, A, B]", "float[C, 1, B]"
    )
    assert "Transpose" in left(other.replace("third = {2}", "third = {1}"))


def test_a_computed_shape_that_adds_an_axis() -> None:
    text = """agraph (float[A, B] x) => (float[A, 1, B] y) <int64[1] one = {1}> {
        a = Shape <start = 0, end = 1> (x)  b = Shape <start = 1, end = 2> (x)
        s = Concat <axis = 0> (a, one, b)  y = Reshape (x, s)
    }"""
    assert left(text) == {"Unsqueeze": 1}
    swapped = text.replace("(a, one, b)", "(b, one, a)").replace("float[A, 1, B]", "float[B, 1, A]")
    assert left(swapped)["Reshape"] == 1


def test_an_unsqueeze_of_leading_axes_before_broadcasting_is_removed() -> None:
    signature = "agraph (float[B, L] x, float[L] z) => (float[B, L] y) <int64[1] a = {0}>"
    assert left(f"{signature} {{ u = Unsqueeze (z, a) y = Add (x, u) }}") == {"Add": 1}
    alone = "agraph (float[L] x, float[L] z) => (float[1, L] y) <int64[1] a = {0}>"
    assert left(f"{alone} {{ u = Unsqueeze (z, a) y = Add (x, u) }}")["Unsqueeze"] == 1


def test_positions_counted_in_narrow_integers() -> None:
    text = """agraph (int64[B, L] x) => (int64[B, L] y) <int64 pad = {1}, int64 axis = {1}> {
        e = Equal (x, pad)  n = Not (e)  w = Cast <to = 7> (n)  t = CumSum (w, axis)
        t32 = Cast <to = 6> (t)  n32 = Cast <to = 6> (n)  m = Mul (t32, n32)  y = Cast <to = 7> (m)
    }"""
    found = left(text)
    assert (found["Cast"], found["Mul"]) == (1, 1)
    unknown = text.replace("w = Cast <to = 7> (n)", "w = Identity (x)")
    assert left(unknown)["Cast"] == 3


# -- groups of heads

GROUPS = """agraph (float[B, L, 12] x) => (float[B, L, 4, 2] q, float[{k}] k, float[B, L, 1, 2] v)
    <int64[4] heads = {{0, 0, 6, 2}}, int64[1] zero = {{0}}, int64[1] two = {{2}},
     int64[1] three = {{3}}, int64[1] last = {{-1}}, int64[1] before = {{-2}},
     int64[1, 1] row = {{-2}}, int64[2] pair = {{-2, 0}}> {{
    h = Reshape (x, heads) q = Slice (h, zero, before, two) {key} v = Gather <axis = 2> (h, {value})
}}"""


def groups(key: str, value: str = "last", k: str = "B, L, 1, 2") -> str:
    return GROUPS.format(key=key, value=value, k=k)


@pytest.mark.parametrize(
    "key",
    [
        "k = Gather <axis = 2> (h, before)",
        "k = Slice (h, before, last, two)",
        """t = Transpose <perm = [2, 0, 1, 3]> (h) r = GatherND (t, row)
        k = Transpose <perm = [1, 2, 0, 3]> (r)""",
    ],
)
def test_groups_of_heads_are_parts_of_a_split(key: str) -> None:
    found = left(groups(key))
    assert found["Split"] == 1
    assert found["Reshape"] + found["Unsqueeze"] == found.total() - 1 == 3


@pytest.mark.parametrize(
    ("key", "value", "heads"),
    [
        ("k = Slice (h, three, last, two)", "last", 2),  # some of the query's
        ("k = Slice (h, zero, two, two)", "last", 2),  # one is left out
        ("k = Gather <axis = 2> (h, pair)", "last", 2),  # not one behind the other
    ],
)
def test_other_groups_of_heads_stay(key: str, value: str, heads: int) -> None:
    assert not left(groups(key, value, f"B, L, {heads}, 2"))["Split"]


def test_gather_nd_of_rows_is_a_gather() -> None:
    signature = "agraph (float[4, B] x) => (float[1, B] y) <int64[1, 1] row = {-2}>"
    assert left(f"{signature} {{ y = GatherND (x, row) }}") == {"Gather": 1}


def test_gather_nd_of_elements_stays() -> None:
    signature = "agraph (float[4, B] x) => (float[1] y) <int64[1, 2] pair = {-2, 0}>"
    assert left(f"{signature} {{ y = GatherND (x, pair) }}") == {"GatherND": 1}
    batched = "agraph (float[2, 4, B] x) => (float[2, B] y) <int64[2, 1] at = {1, 3}>"
    assert left(f"{batched} {{ y = GatherND <batch_dims = 1> (x, at) }}") == {"GatherND": 1}


# -- slices by sizes

TAIL = """agraph (float[512] x, float[L] z) => (float[M] y) <int64[1] zero = {{0}},
    int64[1] end = {{9223372036854775807}}, int64[1] minus = {{-1}}, int64[1] two = {{2}}> {{
    l = Shape (z) head = Slice (x, zero, l) n = Mul (l, minus) {} y = Slice (head, {}, end)
}}"""


def test_the_last_elements_as_many_as_there_are_at_most() -> None:
    assert left(TAIL.format("", "n")) == {"Shape": 1, "Slice": 1}


def test_less_than_there_are_stay() -> None:
    assert left(TAIL.format("s = Add (n, two)", "s"))["Slice"] == 2


def test_slices_that_are_graph_outputs_become_a_split() -> None:
    text = """agraph (float[B, L, 6] x) => (float[B, L, 3] y, float[B, L, 3] z)
        <int64[4] apart = {0, 0, 2, 3}, int64 zero = {0}, int64 one = {1}> {
        h = Reshape (x, apart) y = Gather <axis = 2> (h, zero) z = Gather <axis = 2> (h, one)
    }"""
    assert left(text) == {"Split": 1}


def test_one_index_by_gather_nd_is_a_gather() -> None:
    text = """agraph (float[5, 3] x, int64[B, L] i) => (float[B, L, 3] y) <int64[1] last = {-1}> {
        at = Unsqueeze (i, last)  y = GatherND (x, at)
    }"""
    at = np.array([[0, -1, 4], [2, 2, -5]])
    given = {"x": np.arange(15, dtype=np.float32).reshape(5, 3), "i": at}
    assert left(text, given) == {"Gather": 1}


def test_gather_nd_by_an_index_for_each_row_stays() -> None:
    text = """agraph (float[5, 3] x, int64[5] i) => (float[5] y) <int64[1] last = {-1}> {
        at = Unsqueeze (i, last)  y = GatherND <batch_dims = 1> (x, at)
    }"""
    given = {"x": np.arange(15, dtype=np.float32).reshape(5, 3), "i": np.array([0, 2, 1, 1, 0])}
    assert left(text, given)["GatherND"] == 1


def test_gather_nd_by_one_index_for_several_axes_stays() -> None:
    text = """agraph (float[5, 3] x, int64[2] i) => (float[1] y) <int64[1] first = {0}> {
        at = Unsqueeze (i, first)  y = GatherND (x, at)
    }"""
    given = {"x": np.arange(15, dtype=np.float32).reshape(5, 3), "i": np.array([4, 1])}
    assert left(text, given)["GatherND"] == 1


ROWS = """agraph (float[B, 2, S, 5] x) => (float[B, 2, S, 5] y) {
    f = Flatten <axis = 3> (x)  p = Softmax <axis = -1> (f)  s = Shape (x)  y = Reshape (p, s)
}"""


def test_a_softmax_of_flattened_rows() -> None:
    """The conversion of a Softmax of opset 11 looks like this."""
    assert left(ROWS) == {"Softmax": 1}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Flatten <axis = 3>", "Flatten <axis = 2>"),
        ("Softmax <axis = -1>", "Softmax <axis = 0>"),
        ("s = Shape (x)", "t = Transpose <perm = [0, 2, 1, 3]> (x) s = Shape (t)"),
    ],
    ids=["rows of several rows", "columns", "put back otherwise"],
)
def test_other_softmaxes_of_matrices_stay(old: str, new: str) -> None:
    text = ROWS.replace(old, new)
    if "Transpose" in new:
        text = text.replace("=> (float[B, 2, S, 5] y)", "=> (float[B, S, 2, 5] y)")
    assert left(text)["Flatten"] == 1


# -- tables that are expanded

CUT_TABLE = """agraph (float[B, L, {width}] x, float[8, 3] t) => (float[B, L, 3] y)
    <int64[1] a0 = {{0}}, int64[1] last = {{3}}> {{
    b = Shape <start = 0, end = 1> (x) l = Shape <start = 1, end = 2> (x)
    p0 = Slice (t, a0, l, a0) p = Unsqueeze (p0, a0) s = Concat <axis = 0> (b, l, last)
    e = Expand (p, s) y = {node}
}}"""


def cut_table(width: int, node: str = "Add (x, e)") -> Counter[str]:
    feed = {"x": np.ones((2, 4, width), np.float32), "t": np.ones((8, 3), np.float32)}
    return left(CUT_TABLE.format(width=width, node=node), feed)


def test_a_redundant_expand_of_a_table_sliced_to_the_length_is_removed() -> None:
    """The table has min(8, L) rows; the model fails unless that is L."""
    assert cut_table(3) == {"Shape": 1, "Slice": 1, "Unsqueeze": 1, "Add": 1}


@pytest.mark.parametrize(("width", "node"), [(1, "Add (x, e)"), (3, "Add (e, e)")])
def test_an_expand_beyond_the_other_operand_stays(width: int, node: str) -> None:
    assert cut_table(width, node)["Expand"] == 1


# -- indices that count from the end

FROM_THE_END = """agraph (int32[N, S] i) => (float[N, S, 2] y)
    <float[3, 2] table = {1, 2, 3, 4, 5, 6}, int32 zero = {0}, float none = {0},
     int32 rows = {3}, int32 fewer = {2}> {
    NEGATIVE  e = Add (i, rows)  at = Where (n, e, i)  y = Gather (table, at) }"""
SIGNS = {"i": np.array([[0, -1, 2, -3]], np.int32)}


@pytest.mark.parametrize(
    "negative", ["n = Less (i, zero)", "f = Cast <to = 1> (i) n = Less (f, none)"]
)
def test_a_gather_from_the_end_takes_the_negative_index(negative: str) -> None:
    """TensorFlow exports an embedding like this."""
    assert left(FROM_THE_END.replace("NEGATIVE", negative), SIGNS) == {"Gather": 1}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Add (i, rows)", "Add (i, fewer)"),
        ("Less (i, zero)", "Less (i, rows)"),
        ("Where (n, e, i)", "Where (n, i, e)"),
    ],
)
def test_other_choices_of_an_index_stay(old: str, new: str) -> None:
    text = FROM_THE_END.replace("NEGATIVE", "n = Less (i, zero)").replace(old, new)
    feed = {"i": np.array([[-3, -2, -1]], np.int32)}
    check(Cleanup(), text, near_miss=True, inputs=feed)


def test_a_slice_to_a_huge_end_is_removed() -> None:
    """TensorFlow's exporter writes a Slice to the end of an axis like this."""
    text = """agraph (float[N] x) => (float[N] y) <int64[1] zero = {0}, int64[1] end = {LAST}> {
        a = Slice (x, zero, end)  y = Exp (a) }"""
    assert left(text.replace("LAST", "1000000000")) == {"Exp": 1}
    check(Cleanup(), text.replace("LAST", "999999999"), near_miss=True)
