"""The worklist: fixpoints, cost, and the near misses that it records."""

from __future__ import annotations

from functools import partial
from math import sqrt

import numpy as np
import pytest
from checks import check, model
from onnx import helper, numpy_helper

from tests.steps import steps
from toolkit import Context, MatchFailure, Rules, explain, number, op, product, rewrite, total, var
from toolkit.ir.model import Model
from toolkit.rewriting.rule import NearMisses, apply_rules

x, y = var("x"), var("y")


@rewrite(product(x, 0.5, op.Erf(product(x, 1 / sqrt(2))) + 1))
def gelu(g, x):
    return g.op("Gelu", x)


@rewrite(op.Neg(op.Neg(x)))
def cancel(g, x):
    return x


@rewrite(op.Neg(op.Abs(x)))
def sink_neg(g, x):
    return g.op("Abs", g.op("Neg", x))


GELU = """g (float[2,N] x) => (float[2,N] y)
    <float root = {1.4142135}, float one = {1}, float half = {0.5}> {
        a = Div(x, root) b = Erf(a) c = Add(one, b) d = Mul(x, c) y = Mul(d, half) }"""


# Fixpoint ----------------------------------------------------------------------------------------


def test_rewrites_go_on_until_nothing_matches():
    chain = " ".join(f"v{i + 1} = Neg(v{i})" for i in range(9))
    check(
        cancel,
        f"g (float[2] v0) => (float[2] y) {{ {chain} y = Abs(v9) }}",
        "n = Neg(v0) y = Abs(n)",
    )


def test_one_rule_makes_room_for_another():
    rules = Rules("pair", (cancel, sink_neg))
    text = "g (float[2] a) => (float[2] y) { b = Neg(a) c = Abs(b) d = Neg(c) y = Exp(d) }"
    check(rules, text, "c = Abs(a) y = Exp(c)", run=False)


def test_a_producer_that_lost_a_reader_is_looked_at_again():
    @rewrite(op.Add(op.Tanh(x).shared(), op.Tanh(x).shared()))
    def double(g, x):
        return g.op("Mul", x, x)

    fuse = rewrite(op.Relu(op.Tanh(x)), name="fuse")(lambda g, x: g.op("Elu", x))
    text = """g (float[2] a) => (float[2] y, float[2] z) {
        t = Tanh(a) z = Relu(t) y = Add(t, t) }"""
    check(Rules("both", (fuse, double)), text, "z = Elu(a) y = Mul(a, a)", run=False)


def test_dead_nodes_are_not_rewritten():
    text = "g (float[2] a) => (float[2] y) { b = Neg(a) c = Neg(b) y = Abs(a) }"
    check(cancel, text, near_miss=True)


def test_what_a_rewrite_leaves_unread_is_removed():
    subject = check(gelu, GELU)
    assert [node.op_type for node in subject.graph.nodes] == ["Gelu"]


def test_shared_parts_stay_while_they_are_read():
    rule = rewrite(op.Relu(op.Tanh(op.Exp(x)).shared()), name="r")(lambda g, x: g.op("Elu", x))
    text = """g (float[2] a) => (float[2] y, float[2] z) {
        e = Exp(a) t = Tanh(e) y = Relu(t) z = Abs(t) }"""
    check(rule, text, "e = Exp(a) t = Tanh(e) y = Elu(a) z = Abs(t)", run=False)


# Cost --------------------------------------------------------------------------------------------


def chain_of(blocks: int, block) -> Model:
    """A long graph: `block(emit, value, index)` adds nodes and returns the next value."""
    nodes = []

    def emit(kind, *inputs, **attributes):
        name = f"v{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    value = "x"
    for index in range(blocks):
        value = block(emit, value, index)
    info = helper.make_tensor_value_info
    numbers = {"root": sqrt(2), "one": 1.0, "half": 0.5, "two": 2.0}
    inits = [numpy_helper.from_array(np.array(n, np.float32), name) for name, n in numbers.items()]
    graph = helper.make_graph(nodes, "g", [info("x", 1, ["N"])], [info(value, 1, ["N"])], inits)
    return Model.from_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    )


def gelu_block(emit, value, _):
    inner = emit("Add", emit("Erf", emit("Div", value, "root")), "one")
    return emit("Mul", emit("Mul", value, inner), "half")


@pytest.mark.parametrize(
    ("block", "rules"),
    [
        (gelu_block, [gelu]),
        (
            lambda emit, v, i: emit("Mul", v, "half"),
            [gelu, rewrite(product(x, op.Tanh(y), 3))(lambda g: None)],
        ),
        (
            lambda emit, v, i: emit("Mul", emit("Mul", v, "x"), emit("Neg", "x")),
            [rewrite(product(x, x, y, op.Tanh(y)), product(x, x, y, x, y, 7))(lambda g: None)],
        ),
        (
            lambda emit, v, i: emit("Add", v, "x"),
            [rewrite(total(x, y, op.Tanh(x), -y))(lambda g: None)],
        ),
        (lambda emit, v, i: emit("Neg", v), [cancel]),
    ],
    ids=["gelus", "scales", "products", "sums", "collapsing"],
)
def test_cost_is_linear_in_the_graph(block, rules):
    small, large = (partial(apply_rules, chain_of(size, block), rules) for size in (100, 400))
    assert steps(large) < 6 * steps(small)  # 16 times as much if it were quadratic


def test_twenty_thousand_nodes_of_chained_gelus():
    subject = chain_of(4000, gelu_block)
    assert subject.node_count() == 20_000
    assert apply_rules(subject, [gelu]) == 4000
    assert {node.op_type for node in subject.graph.nodes} == {"Gelu"}


def test_a_hub_with_many_readers():
    def block(emit, value, index):
        hub = emit("Tanh", value) if index == 0 else "v0"
        return emit("Add", value, emit("Relu", hub))

    relu = rewrite(op.Relu(op.Tanh(x)))(lambda g: None)
    scale = rewrite(product(x, y, 3))(lambda g: None)
    small, large = (partial(apply_rules, chain_of(n, block), [relu, scale]) for n in (100, 400))
    assert steps(large) < 6 * steps(small)  # 16 times as much if it were quadratic


def test_an_attempt_has_a_budget():
    values = [var(f"x{i}") for i in range(9)]
    calls = 0

    def never(g, v):
        nonlocal calls
        calls += 1
        return False

    inputs = ", ".join(f"float a{i}" for i in range(9))
    names = ", ".join(f"a{i}" for i in range(9))
    subject = model(f"g ({inputs}) => (float y) {{ y = Max({names}) }}")
    rule = rewrite(op.Max(*values[:-1], values[-1].when(never)))(lambda g: None)
    assert apply_rules(subject, [rule]) == 0
    assert 0 < calls < 3000
    assert "gave up after" not in explain(subject, [rule])[0].reason


# Near misses -------------------------------------------------------------------------------------


def nearest(text: str, *rules):
    return explain(model(text), rules)[0]


def test_the_nearest_miss_tells_node_and_reason():
    miss = nearest(GELU.replace("half = {0.5}", "half = {0.4}"), gelu)
    assert (miss.rule, miss.matched, miss.total) == ("gelu", 4, 4)
    assert {m.reason for m in explain(model(GELU.replace("{0.5}", "{0.4}")), [gelu])} == {
        "expected constant 0.5, found 0.4",
        "expected constant 0.5, found 1",
    }
    miss = nearest(GELU.replace("one = {1}", "one = {2}"), gelu)
    assert (miss.node, miss.reason) == ("'one'", "expected constant 1, found constant 2")
    miss = nearest(GELU.replace("(float[2,N] y)", "(float[2,N] y, float[2,N] b)"), gelu)
    assert (miss.node, miss.reason) == ("Erf 'b'", "'b' is a graph output")
    miss = nearest(GELU.replace("Erf", "Tanh"), gelu)
    assert (miss.matched, miss.node) == (2, "Tanh 'b'")
    assert miss.reason == "expected Erf, found Tanh 'b'"
    assert str(miss).startswith("gelu at Mul '")


def test_reasons_of_functions_and_conditions():
    text = "g (float[2] a) => (float[2] y) { y = Relu(a) }"

    @rewrite(op.Relu(x))
    def declines(g, x):
        raise MatchFailure("too small to pay")

    def is_large(g, x):
        return False

    guarded = rewrite(op.Relu(x), name="guarded", when=is_large)(lambda g, x: x)
    assert nearest(text, declines).reason == "too small to pay"
    assert nearest(text, guarded).reason == "the rule's condition is_large does not hold"


def test_explaining_changes_nothing():
    subject = model(GELU)
    before = subject.to_proto().SerializeToString(deterministic=True)
    misses = explain(subject, [gelu])
    assert [m.root for m in misses] == ["Mul 'd'"]
    assert subject.to_proto().SerializeToString(deterministic=True) == before
    assert not len(subject.journal)
    assert subject.journal.rewrites == []


def test_misses_are_recorded_on_request():
    ctx = Context(misses=NearMisses())
    text = GELU.replace("y = Mul(d, half)", "e = Mul(d, half) f = Neg(e) y = Abs(f)")
    assert apply_rules(model(text), [gelu, cancel], ctx) == 1
    assert [(m.rule, m.root) for m in ctx.misses.list()] == [("cancel", "Neg 'f'")]


def test_a_pass_of_rules_records_too():
    ctx = Context(misses=NearMisses())
    gelu.run(model(GELU.replace("{0.5}", "{0.4}")), ctx)
    assert len(ctx.misses.list()) == 2


def test_a_rule_with_alternatives_tells_of_the_nearest():
    rule = rewrite(op.Relu(op.Tanh(x)), op.Relu(op.Sigmoid(op.Neg(x))), name="either")(
        lambda g: None
    )
    miss = nearest("g (float[2] a) => (float[2] y) { b = Exp(a) c = Sigmoid(b) y = Relu(c) }", rule)
    assert (miss.matched, miss.total, miss.reason) == (2, 3, "expected Neg, found Exp 'b'")


def test_bare_operands_do_not_count_as_nodes():
    rule = rewrite(op.Relu(product(op.Tanh(x), number("s"))))(lambda g, x, s: None)
    miss = nearest("g (float[2] a) => (float[2] y) { b = Exp(a) y = Relu(b) }", rule)
    assert (miss.matched, miss.total) == (1, 2)
