"""`unpad`: operators that compute real tokens alone, and near misses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from passes.analysis.intervals import Interval
from passes.analysis.shapes import Shapes
from passes.motion.remove_padding import Unpad, region
from passes.motion.remove_padding.masked_values import MaskedValues
from tests.checks import assert_same_outputs, check, parse
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.settings import Settings

HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'


@pytest.fixture(autouse=True)
def _any_work_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of these models are short."""
    monkeypatch.setattr(region, "WORK_OF_A_COPY", 0.1)


WEIGHTS = """float[4, 4] w = {1, 2, 3, 4, -1, 0, 2, 1, 0, 1, 0, -2, 3, 1, 1, 0},
    float[4, 4] u = {0.1, -0.2, 0.3, 0.4, -0.1, 0, 0.2, 0.1, 0, 0.1, 0, -0.2, 0.3, 0.1, 0.1, 0},
    float[4] b = {1, -2, 3, 0.5}, float[4] s = {1, 0.5, 2, 1}, int64[1] rows = {1},
    int64[1] columns = {2}, int64[2] heads = {1, 2}, float zero = {0}, float low = {-10000},
    int64 first = {0}, int64[1] first_axis = {0}, int64 last = {-1}, float one = {1}"""

SQUARE = """length = Shape <start = 1, end = 2> (mask)
    square = Concat <axis = 0> (rows, rows, length, rows) bias = Expand (narrow, square) """
BIAS = f"""real = Cast <to = 9> (mask) seen = Unsqueeze (real, heads)
    narrow = Where (seen, zero, low) {SQUARE}"""
LAYER = """k = MatMul (x, u) v = MatMul (x, w)
    a = Attention <q_num_heads = 2, kv_num_heads = 2> (x, k, v, bias)
    m = MatMul (a, u) r = Add (m, x) h = LayerNormalization <axis = -1> (r, s, b) """
MEAN = """flags = Cast <to = 1> (mask) column = Unsqueeze (flags, columns)
    kept = Mul (h, column) y = ReduceSum <keepdims = 0> (kept, rows)"""

STEPS = """at = Identity (order) down = Unsqueeze (at, rows) across = Unsqueeze (at, first_axis)
    steps = Sub (down, across)"""
"""How far each query is behind each key."""

MASKS = (
    [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]],
    [[0, 0, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]],
)


@dataclass(frozen=True, slots=True)
class Ready:
    """The pass on a model whose shapes are known."""

    target: str = "ort-cpu"

    def run(self, model: Model, ctx: Context) -> None:
        Shapes(annotate=False).run(model, ctx)
        ctx.settings = Settings(target=self.target)
        Unpad().run(model, ctx)


def graph(
    nodes: str,
    inputs: str = "float[B, L, 4] x, int64[B, L] mask",
    outputs: str = "float[B, 4] y",
    stored: str = "",
) -> str:
    kept = f"{WEIGHTS}, {stored}" if stored else WEIGHTS
    return f"{HEADER} agraph ({inputs}) => ({outputs}) <{kept}> {{ {nodes} }}"


def fed(mask: Any, seed: int = 0, dtype: Any = np.int64) -> dict[str, Any]:
    flags = np.array(mask, dtype)
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(*flags.shape, 4)).astype(np.float32), "mask": flags}


def moves(text: str, dtype: Any = np.int64, products: int = 3) -> Model:
    """So many products are of real rows alone, and the answers are the same for all masks."""
    found = [check(Ready(), text, inputs=fed(m, seed, dtype)) for seed, m in enumerate(MASKS)][-1]
    shapes = [found.graph.shape(n.output[0]) for n in found.graph.nodes if n.op_type == "MatMul"]
    assert sum(shape is not None and shape[0] == 1 for shape in shapes) == products
    return found


def stays(text: str, target: str = "ort-cpu", **inputs: Any) -> None:
    check(Ready(target), text, near_miss=True, inputs=inputs or fed(MASKS[0]))


# -- padding that is removed


def test_a_mean_over_real_tokens() -> None:
    found = moves(graph(BIAS + LAYER + MEAN))
    kinds = [node.op_type for node in found.graph.nodes]
    # x and the result of attention are packed; key, value and the operand of pooling are unpacked
    assert kinds.count("GatherND") == 5


def test_what_is_read_of_the_first_token() -> None:
    moves(graph(BIAS + LAYER + "y = Gather <axis = 1> (h, first)"))


def test_the_first_token_by_a_slice() -> None:
    text = "c = Slice (h, z, rows, rows) y = Squeeze (c, rows)"
    moves(graph(BIAS + LAYER + text, stored="int64[1] z = {0}"))


def test_the_largest_of_real_tokens() -> None:
    pooled = """column = Unsqueeze (real, columns) chosen = Where (column, h, low)
        y = ReduceMax <keepdims = 0> (chosen, rows)"""
    moves(graph(BIAS + LAYER + pooled))


def test_two_layers() -> None:
    second = """k2 = MatMul (h, u) v2 = MatMul (h, w)
        a2 = Attention <q_num_heads = 2, kv_num_heads = 2> (h, k2, v2, bias)
        m2 = MatMul (a2, u) g2 = Gelu (m2) h2 = Add (g2, h) """
    moves(graph(BIAS + LAYER + second + MEAN.replace("(h,", "(h2,")), products=6)


def test_heads_apart() -> None:
    layer = """k = MatMul (x, u) kh = Reshape (k, apart) kt = Transpose <perm = [0, 2, 1, 3]> (kh)
        v = MatMul (x, w) vh = Reshape (v, apart) vt = Transpose <perm = [0, 2, 1, 3]> (vh)
        q = Reshape (x, apart) qt = Transpose <perm = [0, 2, 1, 3]> (q)
        a = Attention (qt, kt, vt, bias) at = Transpose <perm = [0, 2, 1, 3]> (a)
        aj = Reshape (at, joined) m = MatMul (aj, u) h = Add (m, x) """
    stored = "int64[4] apart = {0, 0, 2, 2}, int64[3] joined = {0, 0, 4}"
    moves(graph(BIAS + layer + MEAN, stored=stored))


@pytest.mark.parametrize(
    "narrow",
    [
        "flags2 = Cast <to = 1> (mask) away = Sub (one, flags2) cost = Mul (away, low)"
        " narrow = Unsqueeze (cost, heads) ",
        "off = Equal (mask, first) seen = Unsqueeze (off, heads) narrow = Where (seen, low, zero) ",
        "real = Cast <to = 9> (mask) off = Not (real) on = Not (off)"
        " narrow = Unsqueeze (on, heads) ",
        "real = Cast <to = 9> (mask) narrow = Reshape (real, four) ",
        "real = Cast <to = 9> (mask) seen = Unsqueeze (real, heads) both = And (seen, causal)"
        " narrow = Where (both, zero, low) ",
        "real = Cast <to = 9> (mask) seen = Unsqueeze (real, heads) pad = Where (seen, zero, lower)"
        " narrow = Add (pad, near) ",
        "more = Less (first, mask) seen = Unsqueeze (more, heads) t = Transpose (seen)"
        " tt = Transpose (t) narrow = Where (tt, zero, low) ",
        "real = Cast <to = 9> (mask) seen = Unsqueeze (real, heads) pad = Where (seen, zero, lower)"
        " far = Gather (table, distance) up = Unsqueeze (far, ends) narrow = Add (pad, up) ",
        "whole = Cast <to = 6> (mask) away = Sub (unit, whole) wide = Unsqueeze (away, heads)"
        " numbers = Cast <to = 1> (wide) narrow = Mul (numbers, low) ",
        f"real = Cast <to = 9> (mask) seen = Unsqueeze (real, heads) {STEPS} apart = Abs (steps)"
        " window = LessOrEqual (apart, unit) both = And (seen, window)"
        " narrow = Where (both, zero, low) ",
        f"real = Cast <to = 9> (mask) seen = Unsqueeze (real, heads) {STEPS}"
        " before = GreaterOrEqual (down, across) both = And (seen, before)"
        " narrow = Where (both, zero, low) ",
        "real = Cast <to = 9> (mask) seen = Unsqueeze (real, heads) from = Unsqueeze (real, others)"
        " both = And (seen, from) narrow = Where (both, zero, low) ",
        "real = Cast <to = 9> (mask) seen = Unsqueeze (real, heads) some = Shape (mask)"
        " long = Gather (some, step) places = Range (first, long, step) "
        " from = GreaterOrEqual (places, first) down = Unsqueeze (from, rows)"
        " both = And (seen, down) narrow = Where (both, zero, low) ",
    ],
    ids=[
        *("product", "equal", "not", "reshaped", "causal", "sum", "transposed", "relative"),
        *("whole numbers", "window", "earlier", "pairs", "all positions"),
    ],
)
def test_masks_in_other_words(narrow: str) -> None:
    stored = """int64[4] four = {-1, 1, 1, 5},
        bool[1, 1, 5, 5] causal = {1,0,0,0,0, 1,1,0,0,0, 1,1,1,0,0, 1,1,1,1,0, 1,1,1,1,1},
        float[1, 1, 5, 5] near = {0,-1,0,-1,0, 1,0,1,0,1, 0,-1,0,0,0, 1,0,1,0,1, 0,-9,0,1,0},
        int64 step = {1}, int32 unit = {1}, int32[5] order = {0, 1, 2, 3, 4},
        int64[2] others = {1, 3},
        float lower = {-100000}, float[3] table = {1, -2, 3}, int64[2] ends = {0, 1},
        int64[5, 5] distance = {0,1,2,2,2, 1,0,1,2,2, 2,1,0,1,2, 2,2,1,0,1, 2,2,2,1,0}"""
    inputs = "float[B, 5, 4] x, int64[B, 5] mask"
    moves(graph(narrow + SQUARE + LAYER + MEAN, inputs, stored=stored))


@pytest.mark.parametrize("dtype", ["bool", "int32", "float"])
def test_masks_of_any_type(dtype: str) -> None:
    inputs = f"float[B, L, 4] x, {dtype}[B, L] mask"
    moves(graph(BIAS + LAYER + MEAN, inputs), {"float": np.float32}.get(dtype, dtype))


def test_one_text_of_a_fixed_length() -> None:
    inputs = "float[1, 5, 4] x, int64[1, 5] mask"
    for mask in ([1, 1, 0, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]):
        check(Ready(), graph(BIAS + LAYER + MEAN, inputs), inputs=fed([mask]))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(0, 1), min_size=length, max_size=length), min_size=1, max_size=4
        )
    ),
    st.sampled_from(["mean", "first", "largest"]),
)
def test_any_mask(mask: list[list[int]], pooled: str) -> None:
    heads = {
        "mean": MEAN,
        "first": "y = Gather <axis = 1> (h, first)",
        "largest": """column = Unsqueeze (real, columns) chosen = Where (column, h, low)
            y = ReduceMax <keepdims = 0> (chosen, rows)""",
    }
    original = parse(graph(BIAS + LAYER + heads[pooled]))
    subject = Model.from_proto(original)
    Ready().run(subject, Context())
    assert len(subject.journal)
    subject.commit()
    assert_same_outputs(original, subject, [fed(mask)], 1e-5)


# -- near misses


KEYS_AND_VALUES = 2


def test_an_output_of_all_rows_needs_all_but_keys_and_values() -> None:
    text = BIAS + LAYER + "y = Gelu (h)"
    moves(graph(text, outputs="float[B, L, 4] y"), products=KEYS_AND_VALUES)


@pytest.mark.parametrize(
    "pooled",
    [
        "y = ReduceMean <keepdims = 0> (h, rows)",
        "y = Gather <axis = 1> (h, last)",
        MEAN.replace("Mul (h, column)", "Mul (h, others)").replace(
            "kept =", "others = Sub (one, column) kept ="
        ),
        MEAN.replace("kept =", "other = Softmax <axis = 1> (h) kept =").replace(
            "(h, c", "(other, c"
        ),
    ],
    ids=["mean of all", "last row", "the others", "along rows"],
)
def test_heads_that_read_padding_need_all_but_keys_and_values(pooled: str) -> None:
    moves(graph(BIAS + LAYER + pooled), products=KEYS_AND_VALUES)


def test_copies_that_cost_more_than_they_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products of 4 x 4 for five copies of 4 numbers: 2.4 multiplications for each."""
    text = graph(BIAS + LAYER + MEAN)
    monkeypatch.setattr(region, "WORK_OF_A_COPY", 2.4)
    moves(text)
    monkeypatch.setattr(region, "WORK_OF_A_COPY", 2.5)
    stays(text)


def test_a_mask_that_only_weakens_stays() -> None:
    weak = BIAS.replace("low", "one")
    stays(graph(weak + LAYER + MEAN))


@pytest.mark.parametrize("low", [-20000, -9999.5, -1], ids=["below", "near", "far"])
def test_real_keys_that_are_masked_too(low: float) -> None:
    """What counts is by how much less the others score."""
    bias = BIAS.replace("(seen, zero, low)", "(seen, other, low)")
    text = graph(bias + LAYER + MEAN, stored=f"float other = {{{low}}}")
    stays(text)


def test_queries_without_a_key_stay() -> None:
    """If no key precedes the first token, it attends to all masked keys."""
    stored = "bool[1, 1, 5, 5] earlier = {0,0,0,0,0, 1,0,0,0,0, 1,1,0,0,0, 1,1,1,0,0, 1,1,1,1,0}"
    bias = BIAS.replace("(seen, zero, low)", "(both, zero, low)").replace(
        "narrow =", "both = And (seen, earlier) narrow ="
    )
    inputs = "float[B, 5, 4] x, int64[B, 5] mask"
    stays(graph(bias + LAYER + MEAN, inputs, stored=stored))


@pytest.mark.parametrize(
    ("begin", "end", "step"), [(0, -5, -1), (-1, 4, 1)], ids=["backwards", "from below"]
)
def test_queries_by_position_that_may_have_no_key_stay(begin: int, end: int, step: int) -> None:
    bias = BIAS.replace("(seen, zero, low)", "(both, zero, low)").replace(
        "narrow =",
        "places = Range (begin, end, step) from = GreaterOrEqual (places, first)"
        " down = Unsqueeze (from, rows) both = And (seen, down) narrow =",
    )
    stored = f"int64 begin = {{{begin}}}, int64 end = {{{end}}}, int64 step = {{{step}}}"
    inputs = "float[B, 5, 4] x, int64[B, 5] mask"
    stays(graph(bias + LAYER + MEAN, inputs, stored=stored))


def test_queries_of_padding_that_see_no_real_key_stay() -> None:
    """Only real tokens are known to see themselves, and all rows are an output here."""
    stored = "bool[1, 1, 5, 5] own = {1,0,0,0,0, 0,1,0,0,0, 0,0,1,0,0, 0,0,0,1,0, 0,0,0,0,1}"
    bias = BIAS.replace("(seen, zero, low)", "(both, zero, low)").replace(
        "narrow =", "both = And (seen, own) narrow ="
    )
    inputs = "float[B, 5, 4] x, int64[B, 5] mask"
    moves(graph(bias + LAYER + MEAN, inputs, stored=stored))
    stays(graph(bias + LAYER + "y = Gelu (h)", inputs, "float[B, 5, 4] y", stored))


@pytest.mark.parametrize("dtype", ["int64", "float"])
@pytest.mark.parametrize(
    "narrow",
    [
        "number = Cast <to = 1> (mask) away = Sub (one, number) cost = Mul (away, low)"
        " narrow = Unsqueeze (cost, heads) ",
        "number = Cast <to = 1> (mask) more = Less (zero, number) seen = Unsqueeze (more, heads)"
        " narrow = Where (seen, zero, low) ",
    ],
    ids=["product", "less"],
)
def test_numbers_that_are_no_flags(narrow: str, dtype: str) -> None:
    """A text with such a number is kept as a whole: attention may mask it, or padding less."""
    kind = {"float": np.float32}.get(dtype, dtype)
    text = graph(narrow + SQUARE + LAYER + MEAN, f"float[B, L, 4] x, {dtype}[B, L] mask")
    check(Ready(), text, inputs=fed([[-1, 0, 0], [1, -1, 0], [2, 1, 0], [2e6, 0, 1]], 3, kind))
    if dtype == "float":
        check(Ready(), text, inputs=fed([[0.5, 0, 0], [1, 0.25, 0], [1, 0, 0]], 3, kind))


def test_a_mask_of_the_real_tokens_stays() -> None:
    stays(graph(BIAS.replace("zero, low", "low, zero") + LAYER + MEAN))


def test_ancestors_of_the_mask_are_not_packed() -> None:
    """The first row of t is the length of the text; otherwise only attention uses t."""
    mask = """t = MatMul (x, u) begin = Gather <axis = 1> (t, first) long = ReduceMax (begin, rows)
        numbers = Cast <to = 1> (mask) place = CumSum (numbers, along)
        near = Less (place, long) """
    layer = LAYER.replace("MatMul (x, u) v", "MatMul (t, u) v").replace("(x, w)", "(t, w)")
    text = BIAS.replace("Cast <to = 9> (mask)", "Identity (near)") + layer
    moves(graph(mask + text + MEAN.replace("(mask)", "(near)"), stored="int64 along = {1}"))


def test_a_mask_beyond_the_depth_of_the_analysis_stays() -> None:
    """Whichever number is chosen: the other keeps the key."""
    steps = "c0 = Unsqueeze (real, heads) " + " ".join(
        f"c{i + 1} = Identity (c{i})" for i in range(60)
    )
    chosen = BIAS.replace("seen = Unsqueeze (real, heads)", steps).replace("seen", "c60")
    stays(graph(chosen + LAYER + MEAN))


@pytest.mark.parametrize(
    "seen",
    [
        "number = Cast <to = 1> (four) far = Sub (number, many) further = Sub (far, one)"
        " off = Less (further, far) seen = Not (off) ",
        "top = ReduceMin (x, columns) turned = Unsqueeze (top, rows)"
        " wide = Transpose <perm = [0, 1, 3, 2]> (turned) few = Min (wide, zero)"
        " less = Less (few, one) seen = Not (less) ",
        "top = ReduceMin (x, columns) turned = Unsqueeze (top, rows)"
        " wide = Transpose <perm = [0, 1, 3, 2]> (turned) size = Abs (wide)"
        " seen = Less (size, low) ",
        "number = Cast <to = 1> (four) product = Mul (number, ends) some = Cast <to = 9> (product)"
        " seen = Identity (some) ",
    ],
    ids=["rounded", "no number", "no size", "infinite"],
)
def test_masks_that_may_be_otherwise_stay(seen: str) -> None:
    """-2^24 - 1 is rounded to -2^24, not less; the least of 0 and NaN is NaN, not less than 1, and
    so is 0 times infinity, which is not zero."""
    bias = BIAS.replace("seen = Unsqueeze (real, heads)", f"four = Unsqueeze (mask, heads) {seen}")
    stored = "float many = {16777216}, float[2, 1, 1] ends = {1, inf}"
    stays(graph(bias + LAYER + MEAN, stored=stored))


def test_a_mask_that_is_text_in_between() -> None:
    """NaN is not analysed; integers computed from booleans are."""
    mean = MEAN.replace(
        "kept = Mul (h, column)",
        """word = Cast <to = 8> (mask) same = Equal (word, word) wide = Unsqueeze (same, columns)
        h2 = Where (wide, h, zero) narrow2 = Cast <to = 6> (real) again = Cast <to = 1> (narrow2)
        column2 = Unsqueeze (again, columns) kept = Mul (h2, column2)""",
    )
    moves(graph(BIAS + LAYER + mean))


@pytest.mark.parametrize(
    ("given", "more"),
    [("a, keys, values", "float[B, 2, L, 2] keys"), ("a, , , scores", "float[B, 2, L, L] scores")],
    ids=["keys", "scores"],
)
def test_attention_with_more_outputs_needs_all_rows(given: str, more: str) -> None:
    layer = LAYER.replace("a = Attention", f"{given} = Attention")
    moves(graph(BIAS + layer + MEAN), products=3)
    moves(graph(BIAS + layer + MEAN, outputs=f"float[B, 4] y, {more}"), products=1)


def test_many_masks_are_looked_at_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks with separate ancestors, none of which masks keys."""
    asked: list[str] = []
    bounds = MaskedValues.bounds

    def counted(self: MaskedValues, value: str, *rest: Any) -> Interval:
        asked.append(value)
        return bounds(self, value, *rest)

    def steps(layers: int) -> int:
        asked.clear()
        text = " ".join(
            f"real{i} = Cast <to = 9> (mask) seen{i} = Unsqueeze (real{i}, heads)"
            f" bias{i} = Where (seen{i}, zero, one)"
            f" y{i} = Attention <q_num_heads = 2, kv_num_heads = 2> (x, x, x, bias{i})"
            for i in range(layers)
        )
        outputs = ", ".join(f"float[B, L, 4] y{i}" for i in range(layers))
        subject = Model.from_proto(parse(graph(text, outputs=outputs)))
        Ready().run(subject, Context())
        assert not len(subject.journal)
        return len(asked)

    monkeypatch.setattr(MaskedValues, "bounds", counted)
    assert 0 < steps(40) <= 2.1 * steps(20)


def test_a_mask_of_another_length_stays() -> None:
    """Keys of a memory have a mask of their own, unrelated to the mask of the texts."""
    layer = LAYER.replace("MatMul (x, u) v", "MatMul (c, u) v").replace("(x, w)", "(c, w)")
    bias = BIAS.replace("Cast <to = 9> (mask)", "Cast <to = 9> (other)")
    inputs = "float[B, L, 4] x, int64[B, L] mask, float[B, M, 4] c, int64[B, M] other"
    feed = {
        **fed(MASKS[0]),
        "c": np.ones((3, 4, 4), np.float32),
        "other": np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], np.int64),
    }
    found = check(Ready(), graph(bias + layer + MEAN, inputs), inputs=feed)
    packed = [n for n in found.graph.nodes if n.op_type == "GatherND"]
    assert {n.input[0] for n in packed} >= {"c"}
    assert not any(n.input[0] in ("x", "h") for n in packed)


def test_a_mask_of_queries_stays() -> None:
    rows = BIAS.replace("(real, heads)", "(real, others)").replace(
        "(rows, rows, length, rows)", "(rows, rows, rows, length)"
    )
    stays(graph(rows + LAYER + MEAN, stored="int64[2] others = {1, 3}"))


def test_no_mask_at_all_stays() -> None:
    stays(graph(LAYER.replace(", bias)", ")") + MEAN))


def test_positions_along_the_length_are_added_before() -> None:
    """Rows that differ by position are the same for all texts: their sum with others is packed."""
    inputs = "float[B, 5, 4] t, int64[B, 5] mask"
    place = "x = Add (t, position) "
    stored = f"float[5, 4] position = {{{', '.join(str(i / 7) for i in range(20))}}}"
    text = graph(place + BIAS + LAYER + MEAN, inputs, stored=stored)
    feed = fed(MASKS[0])
    found = check(Ready(), text, inputs={"t": feed["x"], "mask": feed["mask"]})
    (added,) = (n for n in found.graph.nodes if "position" in n.input)
    assert found.graph.shape(added.output[0])[1] == 5


def test_what_differs_by_text_is_added_before() -> None:
    inputs = "float[B, L, 4] x, int64[B, L] mask, float[B, 1, 4] by"
    layer = LAYER.replace("k = MatMul (x, u)", "xs = Add (x, by) k = MatMul (xs, u)")
    found = check(
        Ready(),
        graph(BIAS + layer + MEAN, inputs),
        inputs={**fed(MASKS[0]), "by": np.ones((3, 1, 4), np.float32)},
    )
    (added,) = (n for n in found.graph.nodes if "by" in n.input)
    assert found.graph.shape(added.output[0])[0] != 1


def test_one_text_of_any_length_stays() -> None:
    inputs = "float[1, L, 4] x, int64[1, L] mask"
    stays(graph(BIAS + LAYER + MEAN, inputs), **fed([[1, 1, 0]]))


def test_other_targets_stay() -> None:
    stays(graph(BIAS + LAYER + MEAN), target="onnx")


def test_rows_without_products_stay() -> None:
    text = """a = Attention <q_num_heads = 2, kv_num_heads = 2> (x, x, x, bias) h = Gelu (a) """
    stays(graph(BIAS + text + MEAN))


@pytest.mark.parametrize("odd", ["{nan, 1, 1, 1}", "{inf, 1, 1, 1}", "{inf, 1, -inf, 1}"])
@pytest.mark.parametrize("made", ["f = Identity (odd)", "f = Add (odd, odd)", "f = Neg (odd)"])
def test_zero_times_a_value_that_may_be_infinite_may_be_nan(odd: str, made: str) -> None:
    """0 times infinity, and infinity less itself."""
    nodes = f"{made} flags = Cast <to = 1> (mask) column = Unsqueeze (flags, columns) "
    nodes += "weight = Mul (column, f) pooled = Mul (x, weight) y = ReduceSum (pooled, rows)"
    subject = Model.from_proto(parse(graph(nodes, stored=f"float[4] odd = {odd}")))
    Shapes(annotate=False).run(subject, Context())
    g = subject.graph
    padding = MaskedValues(g, "mask", g.shape("mask") or ())
    assert padding.bounds("weight", padding.padded(-3, -2)).may_be_nan
    assert padding.bounds("column", padding.padded(-3, -2)) == Interval(0, 0)
