"""Rules: what their functions get and may return, and what happens when they decline or fail."""

from __future__ import annotations

from itertools import permutations
from math import pi, sqrt
from typing import Any

import numpy as np
import pytest
from checks import check, model
from hypothesis import given, settings, strategies as st

from toolkit import (
    EXACT,
    FLOAT,
    QUANT,
    Context,
    MatchFailure,
    Rules,
    const,
    maybe_cast,
    number,
    op,
    product,
    rewrite,
    total,
    var,
)
from toolkit.rewriting.rule import RuleError, apply_rules

x, y, z = var("x"), var("y"), var("z")


@rewrite(product(x, 0.5, op.Erf(product(x, 1 / sqrt(2))) + 1))
def gelu(g, x):
    """0.5 x (1 + erf(x / sqrt 2))"""
    return g.op("Gelu", x)


@rewrite(
    product(
        x,
        0.5,
        op.Tanh(product(total(x, product(x**3 | product(x, x, x), 0.044715)), sqrt(2 / pi))) + 1,
    )
)
def gelu_tanh(g, x):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))"""
    return g.op("Gelu", x, approximate="tanh")


@rewrite(op.Relu(op.Relu(x)), tolerance=EXACT)
def relu_twice(g, x):
    return g.op("Relu", x)


GELU = """g (float[2,N] x) => (float[2,N] y)
    <float root = {1.4142135}, float one = {1}, float half = {0.5}> {
        a = Div(x, root)
        b = Erf(a)
        c = Add(one, b)
        d = Mul(x, c)
        y = Mul(d, half)
    }"""


def test_a_formula_becomes_an_operator():
    check(gelu, GELU, "y = Gelu(x)")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("half = {0.5}", "half = {0.4}"),
        ("one = {1}", "one = {2}"),
        ("root = {1.4142135}", "root = {1.5}"),
        ("Erf", "Tanh"),
        ("Mul(x, c)", "Mul(a, c)"),
        ("Add(one, b)", "Sub(one, b)"),
        ("=> (float[2,N] y)", "=> (float[2,N] y, float[2,N] c)"),
        ("float half = {0.5}", "float[1,1,1] half = {0.5}"),
    ],
)
def test_what_looks_alike_is_left_alone(old, new):
    assert old in GELU
    check(gelu, GELU.replace(old, new), near_miss=True)


def test_a_rule_is_a_pass():
    assert gelu.name == "gelu"
    assert gelu.doc == "0.5 x (1 + erf(x / sqrt 2))"
    assert gelu.tolerance is FLOAT
    subject = model(GELU)
    gelu.run(subject, Context())
    assert subject.journal.places_by_rule() == {"gelu": ["y"]}


def test_rules_together_are_a_pass():
    both = Rules("both", (gelu, relu_twice))
    assert both.tolerance is FLOAT
    assert Rules("exact", (relu_twice,)).tolerance is EXACT
    assert Rules("wide", (relu_twice,), QUANT).tolerance is QUANT
    text = GELU.replace("y = Mul(d, half)", "e = Mul(d, half) f = Relu(e) y = Relu(f)")
    check(both, text, "g = Gelu(x) y = Relu(g)")


def test_the_value_of_a_graph_output_keeps_its_name_and_type():
    subject = check(gelu, GELU)
    assert subject.graph.outputs == ["y"]
    assert subject.graph.rank("y") == 2


def test_rules_apply_inside_subgraphs():
    text = """g (bool c, float[2] x) => (float[2] y) {
        y = If (c) <
            then_branch = h () => (float[2] p) { a = Relu(x) p = Relu(a) },
            else_branch = k () => (float[2] q) { b = Relu(x) d = Relu(b) q = Relu(d) }
        >
    }"""
    wanted = """g (bool c, float[2] x) => (float[2] y) {
        y = If (c) <
            then_branch = h () => (float[2] p) { p = Relu(x) },
            else_branch = k () => (float[2] q) { q = Relu(x) }
        >
    }"""
    check(relu_twice, text, wanted)


# What a function gets ----------------------------------------------------------------------------


def test_a_function_gets_what_it_asks_for():
    seen = {}

    @rewrite(op.Mul(op.LeakyRelu(x, alpha=var("alpha")).named("act"), number("s")) + const("w"))
    def probe(g, s, w, x, act, alpha, node, match, unused="default"):
        seen.update(s=s, w=w, x=x, act=act.op_type, alpha=alpha, root=node.op_type)
        seen.update(nodes=[n.op_type for n in match.nodes], unused=unused, name=match["x"])

    text = """g (float[2] a) => (float[2] y) <float h = {0.5}, float[2] v = {1, 2}> {
        b = LeakyRelu<alpha=0.25>(a) c = Mul(b, h) y = Add(c, v) }"""
    apply_rules(model(text), [probe])
    assert seen == {
        "s": 0.5,
        "w": "v",
        "x": "a",
        "act": "LeakyRelu",
        "alpha": 0.25,
        "root": "Add",
        "nodes": ["Add", "Mul", "LeakyRelu"],
        "unused": "default",
        "name": "a",
    }


def test_a_function_may_take_all_bindings():
    seen = {}

    @rewrite(op.Relu(x) | op.Tanh(y))
    def probe(g, **bindings):
        seen.update(bindings)

    apply_rules(model("g (float[2] a) => (float[2] b) { b = Relu(a) }"), [probe])
    assert seen == {"x": "a", "y": None}


def test_a_function_that_asks_for_what_is_not_bound():
    with pytest.raises(ValueError, match=r"rule 'f': its function asks for 'q', .* binds x, y"):

        @rewrite(x + y)
        def f(g, q): ...

    with pytest.raises(ValueError, match="takes no graph"):
        rewrite(x + y)(lambda: None)
    with pytest.raises(ValueError, match="needs a pattern"):
        rewrite()


def test_several_patterns_are_alternatives():
    @rewrite(op.Relu(op.Tanh(x)), op.Sigmoid(op.Neg(x)), name="pair")
    def rule(g, x):
        return g.op("Softsign", x)

    assert rule.name == "pair"
    body = "g (float[2] a) => (float[2] y) {{ b = {}(a) y = {}(b) }}"
    check(rule, body.format("Tanh", "Relu"), "y = Softsign(a)", run=False)
    check(rule, body.format("Neg", "Sigmoid"), "y = Softsign(a)", run=False)
    check(rule, body.format("Neg", "Relu"), near_miss=True)


# What a function may return ----------------------------------------------------------------------


def test_a_bound_value_may_be_returned():
    @rewrite(op.Neg(op.Neg(x)))
    def double_negation(g, x):
        return x

    check(
        double_negation,
        "g (float[2] a) => (float[2] y) { b = Neg(a) c = Neg(b) y = Abs(c) }",
        "y = Abs(a)",
    )
    check(
        double_negation,
        "g (float[2] a) => (float[2] y) { b = Neg(a) y = Neg(b) }",
        "y = Identity(a)",
    )


def test_an_identity_that_an_output_needs_stays():
    @rewrite(op.Identity(x))
    def identity(g, x):
        return x

    check(
        identity,
        "g (float[2] a) => (float[2] y) { b = Identity(a) c = Identity(b) y = Abs(c) }",
        "y = Abs(a)",
    )
    check(
        identity,
        "g (float[2] a) => (float[2] y) { b = Identity(a) y = Identity(b) }",
        "y = Identity(a)",
    )
    two = "g (float[2] a) => (float[2] y, float[2] z) { y = Abs(a) z = Identity(y) }"
    check(identity, two, near_miss=True)


SPLIT = "g (float[4] a) => (float[2] y, float[2] z) {{ b, c = Split<num_outputs=2>(a) {} }}"


def test_several_outputs():
    @rewrite(op.Split(op.Neg(x), num_outputs=2))
    def push_neg(g, x, node):
        split = g.add("Split", [x], 2, {"num_outputs": 2})
        return tuple(g.op("Neg", part) for part in split.output)

    text = (
        SPLIT.format("y = Abs(b) z = Abs(c)")
        .replace("{ b", "{ n = Neg(a) b")
        .replace("(a) y", "(n) y")
    )
    check(
        push_neg, text, "p, q = Split<num_outputs=2>(a) b = Neg(p) c = Neg(q) y = Abs(b) z = Abs(c)"
    )


def test_one_of_several_outputs():
    @rewrite(op.Split(x, num_outputs=2)[1])
    def second(g, x, node):
        if not g.is_unused(node.output[0]):
            raise MatchFailure("the first half is needed")
        start, end = g.constant(np.array([2])), g.constant(np.array([4]))
        return g.op("Slice", x, start, end)

    text = "g (float[4] a) => (float[2] z) { b, c = Split<num_outputs=2>(a) z = Abs(c) }"
    wanted = """g (float[4] a) => (float[2] z) <int64[1] s = {2}, int64[1] e = {4}> {
        c = Slice(a, s, e) z = Abs(c) }"""
    check(second, text, wanted)
    check(second, SPLIT.format("y = Abs(b) z = Abs(c)"), near_miss=True)

    @rewrite(op.Split(x, num_outputs=2))
    def leave_one(g, x, node):
        return None, g.op("Neg", node.output[1])

    with pytest.raises(RuleError, match="does not converge"):
        check(leave_one, SPLIT.format("y = Abs(b) z = Abs(c)"))


def test_a_node_may_be_edited_in_place():
    @rewrite(op.Sub(x, op.Neg(y)))
    def subtract_negative(g, node, x, y):
        g.set_op(node, "Add")
        g.set_inputs(node, [x, y])
        return node.output[0]

    text = "g (float[2] a, float[2] b) => (float[2] y) { n = Neg(b) y = Sub(a, n) }"
    check(subtract_negative, text, "y = Add(a, b)")


def test_a_function_that_returns_nonsense():
    text = "g (float[2] a) => (float[2] y) { y = Relu(a) }"
    wrong: dict[Any, str] = {
        "nowhere": "returned 'nowhere', which nothing",
        5: "returned 5, not the name",
        ("a", "a"): "returned 2 values for 1 outputs",
    }
    for result, message in wrong.items():
        rule = rewrite(op.Relu(x), name="odd")(lambda g, result=result: result)
        with pytest.raises(RuleError, match=f"rule 'odd' failed at Relu 'y': .*{message}"):
            apply_rules(model(text), [rule])


# Declining ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["none", "miss"])
def test_edits_before_declining_are_undone(how):
    @rewrite(op.Relu(op.Tanh(x)))
    def undecided(g, x, node):
        g.set_op(node, "Sigmoid")
        g.set_attr(node, "alpha", 1.0)
        g.op("Foo", x, domain="somewhere")
        g.constant(np.zeros(3, np.float32))
        g.replace(node.output[0], x)
        if how == "miss":
            raise MatchFailure("changed my mind")

    subject = model("g (float[2] a) => (float[2] y) { b = Tanh(a) c = Relu(b) y = Abs(c) }")
    before = subject.to_proto().SerializeToString(deterministic=True)
    assert apply_rules(subject, [undecided]) == 0
    assert subject.to_proto().SerializeToString(deterministic=True) == before
    assert not len(subject.journal)
    assert subject.journal.rewrites == []
    subject.graph.verify()


def test_declining_leaves_earlier_and_later_rewrites_alone():
    @rewrite(op.Relu(x))
    def first_only(g, x, node):
        new = g.op("Tanh", x)
        if node.output[0] == "c":
            raise MatchFailure("not this one")
        return new

    text = "g (float[2] a) => (float[2] y) { b = Relu(a) c = Relu(b) d = Relu(c) y = Abs(d) }"
    check(first_only, text, "b = Tanh(a) c = Relu(b) d = Tanh(c) y = Abs(d)", run=False)
    subject = model(text)
    apply_rules(subject, [first_only])
    assert [r.site for r in subject.journal.rewrites] == ["b", "d"]


def test_vetoed_rewrites_are_not_made():
    subject = model(
        """g (float[2] a) => (float[2] y, float[2] z) {
            b = Relu(a) y = Relu(b) c = Relu(a) z = Relu(c) }"""
    )
    apply_rules(subject, [relu_twice])
    (first, _) = subject.journal.rewrites
    subject.journal.rollback()
    subject.journal.veto(first)
    apply_rules(subject, [relu_twice])
    assert [r.site for r in subject.journal.rewrites] == ["z"]


def test_conditions_of_a_rule():
    @rewrite(x + y, when=lambda g, x, y: g.producer(x) is not None and g.producer(y) is None)
    def bias_on_the_right(g, x, y):
        return g.op("Sub", x, y)

    text = "g (float[2] a, float[2] b) => (float[2] y) {{ t = Tanh(a) y = Add({}) }}"
    for order in ("t, b", "b, t"):
        check(bias_on_the_right, text.format(order), "t = Tanh(a) y = Sub(t, b)", run=False)
    check(bias_on_the_right, text.format("t, t"), near_miss=True)


def test_opsets_of_a_rule():
    def rule(opset):
        return rewrite(op.Relu(x), opset=opset)(lambda g, x: g.op("Tanh", x))

    text = "g (float[2] a) => (float[2] y) { y = Relu(a) }"  # opset 21
    for opset, fires in {
        21: True,
        22: False,
        (1, 20): False,
        (20, 21): True,
        (22, None): False,
    }.items():
        assert apply_rules(model(text), [rule(opset)]) == fires


# Failing -----------------------------------------------------------------------------------------


def test_an_error_in_a_rule_names_the_rule_and_the_site():
    @rewrite(op.Relu(x))
    def broken(g, x):
        g.op("Tanh", x)
        raise KeyError("oops")

    @rewrite(op.Relu(var("x", where=lambda g, v: bool(1 / 0))))
    def broken_guard(g, x): ...

    subject = model("g (float[2] a) => (float[2] y) { y = Relu(a) }")
    with pytest.raises(
        RuleError, match="rule 'broken' failed at Relu 'y': KeyError: 'oops'"
    ) as info:
        apply_rules(subject, [broken])
    assert isinstance(info.value.__cause__, KeyError)
    assert not len(subject.journal)
    with pytest.raises(
        RuleError, match="rule 'broken-guard' failed at Relu 'y': ZeroDivisionError"
    ):
        apply_rules(subject, [broken_guard])


def test_a_rule_that_matches_its_own_result_is_stopped():
    @rewrite(op.Relu(x))
    def forever(g, x):
        return g.op("Relu", x)

    with pytest.raises(RuleError, match="rule 'forever' does not converge: 60 rewrites"):
        apply_rules(model("g (float[2] a) => (float[2] y) { y = Relu(a) }"), [forever])


def test_two_rules_that_undo_each_other_are_stopped():
    there = rewrite(op.Relu(x), name="there")(lambda g, x: g.op("Tanh", x))
    back = rewrite(op.Tanh(x), name="back")(lambda g, x: g.op("Relu", x))
    with pytest.raises(RuleError, match="does not converge"):
        apply_rules(model("g (float[2] a) => (float[2] y) { y = Relu(a) }"), [there, back])


# Spellings ---------------------------------------------------------------------------------------


class Writer:
    """Writes a formula as nodes, with the choices that a strategy makes."""

    def __init__(self, draw) -> None:
        self.draw = draw
        self.lines: list[str] = []
        self.constants: list[str] = []

    def node(self, text: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def constant(self, value: float) -> str:
        name = f"c{len(self.constants)}"
        shape = self.draw(st.sampled_from(["", "[1]"]))
        self.constants.append(f"float{shape} {name} = {{{value:.9g}}}")
        return name

    def flip(self) -> bool:
        return self.draw(st.booleans())

    def commute(self, kind: str, a: str, b: str) -> str:
        return self.node(f"{kind}({a}, {b})" if self.flip() else f"{kind}({b}, {a})")

    def scaled(self, value: str, factor: float) -> str:
        """value * factor, as a product or a quotient, perhaps through a negation."""
        if self.draw(st.integers(0, 4)) == 0:
            value, factor = self.node(f"Neg({value})"), -factor
        if self.flip():
            return self.node(f"Div({value}, {self.constant(1 / factor)})")
        return self.commute("Mul", value, self.constant(factor))

    def product(self, factors: list[str], constant: float) -> str:
        """The product of factors and a constant, in a random order and association."""
        parts: list[Any] = [*factors, constant]
        if self.flip():
            parts[-1:] = [constant * 4, 0.25]
        parts = list(self.draw(st.permutations(parts)))
        while len(parts) > 1:
            i = self.draw(st.integers(0, len(parts) - 2))
            a, b = parts[i], parts[i + 1]
            if isinstance(a, float) and isinstance(b, float):
                made: Any = a * b
            elif isinstance(a, float):
                made = self.scaled(b, a)
            elif isinstance(b, float):
                made = self.scaled(a, b)
            else:
                made = self.commute("Mul", a, b)
            parts[i : i + 2] = [made]
        return parts[0]

    def text(self, result: str) -> str:
        body = " ".join([*self.lines, f"y = Identity({result})"])
        return f"g (float[2,3] x) => (float[2,3] y) <{', '.join(self.constants)}> {{ {body} }}"


@st.composite
def gelu_spellings(draw):
    w = Writer(draw)
    inner = w.commute("Add", w.node(f"Erf({w.product(['x'], 1 / sqrt(2))})"), w.constant(1))
    return w.text(w.product(["x", inner], 0.5))


@st.composite
def tanh_gelu_spellings(draw):
    w = Writer(draw)
    cube = [w.node(f"Pow(x, {w.constant(3)})")] if w.flip() else ["x", "x", "x"]
    cubed = w.product(cube, 0.044715)
    inside = w.product([w.commute("Add", cubed, "x")], sqrt(2 / pi))
    return w.text(w.product(["x", w.commute("Add", w.node(f"Tanh({inside})"), w.constant(1))], 0.5))


@given(gelu_spellings())
@settings(max_examples=40, deadline=None)
def test_every_spelling_of_gelu_fuses_alike(text):
    check(gelu, text, "v = Gelu(x) y = Identity(v)")


@given(tanh_gelu_spellings())
@settings(max_examples=40, deadline=None)
def test_every_spelling_of_tanh_gelu_fuses_alike(text):
    check(gelu_tanh, text, 'v = Gelu<approximate="tanh">(x) y = Identity(v)')


@st.composite
def scaled_scores(draw):
    """softmax((s1 q) (s2 k) s3) v with s1 s2 s3 = 1/4, and casts that change nothing."""
    w = Writer(draw)
    parts = draw(st.permutations([0.5, 0.5, 1.0]))

    def side(value: str, scale: float) -> str:
        value = w.scaled(value, scale) if scale != 1 or w.flip() else value
        return w.node(f"Cast<to=1>({value})") if w.flip() else value

    scores = side(w.node(f"MatMul({side('q', parts[0])}, {side('k', parts[1])})"), parts[2])
    probs = w.node(f"Softmax({scores})")
    out = w.node(f"MatMul({probs}, v)")
    head = "g (float[3,4] q, float[4,3] k, float[3,4] v) => (float[3,4] y)"
    inits = f"<{', '.join(w.constants)}>" if w.constants else ""
    return f"{head} {inits} {{ {' '.join([*w.lines, f'y = Identity({out})'])} }}"


q, k, v = var("q"), var("k"), var("v")
queries, keys = product(q, number("s1")), product(k, number("s2"))
scores = product(op.MatMul(maybe_cast(queries), maybe_cast(keys)), number("s3"))


@rewrite(op.MatMul(op.Softmax(maybe_cast(scores)), v))
def attention(g, q, k, v, s1, s2, s3):
    return g.op("Attend", q, k, v, domain="test", scale=round(s1 * s2 * s3, 6))


@given(scaled_scores())
@settings(max_examples=40, deadline=None)
def test_a_scale_is_found_wherever_it_is_put(text):
    check(attention, text, "o = test.Attend<scale=0.25>(q, k, v) y = Identity(o)", run=False)


def test_all_orders_of_three_factors():
    rule = rewrite(product(op.Tanh(x), op.Relu(y), op.Abs(z)))(
        lambda g, x, y, z: g.op("Sum", x, y, z)
    )
    for a, b, c in permutations("tra"):
        for last in (f"m = Mul({a}, {b}) o = Mul(m, {c})", f"m = Mul({a}, {b}) o = Mul({c}, m)"):
            body = f"t = Tanh(i) r = Relu(j) a = Abs(k) {last}"
            text = f"g (float[2] i, float[2] j, float[2] k) => (float[2] o) {{ {body} }}"
            check(rule, text, "o = Sum(i, j, k)", run=False)
