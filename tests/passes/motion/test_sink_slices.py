"""`rows`: operators that compute selected rows alone, and near misses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from onnx import ModelProto, NodeProto, helper, numpy_helper

from passes.analysis.shapes import Shapes
from passes.motion.sink_slices import Rows, region
from passes.motion.sink_slices.find_slices import SELECTING
from tests import ort
from tests.checks import assert_rollback, assert_same_outputs, check, knowledge, parse, written
from tests.passes.test_random_graphs import INFORMED, assume_it_runs, run, steady
from tests.random_graphs import Step, build, feeds
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.pass_manager.registry import parse_passes
from toolkit.rewriting.match_failure import NearMisses
from toolkit.settings import Settings
from toolkit.symbolic import minimum, symbol

HEADER = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'


@dataclass(frozen=True, slots=True)
class Ready:
    """The pass on a model whose shapes are known."""

    def run(self, model: Model, ctx: Context) -> None:
        Shapes(annotate=False).run(model, ctx)
        Rows().run(model, ctx)


def graph(
    nodes: str,
    inputs: str = "float[B, L, 4] x",
    outputs: str = "float[B, 4] y",
    stored: str = "",
) -> str:
    weights = """float[4, 4] w = {1, 2, 3, 4, -1, 0, 2, 1, 0, 1, 0, -2, 3, 1, 1, 0},
        float[4] b = {1, -2, 3, 0.5}, int64 first = {0}, int64[1] one = {0}, int64 last = {-1}"""
    kept = f"{weights}, {stored}" if stored else weights
    return f"{HEADER} agraph ({inputs}) => ({outputs}) <{kept}> {{ {nodes} }}"


def sizes(model: Model, op_type: str) -> list[Any]:
    """The shapes that nodes of one kind make."""
    g = model.graph
    return [g.shape(node.output[0]) for node in g.nodes if node.op_type == op_type]


def few(model: Model, op_type: str, axis: int = 1) -> bool:
    """Whether nodes of one kind make one row each."""
    return all(shape is not None and shape[axis] == 1 for shape in sizes(model, op_type))


def moves(text: str, after: str | None = None, **more: Any) -> Model:
    return check(Ready(), text, after, **more)


def stays(text: str, **more: Any) -> None:
    check(Ready(), text, near_miss=True, **more)


# -- selections


def test_a_linear_map_is_of_one_row() -> None:
    moves(
        graph("m = MatMul (x, w) a = Add (m, b) y = Gather <axis = 1> (a, first)"),
        graph("""c = Gather <axis = 1> (x, one) m = MatMul (c, w) a = Add (m, b)
                 i = Constant <value_ints = [1]> () y = Squeeze (a, i)"""),
    )


def test_a_list_keeps_its_axis() -> None:
    moves(
        graph("m = MatMul (x, w) y = Gather <axis = 1> (m, one)", outputs="float[B, 1, 4] y"),
        graph("c = Gather <axis = 1> (x, one) y = MatMul (c, w)", outputs="float[B, 1, 4] y"),
    )


@pytest.mark.parametrize(
    ("selection", "stored", "rows"),
    [
        ("Gather <axis = 1> (m, i)", "int64[2] i = {0, 2}", 2),
        ("Gather <axis = -2> (m, i)", "int64[1] i = {-2}", 1),
        ("Slice (m, s, e, a)", "int64[1] s = {0}, int64[1] e = {1}, int64[1] a = {1}", 1),
        ("Slice (m, s, e, a)", "int64[1] s = {-1}, int64[1] e = {9223372036854775807}, "
         "int64[1] a = {-2}", 1),
        ("Slice (m, s, e, a, t)", "int32[1] s = {0}, int32[1] e = {2}, int32[1] a = {1}, "
         "int32[1] t = {1}", 2),
    ],
)  # fmt: skip
def test_other_selections(selection: str, stored: str, rows: int) -> None:
    text = graph(f"m = MatMul (x, w) y = {selection}", outputs="float[B, N, 4] y")
    text = text.replace("int64 last", f"{stored}, int64 last")
    found = moves(text, inputs={"x": np.random.default_rng(0).random((2, 5, 4), np.float32)})
    [shape] = sizes(found, "MatMul")
    assert shape[1] in (rows, minimum(rows, symbol("L")))


def test_an_index_may_be_computed() -> None:
    found = moves(
        graph("m = MatMul (x, w) y = Gather <axis = 1> (m, i)", inputs="float[B, L, 4] x, int64 i"),
        inputs={"x": np.arange(24, dtype=np.float32).reshape(2, 3, 4), "i": np.array(-2)},
    )
    assert few(found, "MatMul")


ONE_EACH = "int64[B] i"
GIVEN = {"x": np.arange(24, dtype=np.float32).reshape(2, 3, 4), "i": np.array([2, 0])}
COUNTED = """
    batch = Shape <start = 0, end = 1> (x) count = Squeeze (batch)
    zero = Constant <value_int = 0> () step = Constant <value_int = 1> ()
    order = Range (zero, count, step) behind = Constant <value_ints = [1]> ()
"""
PLACES = f"{COUNTED} left = Unsqueeze (order, behind) right = Unsqueeze (i, behind)"


def test_one_row_for_each_of_the_batch() -> None:
    text = graph(
        f"{PLACES} p = Concat <axis = -1> (left, right) m = MatMul (x, w) y = GatherND (m, p)",
        inputs=f"float[B, L, 4] x, {ONE_EACH}",
    )
    found = moves(text, inputs=GIVEN)
    assert few(found, "MatMul")
    for index in ([0, -1], [-3, 1]):
        assert_same_outputs(parse(text), found, [{**GIVEN, "i": np.array(index)}])


def test_one_row_for_each_by_a_batch_of_indices() -> None:
    found = moves(
        graph(
            "m = MatMul (x, w) y = GatherND <batch_dims = 1> (m, i)",
            inputs="float[B, L, 4] x, int64[B, 1] i",
        ),
        inputs={"x": GIVEN["x"], "i": GIVEN["i"].reshape(2, 1)},
    )
    assert few(found, "MatMul")


FLAT = f"""{COUNTED} l = Shape <start = 1, end = 2> (x) t = Mul (order, l) p = Add (t, i)
    m = MatMul (x, w) f = Flatten <axis = 2> (m) y = Gather (f, p)"""


def test_rows_of_a_batch_that_was_laid_out_flat() -> None:
    text = graph(f"i = ArgMax <axis = 1, keepdims = 0> (k) {FLAT}",
                 inputs="float[B, L, 4] x, float[B, L] k")  # fmt: skip
    found = moves(text)
    assert few(found, "MatMul")


def test_the_same_selection_twice_is_one() -> None:
    text = graph(
        """m = MatMul (x, w) r = Relu (m)
           y = Gather <axis = 1> (r, first) z = Gather <axis = 1> (r, one)""",
        outputs="float[B, 4] y, float[B, 1, 4] z",
    )
    assert few(moves(text), "MatMul")


def test_different_entries_are_selected_together() -> None:
    text = graph(
        """i = Constant <value_int = 3> () m = MatMul (x, w) r = Relu (m)
           y = Gather <axis = 1> (r, i) z = Gather <axis = 1> (r, one)""",
        outputs="float[B, 4] y, float[B, 1, 4] z",
    )
    found = moves(text, inputs={"x": np.random.default_rng(0).random((2, 5, 4), np.float32)})
    assert sizes(found, "MatMul") == [(symbol("B"), 2, 4)]
    stays(text.replace("B, L, 4", "B, 3, 4").replace("int = 3", "int = 2"))  # most of them


@pytest.mark.parametrize(
    "nodes",
    [
        # a row twice, or in an order that may repeat one at some sizes
        "i = Constant <value_ints = [0, 0]> () m = MatMul (x, w) y = Gather <axis = 1> (m, i)",
        "i = Constant <value_ints = [0, -1]> () m = MatMul (x, w) y = Gather <axis = 1> (m, i)",
        # all rows but one
        """s = Constant <value_ints = [1]> () e = Constant <value_ints = [9223372036854775807]> ()
           m = MatMul (x, w) y = Slice (m, s, e, s)""",
        # rows that may not be there
        """s = Constant <value_ints = [2]> () e = Constant <value_ints = [3]> ()
           a = Constant <value_ints = [1]> () m = MatMul (x, w) y = Slice (m, s, e, a)""",
        # along two axes
        """s = Constant <value_ints = [0, 0]> () e = Constant <value_ints = [1, 1]> ()
           a = Constant <value_ints = [1, 2]> () m = MatMul (x, w) y = Slice (m, s, e, a)""",
        # more axes than there were
        "i = Constant <value = int64[1, 1] {0}> () m = MatMul (x, w) y = Gather <axis = 1> (m, i)",
    ],
)
def test_no_selection_of_few_rows(nodes: str) -> None:
    more = ", 4" if "int64[1, 1]" in nodes else ""
    stays(graph(nodes, outputs=f"float[B, N, M{more}] y"))


def test_more_than_half_of_a_known_number() -> None:
    picks = "i = Constant <value_ints = [0, 1]> () m = MatMul (x, w) y = Gather <axis = 1> (m, i)"
    out = "float[B, 2, 4] y"
    stays(graph(picks, inputs="float[B, 3, 4] x", outputs=out))
    moves(graph(picks, inputs="float[B, 4, 4] x", outputs=out))


@pytest.mark.parametrize(
    "nodes",
    [
        # not known to be in range: a row of another entry of the batch
        FLAT,
        # not the batch in order
        f"""{PLACES} p = Concat <axis = -1> (right, left) m = MatMul (x, w) y = GatherND (m, p)""",
        # another stride than the number of rows
        FLAT.replace("Mul (order, l)", "Mul (order, step)").replace(
            "p = Add (t, i)", "h = ArgMax <axis = 1, keepdims = 0> (k) p = Add (t, h)"
        ),
    ],
)
def test_no_row_for_each_of_the_batch(nodes: str) -> None:
    given = {**GIVEN, "k": np.zeros((2, 3), np.float32), "i": np.array([1, 0])}
    inputs = f"float[B, L, 4] x, {ONE_EACH}, float[B, L] k"
    stays(graph(nodes, inputs=inputs, outputs="float[N, 4] y"), inputs=given)


def test_a_row_that_is_not_there_is_still_an_error() -> None:
    text = graph("i = Constant <value_int = 5> () m = MatMul (x, w) y = Gather <axis = 1> (m, i)")
    found = moves(text, inputs={"x": np.ones((1, 6, 4), np.float32)})
    session = ort.session(found.to_proto())
    for rows in (0, 5):
        with pytest.raises(Exception, match="indices"):
            session.run(None, {"x": np.ones((1, rows, 4), np.float32)})


# -- operators that selections move above


LAYER = """
    q0 = MatMul (x, w) q = Add (q0, b) k = MatMul (x, w) v = MatMul (x, w)
    a = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v{mask})
    o = MatMul (a, w) r = Add (o, x) n = LayerNormalization (r, b, b)
    f = MatMul (n, w) g = Gelu (f) h = MatMul (g, w) s = Add (h, n)
    t = LayerNormalization (s, b, b)
"""
MASKED = LAYER.format(mask=", mask")
PLAIN = LAYER.format(mask="")


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 2), (4, 5)])
def test_a_layer(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).standard_normal((*shape, 4), np.float32)
    text = graph(f"{PLAIN} y = Gather <axis = 1> (t, first)")
    found = moves(text, inputs={"x": x})
    kinds = Counter(node.op_type for node in found.graph.nodes)
    assert (kinds["Gather"], kinds["MatMul"], kinds["Attention"]) == (1, 6, 1)
    assert [shape[1] == 1 for shape in sizes(found, "MatMul")].count(False) == 2  # key and value
    assert few(found, "Attention")
    assert few(found, "LayerNormalization")
    assert few(found, "Gelu")


def attended(mask: str, nodes: str = "", cut: str = "Gather <axis = 1> (t, first)") -> str:
    inputs = f"float[B, L, 4] x, {mask}, int64[B] i"
    return graph(f"{nodes} {MASKED} y = {cut}", inputs=inputs)


def fed(**masks: Any) -> dict[str, Any]:
    x = np.random.default_rng(1).standard_normal((2, 3, 4), np.float32)
    return {"x": x, "i": np.array([2, 0]), **masks}


EACH = f"{PLACES} p = Concat <axis = -1> (left, right)"
CUTS = ["Gather <axis = 1> (t, first)", "Gather <axis = 1> (t, last)", "GatherND (t, p)"]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shape", [("L", "L"), (1, 1, "L", "L"), ("B", 1, "L", "L")])
@pytest.mark.parametrize("kind", ["float", "bool"])
def test_rows_of_a_mask(cut: str, shape: tuple[str | int, ...], kind: str) -> None:
    mask = f"{kind}[{', '.join(map(str, shape))}] mask"
    numbers = np.random.default_rng(0).random([{"B": 2, "L": 3}.get(str(d), 1) for d in shape])
    value = numbers < 0.7 if kind == "bool" else numbers.astype(np.float32)
    if kind == "bool":
        value[..., 1] = True  # nothing is masked as a whole
    found = moves(attended(mask, EACH if "ND" in cut else "", cut), inputs=fed(mask=value))
    assert few(found, "Attention")


def test_one_mask_for_all_rows_needs_no_selection() -> None:
    spread = "s4 = Constant <value_ints = [1, 1, 3, 1]> () mask = Expand (short, s4)"
    text = attended("float[B, 1, 1, 3] short", spread).replace("float[B, L, 4]", "float[B, 3, 4]")
    found = moves(text, inputs=fed(short=np.ones((2, 1, 1, 3), np.float32)))
    kinds = Counter(node.op_type for node in found.graph.nodes)
    assert (kinds["Gather"], kinds["Expand"]) == (1, 0)


def test_a_mask_with_heads_has_no_row_for_each_of_the_batch() -> None:
    value = np.random.default_rng(0).random((2, 2, 3, 3)).astype(np.float32)
    text = attended("float[B, 2, L, L] mask", EACH, "GatherND (t, p)")
    found = moves(text, inputs=fed(mask=value))
    assert few(found, "Gelu")
    assert not few(found, "Attention")


@pytest.mark.parametrize(
    "change",
    [
        ("kv_num_heads = 2", "kv_num_heads = 2, is_causal = 1"),
        ("a = Attention", "a, present = Attention"),
    ],
)
def test_an_attention_that_needs_all_rows(change: tuple[str, str]) -> None:
    more = "past = Constant <value = float[2, 2, 1, 2] {0, 1, 2, 3, 4, 5, 6, 7}> ()"
    nodes = PLAIN.replace(*change)
    outputs = "float[2, 4] y"
    if "present" in change[1]:
        nodes = nodes.replace("(q, k, v)", "(q, k, v, , past, past)").replace(
            "a, present", "a, present, other"
        )
        nodes, outputs = f"{more} {nodes}", "float[2, 4] y, float[2, 2, M, 2] present"
    text = graph(f"{nodes} y = Gather <axis = 1> (t, first)", "float[2, 3, 4] x", outputs)
    found = moves(text)
    assert few(found, "Gelu")
    assert not few(found, "Attention")


CAUSAL = "a = Attention <q_num_heads = 2, kv_num_heads = 2, is_causal = 1> (q, {kv}, {kv})"
END = "s = Constant <value_ints = [-1]> () e = Constant <value_ints = [9223372036854775807]> ()"


@pytest.mark.parametrize("cut", ["Gather <axis = 1> (a, last)", "Slice (a, s, e, at)"])
def test_the_last_row_of_a_causal_attention_reads_all_keys(cut: str) -> None:
    nodes = f"q = MatMul (x, w) {CAUSAL.format(kv='x')} {END} y0 = {cut} y = Relu (y0)"
    out = "float[B, 4] y" if "last" in cut else "float[B, N, 4] y"
    found = moves(graph(nodes, outputs=out, stored="int64[1] at = {1}"))
    [node] = [node for node in found.graph.nodes if node.op_type == "Attention"]
    assert "is_causal" not in {attribute.name for attribute in node.attribute}


@pytest.mark.parametrize(
    ("cut", "keys"),
    [("Gather <axis = 1> (a, first)", "x"), ("Gather <axis = 1> (a, last)", "k")],
)
def test_other_rows_of_a_causal_attention(cut: str, keys: str) -> None:
    """Only the last of as many queries as keys attends to all keys."""
    nodes = f"q = MatMul (x, w) {CAUSAL.format(kv=keys)} y = {cut}"
    inputs = "float[B, L, 4] x, float[B, K, 4] k"
    random = np.random.default_rng(0)
    given = {"x": random.random((2, 3, 4), np.float32), "k": random.random((2, 5, 4), np.float32)}
    stays(graph(nodes, inputs=inputs), inputs=given)


def test_the_last_rows_of_a_causal_attention_from_the_back() -> None:
    nodes = f"q = MatMul (x, w) {CAUSAL.format(kv='x')} y = Slice (a, s, e, at, s)"
    stored = "int64[1] at = {1}, int64[1] s = {-1}, int64[1] e = {-3}"
    stays(graph(nodes, "float[B, 6, 4] x", "float[B, 2, 4] y", stored))


def test_decomposed_attention() -> None:
    nodes = """q = MatMul (x, w) k = Transpose <perm = [0, 2, 1]> (x) s = MatMul (q, k)
        p = Softmax (s) a = MatMul (p, x) y = Gather <axis = 1> (a, first)"""
    found = moves(graph(nodes))
    assert few(found, "MatMul")
    assert few(found, "Softmax")


PACKED = """
    m = MatMul (x, w3) {bias} q, k, v = Split <axis = 2, num_outputs = 3> ({all})
    a = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v)
"""
W3 = f"float[4, 12] w3 = {{{', '.join(str(i % 7 - 3) for i in range(48))}}}"
B3 = f"float[12] b3 = {{{', '.join(map(str, range(12)))}}}"
BIASED = PACKED.format(bias="p = Add (b3, m)", all="p")
UNBIASED = PACKED.format(bias="", all="m")
APART = {(symbol("B"), 1, 4), (symbol("B"), symbol("L"), 8)}


@pytest.mark.parametrize("nodes", [BIASED, UNBIASED])
def test_a_query_that_comes_with_key_and_value(nodes: str) -> None:
    text = graph(f"{nodes} y = Gather <axis = 1> (a, first)", stored=f"{W3}, {B3}")
    assert set(sizes(moves(text), "MatMul")) == APART


def test_a_query_of_which_each_of_the_batch_has_one_row() -> None:
    nodes = f"{EACH} {UNBIASED} y = GatherND (a, p)"
    found = moves(graph(nodes, "float[B, L, 4] x, int64[B] i", stored=W3), inputs=fed())
    assert set(sizes(found, "MatMul")) == APART


def test_weights_that_are_read_elsewhere_are_not_taken_apart() -> None:
    nodes = f"{BIASED} y = Gather <axis = 1> (a, first) z = MatMul (x, w3)"
    outputs = "float[B, 4] y, float[B, L, 12] z"
    found = moves(graph(nodes, outputs=outputs, stored=f"{W3}, {B3}"))
    assert few(found, "Attention")
    assert sizes(found, "MatMul") == [(symbol("B"), symbol("L"), 12)] * 2


def test_parts_that_are_all_read_by_rows_or_all_as_a_whole() -> None:
    parts = "m = MatMul (x, w3) q, k, v = Split <axis = 2, num_outputs = 3> (m)"
    stays(graph(f"{parts} y = Sum (q, k, v)", outputs="float[B, L, 4] y", stored=W3))
    summed = f"{parts} s = Sum (q, k, v) y = Gather <axis = 1> (s, first)"
    assert sizes(moves(graph(summed, stored=W3)), "MatMul") == [(symbol("B"), 1, 12)]


ROTATED = """
    q = MatMul (x, w) e = RotaryEmbedding <num_heads = 2> (q, c, s{at})
    k = MatMul (x, w) a = Attention <q_num_heads = 2, kv_num_heads = 2> (e, k, k)
"""


@pytest.mark.parametrize(
    ("angles", "at"),
    [
        ("float[B, L, 1] c, float[B, L, 1] s", ""),
        ("float[9, 1] c, float[9, 1] s, int64[B, L] at", ", at"),
    ],
)
@pytest.mark.parametrize("cut", ["Gather <axis = 1> (a, last)", "GatherND (a, p)"])
def test_a_rotary_embedding(angles: str, at: str, cut: str) -> None:
    nodes = ROTATED.format(at=at) + (EACH if "ND" in cut else "")
    text = graph(f"{nodes} y = {cut}", inputs=f"float[B, L, 4] x, {angles}, int64[B] i")
    shape = (9, 1) if at else (2, 3, 1)
    given = {name: np.random.default_rng(0).random(shape).astype(np.float32) for name in "cs"}
    if at:
        given["at"] = np.array([[3, 1, 2], [8, 0, 5]])
    assert few(moves(text, inputs=fed(**given)), "RotaryEmbedding")


MULTI = "com.microsoft.MultiHeadAttention <num_heads = 2{}> (q, x, x, , {})"


@pytest.mark.parametrize(
    ("mask", "shape", "slots"),
    [
        ("int32[B, L] mask", (2, 3), "mask"),
        ("int32[B, L, L] mask", (2, 3, 3), "mask"),
        ("float[1, 1, L, L] mask", (1, 1, 3, 3), ", mask"),
    ],
)
def test_the_contributed_attention(mask: str, shape: tuple[int, ...], slots: str) -> None:
    given = np.ones(shape, np.int32 if mask.startswith("int") else np.float32)
    nodes = f"q = MatMul (x, w) a = {MULTI.format('', slots)} y = Gather <axis = 1> (a, last)"
    inputs = f"float[B, L, 4] x, {mask}, int64[B] i"
    found = moves(graph(nodes, inputs=inputs), inputs=fed(mask=given))
    assert few(found, "MultiHeadAttention")


def test_a_contributed_attention_that_is_causal() -> None:
    causal = MULTI.format(", unidirectional = 1", "")
    stays(graph(f"q = MatMul (x, w) a = {causal} y = Gather <axis = 1> (a, last)"))


BEHIND = [
    "y0 = Relu (m)",
    "y0 = Add (m, x)",
    "y0 = Mul (m, m)",
    "c = Greater (m, x) y0 = Where (c, x, b)",
    "y0 = Softmax (m)",
    "y0 = LayerNormalization (m, b)",
    "y0 = RMSNormalization (m, b)",
    "a = Constant <value_ints = [-1]> () n = ReduceMean (m, a) y0 = Sub (m, n)",
    "n = ReduceMax <keepdims = 0> (m, axes1) k = Unsqueeze (n, axes1) y0 = Sub (m, k)",
    "u, v = Split <axis = 2, num_outputs = 2> (m) y0 = Concat <axis = 2> (v, u)",
    "s = Constant <value_ints = [1]> () e = Constant <value_ints = [3]> () "
    "u = Slice (m, s, e, axes1) y0 = Concat <axis = 2> (u, u)",
    "j = Constant <value_ints = [3, 1, 0, 0]> () y0 = Gather <axis = -1> (m, j)",
    "u = Unsqueeze (m, one) v = Relu (u) y0 = Squeeze (v, one)",
    "h = Constant <value_ints = [0, 0, 2, 2]> () u = Reshape (m, h) k = Relu (u) "
    "z = Constant <value_ints = [0, 0, -1]> () y0 = Reshape (k, z)",
    "h = Constant <value_ints = [-1, 3, 2, 2]> () u = Reshape <allowzero = 1> (m, h) k = Relu (u) "
    "z = Constant <value_ints = [-1, 3, 4]> () y0 = Reshape <allowzero = 1> (k, z)",
    "t = Transpose <perm = [1, 0, 2]> (m) k = Relu (t) y0 = Transpose <perm = [1, 0, 2]> (k)",
    "s = Constant <value_float = 0.1> () z = Constant <value = int8 {3}> () "
    "u = QuantizeLinear (m, s, z) y0 = DequantizeLinear (u, s, z)",
    "u = Cast <to = 11> (m) y0 = Cast <to = 1> (u)",
    "y0 = com.microsoft.BiasGelu (m, b)",
    "y0 = com.microsoft.QuickGelu <alpha = 1.0> (m)",
]


@pytest.mark.parametrize("nodes", BEHIND)
def test_operators_that_work_on_each_row(nodes: str) -> None:
    text = graph(f"m = MatMul (x, w) {nodes} y = Gather <axis = 1> (y0, last)",
                 "float[B, 3, 4] x" if "-1, 3" in nodes else "float[B, L, 4] x",
                 stored="int64[1] axes1 = {2}")  # fmt: skip
    found = moves(text, atol=1e-5)
    assert few(found, "MatMul")


BETWEEN = [
    "y0 = Softmax <axis = 1> (m)",
    "y0 = LogSoftmax <axis = -2> (m)",
    "y0 = LayerNormalization <axis = 1> (m, k)",
    "a = Constant <value_ints = [1]> () n = ReduceMean (m, a) y0 = Sub (m, n)",
    "n = ReduceMax (m) y0 = Sub (m, n)",
    "y0 = Concat <axis = 1> (m, x)",
    "u, y0 = Split <axis = 1, num_outputs = 2> (m)",
    "a = Constant <value_int = 1> () y0 = CumSum (m, a)",
    "s = Constant <value_ints = [1]> () e = Constant <value_ints = [3]> () y0 = Slice (m, s, e, s)",
    "j = Constant <value = int64[3] {2, 1, 0}> () y0 = Gather <axis = 1> (m, j)",
    "z = Constant <value_ints = [0, 4, 3]> () u = Reshape (m, z) "
    "y0 = Transpose <perm = [0, 2, 1]> (u)",
    "y0 = MatMul (w3, m)",
    "t = Transpose <perm = [0, 2, 1]> (m) u = MatMul (w, t) y0 = Transpose <perm = [0, 2, 1]> (u)",
    "i, j, k2 = DynamicQuantizeLinear (m) y0 = DequantizeLinear (i, j, k2)",
    "y0 = Dropout (m, half, yes)",
    "y0 = Trilu (m)",
]


@pytest.mark.parametrize("nodes", BETWEEN)
def test_operators_that_need_all_rows(nodes: str) -> None:
    stored = (
        "float half = {0.0}, bool yes = {1}, float[3, 4] k = {1,2,3,4,5,6,7,8,9,1,2,3}, "
        "float[3, 3] w3 = {1,2,3,4,5,6,7,8,9}"
    )
    text = graph(f"m = MatMul (x, w) {nodes} y = Gather <axis = 1> (y0, first)",
                 inputs="float[2, 3, 4] x", outputs="float[2, 4] y", stored=stored)  # fmt: skip
    stays(text, run="Dropout" not in nodes)


def test_rows_of_a_table_of_words() -> None:
    """The index has rows, the table has others."""
    nodes = "e = Gather (w, x) m = MatMul (e, w) y = Gather <axis = 1> (m, last)"
    given = {"x": np.array([[0, 1, 3], [2, 2, 1]])}
    found = moves(graph(nodes, inputs="int64[B, L] x"), inputs=given)
    assert few(found, "MatMul")
    assert sizes(found, "Gather")[0] == (symbol("B"), 1)


def test_operators_that_mix_the_batch() -> None:
    """Rows of one entry of the batch would be added to other rows of another."""
    for mixing in (
        "a = Constant <value_ints = [0]> () s = ReduceSum (m, a) n = Add (s, x)",
        "n = Softmax <axis = 0> (m)",
    ):
        nodes = f"m = MatMul (x, w) {mixing} {EACH} y = GatherND (n, p)"
        stays(graph(nodes, inputs="float[B, L, 4] x, int64[B] i"), inputs=fed())
        moves(graph(f"m = MatMul (x, w) {mixing} y = Gather <axis = 1> (n, first)"))


MOVED = [
    "h = Constant <value_ints = [0, 0, 2, 2]> () u = Reshape (m, h) "
    "t = Transpose <perm = [0, 2, 1, 3]> (u) s = Softmax (t) "
    "r = Transpose <perm = [0, 2, 1, 3]> (s) n = Reshape (r, back)",
    "u = Unsqueeze (m, two) t = Relu (u) n = Squeeze (t, two)",
    "u = Unsqueeze (m, behind) t = Relu (u) n = Squeeze (t, behind)",
    "t = Transpose <perm = [0, 2, 1]> (m) r = Relu (t) n = Transpose <perm = [0, 2, 1]> (r)",
    "t = Transpose <perm = [1, 0, 2]> (m) r = Relu (t) n = Transpose <perm = [1, 0, 2]> (r)",
]


@pytest.mark.parametrize("batch", ["1", "B"])
@pytest.mark.parametrize("views", MOVED)
def test_one_row_for_each_behind_views(views: str, batch: str) -> None:
    """Selections move above some views only; with a batch of one, axes are ambiguous."""
    nodes = f"""c = MatMul (x, w) m = MatMul (c, w) {PLACES} {views} k = MatMul (n, w)
        p = Concat <axis = -1> (left, right) y = GatherND (k, p)"""
    stored = "int64[1] two = {2}, int64[3] back = {0, 0, 4}"
    inputs = f"float[{batch}, 3, 4] x, int64[{batch}] i"
    text = graph(nodes, inputs, f"float[{batch}, 4] y", stored)
    every = fed()
    given = every if batch == "B" else {"x": every["x"][:1], "i": every["i"][:1]}
    assert sizes(moves(text, inputs=given), "MatMul")[-1][1] == 1


def test_rows_of_what_is_the_same_for_the_batch() -> None:
    """Where the table is part of it, each entry of the batch takes a row of its own."""
    nodes = f"""t = Relu (table) h = Constant <value_ints = [1, 3, 2, 2]> () u = Reshape (t, h)
        z = Constant <value_ints = [1, 3, 4]> () v = Reshape (u, z)
        c = Add (x, v) d = Add (c, row) e = Add (d, flat) m = MatMul (e, w)
        {EACH} y = GatherND (m, p)"""
    inputs = """float[B, 3, 4] x, int64[B] i, float[1, 3, 4] table, float[B, 1, 4] row,
        float[3, 4] flat"""
    random = np.random.default_rng(0)
    given = {"table": (1, 3, 4), "row": (2, 1, 4), "flat": (3, 4)}
    tables = {name: random.standard_normal(shape, np.float32) for name, shape in given.items()}
    assert few(moves(graph(nodes, inputs=inputs), inputs=fed(**tables)), "Add")


# -- where it would not pay, or be wrong


def test_nothing_but_elementwise_operators_is_not_worth_a_copy() -> None:
    stays(graph("m = Add (x, b) n = Relu (m) y = Gather <axis = 1> (n, first)"))


def test_values_that_are_read_as_a_whole() -> None:
    cut = "y = Gather <axis = 1> (m, first)"
    whole = "float[B, 4] y, float[B, L, 4] m"
    stays(graph(f"m = MatMul (x, w) {cut}", outputs=whole))
    stays(graph(f"m = MatMul (x, w) {cut} z = Relu (m)", outputs=whole.replace("] m", "] z")))
    other = f"m = MatMul (x, w) {cut} z = Gather <axis = 1> (m, last)"  # may be the same one
    stays(graph(other, outputs="float[B, 4] y, float[B, 4] z"))
    along = f"m = MatMul (x, w) {cut} z = Gather <axis = 2> (m, first)"
    stays(graph(along, outputs="float[B, 4] y, float[B, L] z"))


def test_a_value_that_a_branch_reads() -> None:
    branch = """z = If (c) <then_branch = g () => (float[B, L, 4] u) { u = Relu (m) },
                            else_branch = h () => (float[B, L, 4] v) { v = Neg (m) }>"""
    stays(
        graph(
            f"m = MatMul (x, w) y = Gather <axis = 1> (m, first) {branch}",
            inputs="float[B, L, 4] x, bool c",
            outputs="float[B, 4] y, float[B, L, 4] z",
        ),
        inputs={"x": GIVEN["x"], "c": np.array(True)},
    )


def test_a_selection_inside_of_a_branch() -> None:
    branch = """y = If (c) <
        then_branch = g () => (float[B, 4] u) { m = MatMul (x, w) u = Gather <axis=1> (m, first) },
        else_branch = h () => (float[B, 4] v) { v = Gather <axis = 1> (x, last) }>"""
    text = graph(branch, inputs="float[B, L, 4] x, bool c")
    for flag in (True, False):
        moves(text, inputs={"x": GIVEN["x"], "c": np.array(flag)})


def test_an_index_that_comes_from_what_it_selects() -> None:
    nodes = """m = MatMul (x, w) r = ReduceMax <keepdims = 0> (m) t = Cast <to = 7> (r)
        z = Constant <value_int = 0> () i = Min (t, z) y = Gather <axis = 1> (m, i)"""
    stays(graph(nodes), inputs={"x": np.zeros((2, 3, 4), np.float32)})


def test_sizes_that_may_differ() -> None:
    """One of them may be 1 at run time, and then has no such row."""
    nodes = "m = MatMul (x, w) a = Add (m, z) y = Gather <axis = 1> (a, first)"
    found = graph(nodes, inputs="float[B, L, 4] x, float[B, K, 4] z")
    stays(found, inputs={"x": np.ones((2, 3, 4), np.float32), "z": np.ones((2, 1, 4), np.float32)})


def test_shapes_that_are_not_known() -> None:
    nodes = "m = MatMul (x, w) y = Gather <axis = 1> (m, first)"
    text = graph(nodes)
    check(Rows(), text, near_miss=True)


def test_an_older_opset_is_left_alone() -> None:
    stays(graph("m = MatMul (x, w) y = Gather <axis = 1> (m, first)").replace("23", "12"))


# -- as a part of the whole


SPELLED = """
    q0 = MatMul (x, w) q1 = Reshape (q0, apart) q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k0 = MatMul (x, w) k1 = Reshape (k0, apart) k = Transpose <perm = [0, 2, 3, 1]> (k1)
    v0 = MatMul (x, w) v1 = Reshape (v0, apart) v = Transpose <perm = [0, 2, 1, 3]> (v1)
    s0 = MatMul (q, k) s1 = Mul (s0, scale) s2 = Add (s1, mask) p = Softmax (s2)
    a0 = MatMul (p, v) a1 = Transpose <perm = [0, 2, 1, 3]> (a0) a = Reshape (a1, joined)
    o = MatMul (a, w) r = Add (o, x) n = LayerNormalization (r, b, b)
    y = Gather <axis = 1> (n, first)
"""


@pytest.mark.parametrize("target", ["ort-cpu", "onnx"])
def test_fuse_selects_before_the_last_attention(target: str) -> None:
    stored = """int64[4] apart = {0, 0, 2, 2}, int64[3] joined = {0, 0, 4}, float scale = {0.7}"""
    text = graph(SPELLED, inputs="float[B, L, 4] x, float[B, 1, 1, L] mask", stored=stored)
    subject = Model.from_proto(parse(text))
    for item in parse_passes("fuse"):
        item.run(subject, Context(Settings(target=target)))
    assert few(subject, "Attention")
    x = np.random.default_rng(0).standard_normal((2, 5, 4), np.float32)
    mask = np.where(np.arange(5) < [[[[3]]], [[[5]]]], 0, -1e4).astype(np.float32)
    assert_same_outputs(parse(text), subject, [{"x": x, "mask": mask}])


def test_explain_shows_the_obstacle() -> None:
    misses = NearMisses()
    nodes = "m = MatMul (x, w) y = Gather <axis = 1> (m, first)"
    subject = Model.from_proto(parse(graph(nodes, outputs="float[B, 4] y, float[B, L, 4] m")))
    for item in (Shapes(annotate=False), Rows()):
        item.run(subject, Context(misses=misses))
    [miss] = [miss for miss in misses.list() if miss.rule == "selected-rows"]
    assert "all rows of MatMul 'm' are used" in miss.reason


# -- any operators in any order

STEPS = (
    *("unary", "binary", "with_number", "where", "cast", "transpose", "reshape", "squeeze"),
    *("split", "pieces_back", "expand", "reduce", "matmul", "softmax", "slice", "gather"),
)
small = st.integers(0, 11)
steps = st.lists(
    st.tuples(st.sampled_from(STEPS), st.sampled_from((0, 0, 0, 1, 2)), small, small),
    min_size=1,
    max_size=8,
)


def one_each(proto: ModelProto) -> None:
    """Select a row of the output for each entry of the batch."""
    [value] = proto.graph.output
    one = numpy_helper.from_array(np.array(1), "at_most")
    proto.graph.initializer.append(one)
    nodes = [
        helper.make_node("ArgMax", ["y"], ["largest"], axis=1),
        helper.make_node("Min", ["largest", "at_most"], ["chosen"]),
        helper.make_node("GatherND", [value.name, "chosen"], ["rows"], batch_dims=1),
    ]
    proto.graph.node.extend(nodes)
    dtype = value.type.tensor_type.elem_type
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("rows", dtype, None))


def selects_nothing(node: NodeProto) -> bool:
    return node.op_type not in SELECTING


@settings(steady, max_examples=300)
@given(
    opset=st.sampled_from((13, 17, 21)),
    before=steps,
    selection=st.tuples(st.sampled_from(("gather", "slice", "one-each")), st.just(0), small, small),
)
def test_random_operators(opset: int, before: list[Step], selection: Step) -> None:
    """Treat all operators but selections as worth saving; selections could alternate endlessly."""
    each = selection[0] == "one-each"
    proto = build(opset, before if each else [*before, selection])
    assume(proto is not None)
    assert proto is not None
    if each:
        one_each(proto)
    assume_it_runs(proto)
    subject = Model.from_proto(proto)
    run(f"{INFORMED},dead", subject)
    subject.commit()
    stored, known = written(subject), knowledge(subject)
    with mock.patch.object(region, "is_product", selects_nothing):
        run("rows", subject)
        if len(subject.journal):
            assert_rollback(subject, stored, known)
            run("rows", subject)
            subject.commit()
            assert_same_outputs(proto, subject, feeds())
            run("rows", subject)
            assert not len(subject.journal)


# -- several ends that are outputs


@pytest.mark.parametrize(("index", "shape"), [("one", "[B, 1, 4]"), ("first", "[B, 4]")])
def test_rows_that_are_several_outputs(index: str, shape: str) -> None:
    found = moves(
        graph(
            f"""m = MatMul (x, w) y = Gather <axis = 1> (m, {index})
                z = Gather <axis = 1> (m, one) u = Gather <axis = 1> (m, one)""",
            outputs=f"float{shape} y, float[B, 1, 4] z, float[B, 1, 4] u",
        )
    )
    assert few(found, "MatMul")


def test_a_linear_map_with_a_scalar_bias_stays() -> None:
    stays(
        graph(
            """m = MatMul (x, w) a = Add (m, all) q, k = Split <axis = 2, num_outputs = 2> (a)
               y = Gather <axis = 1> (q, first)""",
            outputs="float[B, 2] y, float[B, L, 2] k",
            stored="float[1] all = {0.5}",
        )
    )


def test_what_is_the_same_for_all_of_the_batch_is_computed_once() -> None:
    found = moves(
        graph(
            """o = MatMul (z, w) a = Attention <q_num_heads = 2, kv_num_heads = 2> (o, z, z)
               m = MatMul (x, w) s = Add (m, a) y = GatherND <batch_dims = 1> (s, i)""",
            inputs="float[B, L, 4] x, float[1, L, 4] z, int64[B, 1] i",
        ),
        inputs={
            "x": GIVEN["x"],
            "z": np.arange(12, dtype=np.float32).reshape(1, 3, 4) / 12,
            "i": np.array([[2], [0]]),
        },
    )
    [attended] = sizes(found, "Attention")
    assert attended == (1, symbol("L"), 4)
    assert (symbol("B"), 1, 4) in sizes(found, "MatMul")


def test_columns_of_a_stored_table_are_not_copied_for_all_its_words() -> None:
    """One column of the words of each text: the selection stops behind the table."""
    words = """e = Gather (table, i) t = Transpose <perm = [0, 2, 1]> (e)
        m = MatMul (t, w) y = Gather <axis = 1> (m, first)"""
    numbers = ", ".join(map(str, range(24)))
    found = moves(
        graph(words, inputs="int64[B, 4] i", stored=f"float[6, 4] table = {{{numbers}}}"),
        inputs={"i": np.array([[0, 5, 2, 1], [3, 3, 4, 0]])},
    )
    reader = next(node for node in found.graph.nodes if node.input[0] == "table")
    assert reader.input[1] == "i"
