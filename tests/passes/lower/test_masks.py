"""Masks with a floor: what is written, where it would be wrong, and what runs have to show."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, shape_inference

import toolkit
from passes.lower import Lower, masks
from passes.lower.choice import Choice
from tests import ort
from tests.checks import check, model, parse, text_of
from tests.passes.lower.tables import HEADER, choice, spelling, table, typed
from toolkit.context import Context
from toolkit.costs import cache_path
from toolkit.journal import Rewrite
from toolkit.model import Model
from toolkit.rules import Rules
from toolkit.worklist import explain

QKV = "float[N, 4, 8] q, float[N, 4, 8] k, float[N, 4, 8] v"
PLAIN = f"g ({QKV}) => (float[N, 4, 8] y)"
SIGNATURE = f"g ({QKV}, float[4, 4] m) => (float[N, 4, 8] y, float[N, 4, 8] z)"
HEADS = "q_num_heads = 2, kv_num_heads = 2"
TWO = f"y = Attention <{HEADS}> (q, k, v, m) z = Attention <{HEADS}> (k, q, v, m)"
FLOOR = """last = Constant <value = int64[1] {-1}> () depth = Constant <value = float {50.0}> ()
    far = Constant <value = float {-1000.0}> () none = Constant <value = float {-inf}> ()
    top = ReduceMax (m, last) below = Sub (top, depth) whole = Less (top, far)
    low = Where (whole, none, below)"""
FLOORS = Rules("test", masks.rules())
LOW = [-1e4, float(np.finfo(np.float32).min), -np.inf]
CAUSAL = np.tril(np.ones((4, 4), bool))


def feeds(mask: Any, **more: Any) -> dict[str, Any]:
    random = np.random.default_rng(0)
    made = {name: random.standard_normal((2, 4, 8)).astype(np.float32) for name in "qkv"}
    return {**made, "m": mask, **more}


def low_at(allowed: Any, low: float) -> Any:
    return np.where(allowed, 0, low).astype(np.float32)


# -- what is written


@pytest.mark.parametrize("low", LOW)
def test_one_mask_gets_one_floor(low: float) -> None:
    after = f"{FLOOR} f = Max (m, low) {TWO.replace(', m)', ', f)')}"
    fed = feeds(low_at(CAUSAL, low))
    check(FLOORS, typed(f"{SIGNATURE} {{ {TWO} }}"), after, inputs=fed, atol=1e-6)


@pytest.mark.parametrize("low", LOW)
def test_a_row_that_is_masked_as_a_whole_stays(low: float) -> None:
    allowed = CAUSAL.copy()
    allowed[1] = False
    check(FLOORS, typed(f"{SIGNATURE} {{ {TWO} }}"), inputs=feeds(low_at(allowed, low)), atol=1e-6)


def test_a_row_that_is_masked_twice_in_parts_stays() -> None:
    """As that of a padding token, which sees padding alone: some of it is masked twice."""
    mask = low_at(CAUSAL, -1e9) + low_at(np.array([0, 0, 1, 1]), -1e9)
    fed = feeds(mask)
    fed["q"] *= 8
    check(FLOORS, typed(f"{SIGNATURE} {{ {TWO} }}"), inputs=fed, atol=1e-6)


def test_biases_beside_what_is_masked_stay() -> None:
    bias = np.random.default_rng(1).uniform(90, 110, (4, 4)).astype(np.float32)
    fed = feeds(bias + low_at(CAUSAL, -1e4))
    check(FLOORS, typed(f"{SIGNATURE} {{ {TWO} }}"), inputs=fed, atol=1e-6)


def test_a_mask_that_is_spread_over_queries_gets_its_floor_before() -> None:
    signature = SIGNATURE.replace("float[4, 4] m", "float[N, 1, 1, 4] m, int64[4] s")
    spread = TWO.replace(", m)", ", e)")
    after = f"{FLOOR} f = Max (m, low) e = Expand (f, s) {spread}"
    before = typed(f"{signature} {{ e = Expand (m, s) {spread} }}")
    fed = feeds(np.array([[[[0, 0, -1e4, -1e4]]], [[[0] * 4]]], np.float32), s=[2, 1, 4, 4])
    check(FLOORS, before, after, inputs=fed | {"s": np.array(fed["s"])}, atol=1e-6)


def test_a_boolean_mask_becomes_numbers() -> None:
    signature = SIGNATURE.replace("float[4, 4] m", "bool[4, 4] b")
    nodes = TWO.replace(", m)", ", b)")
    numbers = f"""zero = Constant <value = float {{0}}> ()
        min = Constant <value = float {{{LOW[1]}}}> () m = Where (b, zero, min)
        {FLOOR} f = Max (m, low) {TWO.replace(", m)", ", f)")}"""
    allowed = CAUSAL.copy()
    allowed[2] = False
    fed = feeds(None, b=allowed)
    del fed["m"]
    check(FLOORS, typed(f"{signature} {{ {nodes} }}"), numbers, inputs=fed, atol=1e-6)


def test_what_is_to_come_becomes_a_mask_for_all_that_are_as_long() -> None:
    signature = PLAIN.replace("N, 4, 8", "N, S, 8").replace("y)", "y, float[N, S, 8] z)")
    causal = TWO.replace("2>", "2, is_causal = 1>").replace(", m)", ")")
    after = f"""depth = Constant <value = float {{50.0}}> () one = Constant <value = int64 {{1}}> ()
        s = Shape <start = 1, end = 2> (q) ss = Concat <axis = 0> (s, s) o = ConstantOfShape (ss)
        f = Sub (o, depth) m = Trilu <upper = 1> (f, one) {TWO}"""
    check(FLOORS, typed(f"{signature} {{ {causal} }}"), after, atol=1e-6)


def test_a_length_that_no_input_has_is_that_of_the_queries() -> None:
    text = """g (float[N, 3, 2, 8] x) => (float[N, 2, T, 8] y, float[N, 2, T, 8] z) {
        q = Resize <mode = "nearest"> (x, , , size) k = Neg (q)
        y = Attention <is_causal = 1> (q, k, q) z = Attention <is_causal = 1> (k, k, q) }"""
    text = text.replace("q = Resize", "turned = Transpose <perm = [0, 2, 1, 3]> (x) q = Resize")
    text = text.replace("(x, , , size)", "(turned, , scales)").replace(
        "z) {", "z) { scales = Constant <value = float[4] {1, 1, 2, 1}> ()"
    )
    changed = check(FLOORS, typed(text), atol=1e-6)
    shapes = [n for n in changed.graph.nodes if n.op_type == "Shape"]
    assert [(n.input[0], [a.i for a in n.attribute]) for n in shapes] == [
        ("q", [2, 3]),
        ("k", [2, 3]),
    ]


STORED = "float[4, 4] m = {0,-1e4,-1e4,-1e4, 3,0,-1e4,-1e4, 0,0,0,-1e4, -1e4,-1e4,-1e4,-1e4}"


def test_a_stored_mask_stays_stored_once() -> None:
    signature = f"{SIGNATURE.replace(', float[4, 4] m', '')} <{STORED}>"
    changed = check(FLOORS, typed(f"{signature} {{ {TWO} }}"), atol=1e-6)
    operators = [node.op_type for node in changed.graph.nodes]
    assert operators == ["ReduceMax", "Less", "Sub", "Where", "Max", "Attention", "Attention"]


def test_a_branch_has_its_own_floor() -> None:
    text = f"""g ({QKV}, float[4, 4] m, bool c) => (float[N, 4, 8] y) {{
        y = If (c) <then_branch = t () => (float[N, 4, 8] a)
            {{ a = Attention <{HEADS}> (q, k, v, m) }},
            else_branch = e () => (float[N, 4, 8] b) {{ b = Neg (q) }}> }}"""
    fed = feeds(low_at(CAUSAL, -1e4), c=np.array(True))
    check(FLOORS, typed(text), inputs=fed, atol=1e-6)


# -- near misses


@pytest.mark.parametrize(
    ("signature", "nodes"),
    [
        (PLAIN, f"y = Attention <{HEADS}> (q, k, v)"),
        (SIGNATURE, f"y = Attention <{HEADS}, softcap = 5.0> (q, k, v, m) z = Neg (y)"),
        (SIGNATURE, f"y = Attention <{HEADS}, is_causal = 1> (q, k, v, m) z = Neg (y)"),
        # as many keys as queries are not known
        (
            PLAIN.replace("[N, 4, 8] q", "[N, S, 8] q").replace("[N, 4, 8] y", "[N, S, 8] y"),
            f"y = Attention <{HEADS}, is_causal = 1> (q, k, v)",
        ),
        (
            SIGNATURE.replace("[N, 4, 8] z", "[N, 2, 4, 4] z"),
            f"y, pk, pv, z = Attention <{HEADS}, qk_matmul_output_mode = 1> (q, k, v, m)",
        ),
        (SIGNATURE.replace("float", "float16"), TWO),
        # shallow as it is
        (
            PLAIN + " <float[4, 4] m = {0,-9,0,0, 0,0,0,0, 7,0,0,0, 0,0,-50,0}>",
            f"y = Attention <{HEADS}> (q, k, v, m)",
        ),
        # keys that are left out may be all that is not masked
        (
            SIGNATURE.replace("float[4, 4] m", "float[4, 4] m, int64[N] n"),
            f"y = Attention <{HEADS}> (q, k, v, m, , , n) z = Neg (y)",
        ),
        # a floor of 2 heads for one attention
        (
            SIGNATURE.replace("float[4, 4] m", "float[N, 2, 4, 4] m"),
            f"y = Attention <{HEADS}> (q, k, v, m) z = Neg (y)",
        ),
        (
            PLAIN + " <float[4, 4] m = {nan,-9,0,0, 0,0,0,0, 7,0,0,0, 0,0,-50,0}>",
            f"y = Attention <{HEADS}> (q, k, v, m)",
        ),
        # behind a cache
        (
            f"g ({QKV}, float[N, 2, P, 4] a, float[N, 2, P, 4] b) => (float[N, 4, 8] y)",
            f"y, pk, pv = Attention <{HEADS}, is_causal = 1> (q, k, v, , a, b)",
        ),
    ],
)
def test_other_attention_stays(signature: str, nodes: str) -> None:
    check(FLOORS, typed(f"{signature} {{ {nodes} }}"), near_miss=True, run=False)


def test_where_it_does_not_pay_it_stays() -> None:
    slow = Rules("test", masks.rules(choice("finite", cost=1.0)))
    check(slow, typed(f"{SIGNATURE} {{ {TWO} }}"), near_miss=True, run=False)


def test_one_mask_of_all_heads_for_several_attentions() -> None:
    signature = SIGNATURE.replace("float[4, 4] m", "float[N, 2, 4, 4] m")
    fed = feeds(np.tile(low_at(CAUSAL, -1e4), (2, 2, 1, 1)))
    check(FLOORS, typed(f"{signature} {{ {TWO} }}"), inputs=fed, atol=1e-6)


BIASED = f"g ({QKV}, float[M, 1, 1, 4] m) => (float[N, 4, 8] y, float[N, 4, 8] z)"
TABLE = "float[5, 2] t = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}"
BUCKETS = "int64[4, 4] b = {0,1,2,3, 1,2,3,4, 0,0,1,1, 2,2,3,3}"


def test_a_bias_beside_what_is_masked_stays_as_it_is() -> None:
    """As relative positions are written: the part that masks is small, and it gets the floor."""
    low = "float lowest = {-3.4e38}"
    bias = "p = Gather (t, b) h = Transpose <perm = [2, 0, 1]> (p)"
    reads = TWO.replace(", m)", ", c)")
    before = f"{bias} s = Add (m, h) c = Max (s, lowest) {reads}"
    after = f"{bias} {FLOOR} f = Max (m, low) s = Add (f, h) c = Max (s, lowest) {reads}"
    constants = f"<{TABLE}, {BUCKETS}, {low}>"
    fed = feeds(np.array([[[[0, 0, -1e4, -1e4]]], [[[0] * 4]]], np.float32))
    check(
        FLOORS,
        typed(f"{BIASED} {constants} {{ {before} }}"),
        f"{HEADER}{BIASED} {constants} {{ {after} }}",
        inputs=fed,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    "bias",
    [
        TABLE.replace("10}", "100}"),  # masks, maybe
        TABLE.replace("10}", "-inf}"),
    ],
)
def test_what_may_mask_is_no_bias(bias: str) -> None:
    nodes = f"p = Gather (t, b) h = Transpose <perm = [2, 0, 1]> (p) s = Add (m, h) {TWO}"
    text = f"{BIASED} <{bias}, {BUCKETS}> {{ {nodes.replace(', m)', ', s)')} }}"
    fed = feeds(np.array([[[[0, 0, -1e4, -1e4]]], [[[0] * 4]]], np.float32))
    changed = check(FLOORS, typed(text), inputs=fed, atol=1e-6)
    (floor,) = (node for node in changed.graph.nodes if node.op_type == "ReduceMax")
    assert floor.input[0] == "s"


def test_windows_that_are_stored_and_spread() -> None:
    """As Swin has them: the same windows for every image, beside a bias for each head."""
    bias = "float[2, 4, 4] h = {" + ", ".join(str(i % 5) for i in range(32)) + "}"
    constants = f"<{STORED.replace('[4, 4]', '[1, 1, 1, 4, 4]')}, {bias}>"
    nodes = f"""e = Expand (m, s) v = Reshape (e, r) a = Add (v, h)
        y = Attention <{HEADS}> (q, q, q, a)"""
    signature = "g (float[W, 4, 8] q, int64[5] s, int64[4] r) => (float[W, 4, 8] y)"
    text = typed(f"{signature} {constants} {{ {nodes} }}")
    text = re.sub(r"float\[[^]]*\] v\b", "float[W, 1, 4, 4] v", text)
    fed = {
        "q": np.random.default_rng(0).standard_normal((3, 4, 8)).astype(np.float32),
        "s": np.array([3, 1, 1, 4, 4]),
        "r": np.array([3, 1, 4, 4]),
    }
    changed = check(FLOORS, text, inputs=fed, atol=1e-6)
    (floor,) = (node for node in changed.graph.nodes if node.op_type == "ReduceMax")
    assert floor.input[0] == "m", text_of(changed)


def test_a_view_that_makes_other_rows() -> None:
    signature = SIGNATURE.replace("float[4, 4] m", "float[2, 8] m")
    nodes = f"r = Constant <value = int64[2] {{4, 4}}> () w = Reshape (m, r) {TWO}"
    text = typed(f"{signature} {{ {nodes.replace(', m)', ', w)')} }}")
    fed = feeds(low_at(CAUSAL, -1e4).reshape(2, 8))
    changed = check(FLOORS, text, inputs=fed, atol=1e-6)
    (floor,) = (node for node in changed.graph.nodes if node.op_type == "ReduceMax")
    assert floor.input[0] == "w"


@pytest.mark.parametrize(
    "nodes",
    [
        "o = ReduceMax <keepdims = 0> (m) f = Sub (o, depth) w = Less (o, far)"
        " l = Where (w, none, f) g = Max (m, l)",  # of all rows
        "a = Constant <value = int64[1] {0}> () o = ReduceMax (m, a) f = Sub (o, depth)"
        " w = Less (o, far) l = Where (w, none, f) g = Max (m, l)",
        "o = ReduceMax (m, last) f = Add (o, depth) w = Less (o, far) l = Where (w, none, f)"
        " g = Max (m, l)",
        "f = Sub (m, depth) k1 = Constant <value = int64 {1}> () g = Trilu <upper = 1> (f, k1)",
    ],
)
def test_what_is_no_floor(nodes: str) -> None:
    given = """last = Constant <value = int64[1] {-1}> () depth = Constant <value = float {9}> ()
        far = Constant <value = float {-1000}> () none = Constant <value = float {-inf}> ()"""
    reads = TWO.replace(", m)", ", g)")
    fed = feeds(low_at(CAUSAL, -1e4))
    changed = check(FLOORS, typed(f"{SIGNATURE} {{ {given} {nodes} {reads} }}"), inputs=fed)
    assert sum(node.op_type == "ReduceMax" for node in changed.graph.nodes) >= 1


def test_numbers_of_another_type_are_not_taken_for_these() -> None:
    signature = SIGNATURE.replace("float[4, 4] m", "bool[4, 4] b").replace(
        "z)", "z, double[4, 4] w)"
    )
    stored = f"double zero = {{0}}, double low = {{{LOW[1]}}}"
    nodes = f"w = Where (b, zero, low) {TWO.replace(', m)', ', b)')}"
    fed = feeds(None, b=CAUSAL)
    del fed["m"]
    check(FLOORS, typed(f"{signature} <{stored}> {{ {nodes} }}"), inputs=fed, atol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ("(q, k, v)", "nothing is masked"),
        ("(q, k, v, m)", "masked-attention is not faster here when spelled 'finite'"),
    ],
)
def test_the_reason_why_it_stays(nodes: str, said: str) -> None:
    text = typed(f"{SIGNATURE} {{ y = Attention <{HEADS}> {nodes} z = Neg (y) }}")
    found = explain(model(text), masks.rules(choice("finite", cost=1.0), only=()))
    assert [miss.reason for miss in found] == [said]


# -- what runs have to show


class Runs:
    """Whether a model gives the same on these feeds; how often it was asked."""

    def __init__(self, original: str, *feeds: dict[str, Any]) -> None:
        self.proto, self.feeds, self.asked = parse(original), feeds, 0
        self.wanted = [ort.run(self.proto, feed) for feed in feeds]

    def __call__(self, trial: Model) -> bool:
        self.asked += 1
        return all(
            np.allclose(one, other, atol=1e-4)
            for feed, wanted in zip(self.feeds, self.wanted, strict=True)
            for one, other in zip(ort.run(trial.inlined_proto(), feed), wanted, strict=True)
        )


FASTER: Choice = choice("finite")
BEFORE = typed(f"{SIGNATURE} {{ {TWO} }}")


def shown(text: str, *feeds: dict[str, Any]) -> tuple[list[str], masks.Showing, Runs]:
    runs = Runs(text, *feeds)
    subject = model(text)
    showing = masks.Showing(subject, FASTER, runs)
    found = showing.shown()
    assert not len(subject.journal)
    return found, showing, runs


def test_a_mask_that_is_in_use_and_enough_at_half_the_depth() -> None:
    found, showing, runs = shown(BEFORE, feeds(low_at(CAUSAL, -1e4)))
    assert sorted(found) == ["y", "z"]
    assert not showing.idle
    assert runs.asked == 2


def test_inputs_that_mask_nothing_show_nothing() -> None:
    found, showing, _ = shown(BEFORE, feeds(np.zeros((4, 4), np.float32)))
    assert found == []
    assert showing.idle == 2


def test_a_bias_is_no_mask_that_is_in_use() -> None:
    """It makes a difference, and has nothing to show of what is masked at other inputs."""
    bias = np.random.default_rng(1).uniform(-20, 20, (4, 4)).astype(np.float32)
    found, showing, _ = shown(BEFORE, feeds(bias))
    assert found == []
    assert showing.idle == 2


CAUSAL_PAIR = f"""g (float[N, S, 8] q, float[N, S, 8] k, float[N, S, 8] v)
    => (float[N, S, 8] y, float[N, S, 8] z) {{
    {TWO.replace("2>", "2, is_causal = 1>").replace(", m)", ")")} }}"""


@pytest.mark.parametrize(("length", "count"), [(1, 0), (3, 2)])
def test_what_is_to_come_has_to_be_there(length: int, count: int) -> None:
    text = typed(CAUSAL_PAIR)
    fed = {name: array[:, :length] for name, array in feeds(None).items() if name != "m"}
    found, showing, _ = shown(text, fed)
    assert len(found) == count
    assert showing.idle == 2 - count


@pytest.mark.parametrize(("taken", "sites"), [(True, ["a", "z"]), (False, ["z"])])
@pytest.mark.parametrize("mask", ["float[4, 4] m) =>", STORED])
def test_a_branch_has_to_be_taken(taken: bool, sites: list[str], mask: str) -> None:
    signature = f"g ({QKV}, bool c, {mask} (float[N, 4, 8] y, float[N, 4, 8] z)"
    if mask == STORED:
        signature = f"g ({QKV}, bool c) => (float[N, 4, 8] y, float[N, 4, 8] z) <{STORED}>"
    text = f"""{signature} {{
        y = If (c) <then_branch = t () => (float[N, 4, 8] a)
            {{ a = Attention <{HEADS}> (q, k, v, m) }},
            else_branch = e () => (float[N, 4, 8] b) {{ b = Neg (q) }}>
        z = Attention <{HEADS}> (q, k, v, m) }}"""
    fed = feeds(low_at(CAUSAL, -1e4), c=np.array(taken))
    if mask == STORED:
        del fed["m"]
    found, showing, _ = shown(typed(text), fed)
    assert sorted(found) == sites
    assert showing.idle == 2 - len(sites)


def scaled(sign: float, low: float = -1e4) -> dict[str, Any]:
    """Scores of 40 at the diagonal's right, which is masked: 30 more than at what is not."""
    fed = feeds(low_at(CAUSAL, low))
    q, k = np.zeros((2, 2, 4, 8), np.float32)
    q[..., :2], k[:, 1:, :2] = 4.0, sign * 7.0
    return fed | {"q": q, "k": k}


@pytest.mark.parametrize(("sign", "kept"), [(-1.0, ["y"]), (1.0, [])])
def test_masked_scores_that_are_large_are_left_alone(sign: float, kept: list[str]) -> None:
    """Where masked keys score 30 more, they weigh exp(30 - 25); at 50 nobody would have seen it."""
    nodes = f"y = Attention <{HEADS}> (q, k, v, m) z = Attention <{HEADS}> (q, w, v, m)"
    signature = SIGNATURE.replace("float[4, 4] m", "float[N, 4, 8] w, float[4, 4] m")
    text = typed(f"{signature} {{ {nodes} }}")
    fed = scaled(sign)
    found, _, runs = shown(text, fed | {"w": np.abs(fed["k"])})
    assert found == kept
    deep = model(text)
    masks_at_50 = Rules("test", masks.rules())
    masks_at_50.run(deep, Context())
    assert runs(deep), text_of(deep)


def layers(count: int) -> str:
    """Attentions with masks of their own."""
    many = [
        f"m{i} = Mul (m, f{i}) a{i} = Attention <{HEADS}> (q, k, v, m{i})" for i in range(count)
    ]
    factors = ", ".join(f"float f{i} = {{{i + 1}}}" for i in range(count))
    ends = f"y = Sum ({', '.join(f'a{i}' for i in range(count))}) z = Neg (y)"
    return typed(f"{SIGNATURE} <{factors}> {{ {' '.join(many)} {ends} }}")


def test_many_masks() -> None:
    found, showing, runs = shown(layers(20), feeds(low_at(CAUSAL, -1e4)))
    assert len(found) == 20
    assert runs.asked == 21
    assert not showing.idle


@pytest.mark.parametrize(("count", "answer"), [(20, False), (40, False), (40, True)])
def test_trials_come_to_an_end(count: int, answer: bool) -> None:
    asked = 0

    def always(trial: Model) -> bool:
        nonlocal asked
        asked += 1
        return answer

    showing = masks.Showing(model(layers(count)), FASTER, always)
    assert showing.shown() == []
    assert asked == 32
    assert showing.idle == (32 if answer else 0)


def test_a_veto_is_not_taken_for_a_mask_that_is_not_in_use() -> None:
    subject = model(BEFORE)
    for site in "yz":
        subject.graph.begin("mask-floor", subject.graph.producer(site))
        subject.journal.veto(Rewrite("mask-floor", site, 0))
    showing = masks.Showing(subject, FASTER, lambda trial: True)
    assert showing.shown() == []
    assert not showing.idle


# -- as a pass

NETWORK = """g (int64[N, S] ids, int64[N, S] attention_mask) => (float[N, S, 8] y) {
    x = Gather (table, ids)
    f = Cast <to = 1> (attention_mask)
    g = Sub (one, f)
    h = Mul (g, low)
    m = Unsqueeze (h, axes)
    s = Shape (ids)
    n = Gather (s, zero)
    l = Gather (s, unit)
    shape = Concat <axis = 0> (n, unit, l, l)
    e = Expand (m, shape)
    y = Attention <q_num_heads = 2, kv_num_heads = 2> (x, x, x, e)
}"""


def network() -> Any:
    table = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    proto = parse(HEADER + NETWORK)
    for name, array in {
        "table": table,
        "one": np.float32(1),
        "low": np.float32(-1e4),
        "axes": np.array([1, 2]),
        "zero": np.array([0]),
        "unit": np.array([1]),
    }.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return shape_inference.infer_shapes(proto)


def costs(cost: float) -> None:
    one = (spelling("attention", 1.0), spelling("finite", cost))
    table(masked_attention=one).save(cache_path())


def floors(result: Any) -> int:
    return result.after.ops.get("ReduceMax", 0)


def test_it_is_done_where_it_is_faster_and_shown() -> None:
    costs(0.5)
    result = toolkit.optimize(network(), "lower")
    assert result.passes[0].rules == {"mask-floor": 1}
    assert floors(result) == 1
    assert result.passes[0].notes == []


def test_it_is_left_where_it_is_not_faster() -> None:
    costs(1.0)
    result = toolkit.optimize(network(), "lower")
    assert result.passes[0].status == "unchanged"
    assert result.passes[0].notes == []


@pytest.mark.parametrize("validate", ["off", "final"])
def test_it_is_left_where_nothing_is_run_behind_it(validate: Any) -> None:
    costs(0.5)
    result = toolkit.optimize(network(), "lower", validate=validate)
    assert floors(result) == 0
    assert "lower:mask=fast" in result.passes[0].notes[0]


@pytest.mark.parametrize(("mask", "count"), [("keep", 0), ("fast", 1)])
def test_on_demand(mask: Any, count: int) -> None:
    costs(0.5 if mask == "keep" else 1.0)
    for validate in ("each", "off"):
        result = toolkit.optimize(network(), [Lower(mask=mask)], validate=validate)
        assert floors(result) == count
        assert result.passes[0].notes == []


def test_once_is_enough() -> None:
    costs(0.5)
    assert [done.status for done in toolkit.optimize(network(), "lower,lower").passes] == [
        "applied",
        "skipped",
    ]
