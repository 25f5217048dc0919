"""The pattern language, word by word: what matches, what it binds, and what must not match."""

from __future__ import annotations

from math import inf, sqrt
from typing import Any

import numpy as np
import pytest
from checks import model
from onnx import TensorProto

from toolkit import const, maybe_cast, number, op, optional, product, rewrite, total, var
from toolkit.pattern import Pattern
from toolkit.rewriting.rule import Match, apply_rules, explain

x, y, z = var("x"), var("y"), var("z")


def find(pattern: Pattern, text: str) -> list[Match]:
    """All matches of `pattern`, in topological order of their roots."""
    hits: list[Match] = []

    @rewrite(pattern)
    def probe(g, match):
        hits.append(match)

    apply_rules(model(text), [probe])
    return hits


def bound(pattern: Pattern, text: str) -> dict[str, object]:
    """What the only match binds."""
    (match,) = find(pattern, text)
    return dict(match.bindings)


def reason(pattern: Pattern, text: str) -> str:
    """Why the nearest miss is one."""

    @rewrite(pattern)
    def probe(g): ...

    return explain(model(text), [probe])[0].reason


def unary(body: str, inits: str = "") -> str:
    head = "g (float[2,N] a, float[2,N] b) => (float[2,N] out)"
    return f"{head} <{inits}> {{ {body} }}" if inits else f"{head} {{ {body} }}"


# Operators and their inputs ----------------------------------------------------------------------


def test_operator_binds_its_inputs():
    text = unary("r = Relu(a) out = Sub(r, b)")
    assert bound(op.Sub(op.Relu(x), y), text) == {"x": "a", "y": "b"}
    assert not find(op.Sub(y, op.Relu(x)), text)
    assert not find(op.Sub(op.Tanh(x), y), text)


def test_inputs_of_commutative_operators_come_in_either_order():
    for body in ("r = Relu(a) out = Add(r, b)", "r = Relu(a) out = Add(b, r)"):
        assert bound(op.Relu(x) + y, unary(body)) == {"x": "a", "y": "b"}
    assert bound(
        op.Max(op.Relu(x), op.Tanh(y), z), unary("r = Relu(a) t = Tanh(b) out = Max(a, t, r)")
    )
    assert not find(op.Relu(x) + op.Tanh(y), unary("r = Relu(a) out = Add(r, r)"))


def test_python_operators_are_onnx_operators():
    cases = {
        "out = Sub(a, b)": x - y,
        "out = Div(a, b)": x / y,
        "out = Pow(a, b)": x**y,
        "c = Neg(a) out = Mul(c, b)": -x * y,
    }
    for body, pattern in cases.items():
        assert bound(pattern, unary(body)) == {"x": "a", "y": "b"}
    one = "float one = {1}"
    assert bound(1 - x, unary("out = Sub(one, a)", one)) == {"x": "a"}
    assert bound(1 / x, unary("out = Div(one, a)", one)) == {"x": "a"}
    assert bound(1**x, unary("out = Pow(one, a)", one)) == {"x": "a"}
    assert bound(1 * (1 + x), unary("c = Add(a, one) out = Mul(c, one)", one)) == {"x": "a"}


def test_other_domains_are_other_operators():
    text = unary("out = com.microsoft.FastGelu(a)")
    assert bound(op("com.microsoft").FastGelu(x), text) == {"x": "a"}
    assert not find(op.FastGelu(x), text)
    assert not find(op("com.microsoft").Relu(x), unary("out = Relu(a)"))
    assert bound(op("ai.onnx").Relu(x), unary("out = Relu(a)"))
    plus = "out = com.microsoft.Add(a, b)"
    assert not find(x + y, unary(plus))
    assert not find(product(x, y), unary("out = com.microsoft.Mul(a, b)"))


def test_any_of_several_operators():
    either = op.any("Relu", "Tanh")(x)
    assert bound(either, unary("out = Relu(a)")) == {"x": "a"}
    assert bound(either, unary("out = Tanh(a)")) == {"x": "a"}
    assert not find(either, unary("out = Sigmoid(a)"))


def test_omitted_and_further_inputs():
    six = "float six = {6}"
    upper = unary("out = Clip(a, , six)", six)
    assert bound(op.Clip(x, None, 6), upper) == {"x": "a"}
    assert not find(op.Clip(x, y, 6), upper)
    assert not find(op.Clip(x), upper)
    assert bound(op.Clip(x, ...), upper) == {"x": "a"}
    assert bound(op.Clip(x, None, None), unary("out = Clip(a)")) == {"x": "a"}
    assert bound(op.Clip(x, y | None, 6), upper) == {"x": "a", "y": None}
    assert reason(op.Clip(x), upper) == "Clip 'out' has more inputs than expected"
    with pytest.raises(TypeError, match="at the end only"):
        op.Concat(..., x)


def test_further_inputs_of_commutative_operators():
    text = unary("r = Relu(a) out = Sum(b, b, r)")
    assert bound(op.Sum(op.Relu(x), ...), text) == {"x": "a"}
    assert not find(op.Sum(op.Tanh(x), ...), text)


def test_outputs_of_one_node():
    text = """g (float[4] a) => (float[2] out) {
        p, q = Split<num_outputs=2>(a) s = Sigmoid(q) out = Mul(p, s) }"""
    split = op.Split(x, ...)
    assert bound(split[0] * op.Sigmoid(split[1]), text) == {"x": "a"}
    assert not find(split[1] * op.Sigmoid(split[0]), text)
    two = text.replace("s = Sig", "r, t = Split<num_outputs=2>(a) s = Sig").replace("(q)", "(t)")
    assert not find(split[0] * op.Sigmoid(split[1]), two)
    assert find(op.Split(x, ...)[0] * op.Sigmoid(op.Split(x, ...)[1]), two)


def test_a_pattern_object_stands_for_one_node():
    d = x - y
    same = unary("c = Sub(a, b) e = Tanh(c) out = Div(c, e)")
    again = unary("c = Sub(a, b) d = Sub(a, b) e = Tanh(d) out = Div(c, e)")
    assert bound(d / op.Tanh(d), same) == {"x": "a", "y": "b"}
    assert not find(d / op.Tanh(d), again)
    assert find((x - y) / op.Tanh(x - y), again)
    either = op.Sub(x, y) | op.Add(x, y)
    assert find(either / op.Tanh(either), same)
    assert not find(either / op.Tanh(either), again)


# Attributes --------------------------------------------------------------------------------------


def test_attributes_by_value_default_predicate_and_name():
    text = unary("out = LeakyRelu<alpha=0.2>(a)")
    assert find(op.LeakyRelu(x, alpha=0.2), text)
    assert not find(op.LeakyRelu(x, alpha=0.01), text)
    assert find(op.LeakyRelu(x, alpha=0.01), unary("out = LeakyRelu(a)"))
    assert find(op.LeakyRelu(x, alpha=lambda alpha: alpha < 1), text)
    assert not find(op.LeakyRelu(x, alpha=lambda alpha: alpha > 1), text)
    alpha = bound(op.LeakyRelu(x, alpha=var("slope")), text)["slope"]
    assert alpha == pytest.approx(0.2)
    assert reason(op.LeakyRelu(x, alpha=0.5), text).endswith("not 0.5")


def test_attributes_of_other_kinds():
    turned = "g (float[2,3] a) => (float[3,2] out) { out = Transpose<perm=[1,0]>(a) }"
    assert find(op.Transpose(x, perm=[1, 0]), turned)
    assert find(op.Transpose(x, perm=(1, 0)), turned)
    assert not find(op.Transpose(x, perm=[0, 1]), turned)
    assert not find(op.Transpose(x, perm=None), turned)
    plain = turned.replace("<perm=[1,0]>", "")
    assert find(op.Transpose(x, perm=None), plain)
    assert bound(op.Transpose(x, perm=var("p")), plain)["p"] is None
    gelu = unary('out = Gelu<approximate="tanh">(a)')
    assert find(op.Gelu(x, approximate="tanh"), gelu)
    assert not find(op.Gelu(x, approximate="none"), gelu)
    assert find(op.Gelu(x, approximate="none"), unary("out = Gelu(a)"))


def test_one_name_for_two_attributes_is_one_value():
    pattern = op.Concat(op.Concat(x, y, axis=var("axis")), z, axis=var("axis"))
    nested = """g (float[2,2] a) => (float[?,?] out) {{
        c = Concat<axis={}>(a, a) out = Concat<axis={}>(c, c) }}"""
    assert not find(pattern, nested.format(0, 1))
    chain = nested.replace("(c, c)", "(c, a)")
    assert find(pattern, chain.format(1, 1))
    assert not find(pattern, chain.format(0, 1))


def test_the_default_is_that_of_the_models_opset():
    softmax = """<ir_version: 7, opset_import: ["" : {}]>
        g (float[2,3] a) => (float[2,3] out) {{ out = Softmax(a) }}"""
    assert find(op.Softmax(x, axis=-1), softmax.format(13))
    assert find(op.Softmax(x, axis=1), softmax.format(11))
    assert not find(op.Softmax(x, axis=-1), softmax.format(11))


# Constants ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelled", ["float c = {0.5}", "float[1] c = {0.5}", "float[1,1] c = {0.5}"]
)
def test_numbers_match_constants_of_one_element(spelled):
    assert bound(x * 0.5, unary("out = Mul(c, a)", spelled)) == {"x": "a"}
    assert not find(x * 0.25, unary("out = Mul(c, a)", spelled))


def test_numbers_do_not_match_tensors_or_values():
    assert not find(x * 0.5, unary("out = Mul(c, a)", "float[2,1] c = {0.5, 0.5}"))
    assert not find(x * 0.5, unary("out = Mul(a, b)"))
    assert reason(op.Relu(x) * 0.5, unary("r = Relu(a) out = Mul(r, c)", "float c = {0.4}")) == (
        "expected constant 0.5, found constant 0.4"
    )


def test_a_number_must_not_raise_the_rank():
    text = "g (float[N] a) => (float[?] out) <float[1,1] c = {0.5}> { out = Mul(a, c) }"
    assert not find(x * 0.5, text)
    assert not find(product(x, 0.5), text)
    assert reason(x * 0.5, text) == "constant 'c' raises the rank of the result"
    scalar = text.replace("float[N]", "float").replace("[1,1]", "[1]")
    assert not find(x * 0.5, scalar)
    unknown = unary("n = com.microsoft.Mystery(a) out = Mul(n, c)", "float[1,1] c = {0.5}")
    assert not find(op.Mul(x, 0.5), unknown)
    assert find(op.Mul(x, 0.5), unknown.replace("[1,1]", "[1]"))


def test_numbers_know_what_their_type_can_hold():
    half = "g (float16[2] a) => (float16[2] out) <float16 c = {{{}}}> {{ out = Mul(a, c) }}"
    root = 1 / sqrt(2)
    assert find(x * root, half.format(14760))  # the bits of 0.70703
    assert not find(x * root, half.format(14746))  # 0.7002
    single = unary("out = Mul(a, c)", "float c = {0.7070}")
    assert not find(x * root, single)
    assert find(x * root, unary("out = Mul(a, c)", "float c = {0.70710677}"))
    ints = "g (int64[2] a) => (int64[2] out) <int64 c = {3}> { out = Mul(a, c) }"
    assert find(x * 3, ints)
    assert not find(x * 3.00001, ints)


def test_infinite_numbers():
    text = unary("out = Max(a, c)", "float c = {-inf}")
    assert find(op.Max(x, -inf), text)
    assert not find(op.Max(x, inf), text)
    assert not find(op.Max(x, -3e38), text)
    assert not find(op.Max(x, -inf), unary("out = Max(a, c)", "float c = {-3e38}"))


def test_numbers_in_constant_nodes_of_any_form():
    for form in ("value_float=0.5", "value=float {0.5}", "value_floats=[0.5]"):
        assert find(x * 0.5, unary(f"c = Constant<{form}>() out = Mul(a, c)"))


def test_number_binds_a_float():
    text = unary("out = Mul(c, a)", "float c = {0.5}")
    assert bound(x * number("s"), text) == {"x": "a", "s": 0.5}
    assert not find(x * number("s", where=lambda s: s > 1), text)
    assert not find(op.Mul(x, number("s")), unary("out = Mul(a, b)"))
    twice = unary("c = Mul(a, p) out = Add(c, q)", "float p = {0.5}, float q = {0.5}")
    assert bound(x * number("s") + number("s"), twice)["s"] == 0.5
    assert not find(x * number("s") + number("s"), twice.replace("q = {0.5}", "q = {0.6}"))


def test_lists_match_vectors():
    text = "g (float[2,3] a) => (float[6] out) <int64[1] s = {-1}> { out = Reshape(a, s) }"
    assert find(op.Reshape(x, [-1]), text)
    assert not find(op.Reshape(x, [6]), text)
    assert not find(op.Reshape(x, [-1, 1]), text)
    assert (
        reason(op.Reshape(x, [0, -1]), text) == "expected constant [0.0, -1.0], found constant -1"
    )
    assert not find(
        op.Reshape(x, [-1]), text.replace("int64[1] s", "int64[2] s").replace("{-1}", "{2,3}")
    )


def test_const_binds_constants_only():
    text = unary("out = Mul(c, a)", "float[2,1] c = {1, 2}")
    assert bound(x * const("w"), text) == {"x": "a", "w": "c"}
    assert find(x * const("w", rank=2, dtype=TensorProto.FLOAT), text)
    assert find(x * const("w", rank=(1, 2)), text)
    assert not find(x * const("w", rank=1), text)
    assert not find(x * const("w", dtype=TensorProto.FLOAT16), text)
    assert find(x * const("w", where=lambda w: w.min() > 0), text)
    assert not find(x * const("w", where=lambda w: w.min() > 1), text)
    assert not find(x * const("w"), unary("out = Mul(a, b)"))


def test_an_initializer_that_can_be_fed_is_no_constant():
    text = "g (float[2] a, float c) => (float[2] out) <float c = {0.5}> { out = Mul(a, c) }"
    assert not find(x * 0.5, text)
    assert not find(x * const("w"), text)


# Variables ---------------------------------------------------------------------------------------


def test_one_name_is_one_value():
    assert find(x * x, unary("out = Mul(a, a)"))
    assert not find(x * x, unary("out = Mul(a, b)"))
    assert reason(x * op.Tanh(x), unary("c = Tanh(b) out = Mul(a, c)")) == (
        "expected 'b' again as 'x', found 'a'"
    )


def test_one_name_is_one_constant_by_contents():
    text = unary("c = Mul(a, p) out = Add(c, q)", "float[2,1] p = {1, 2}, float[2,1] q = {1, 2}")
    assert bound(x * const("w") + const("w"), text)["x"] == "a"
    assert bound(x * y + y, text)["y"] in ("p", "q")
    other = text.replace("q = {1, 2}", "q = {1, 3}")
    assert not find(x * const("w") + const("w"), other)
    assert not find(x * y + y, other)
    reshaped = text.replace("[2,1] q", "[1,2] q")
    assert not find(x * const("w") + const("w"), reshaped)


def test_guards_of_variables():
    text = unary("out = Relu(a)")
    assert find(op.Relu(var("x", rank=2, dtype=TensorProto.FLOAT)), text)
    assert not find(op.Relu(var("x", rank=3)), text)
    assert not find(op.Relu(var("x", dtype=(TensorProto.INT64, TensorProto.FLOAT16))), text)
    assert find(op.Relu(var("x", where=lambda g, v: g.is_input(v))), text)
    assert not find(op.Relu(var("x", where=lambda g, v: g.is_const(v))), text)
    assert reason(op.Relu(var("x", rank=3)), text) == "'a' has rank 2, not 3"
    assert (
        reason(op.Relu(var("x", dtype=TensorProto.INT64)), text)
        == "'a' is of type float, not int64"
    )
    unknown = unary("n = com.microsoft.Mystery(a) out = Relu(n)")
    assert reason(op.Relu(var("x", rank=2)), unknown) == "'n' has an unknown rank, not 2"


def test_variables_without_a_name_bind_nothing():
    assert bound(op.Mul(var(), var()), unary("out = Mul(a, b)")) == {}


def test_when_guards_any_pattern():
    text = unary("r = Relu(a) out = Add(r, b)")
    assert find(op.Relu(x).when(lambda g, v: v == "r") + y, text)
    assert not find(op.Relu(x).when(lambda g, v: v != "r") + y, text)
    why = reason(op.Relu(x).when(lambda g, v: False, "heads divide evenly") + y, text)
    assert why == "'r' does not satisfy the condition heads divide evenly"


def test_named_binds_the_node():
    text = unary("r = LeakyRelu<alpha=0.3>(a) out = Add(r, b)")
    node: Any = bound(op.LeakyRelu(x).named("act") + y, text)["act"]
    assert node.op_type == "LeakyRelu"
    assert bound(product(op.LeakyRelu(x).named("act"), number("s")) + y, text)["act"] is not None


# Composition -------------------------------------------------------------------------------------


def test_alternatives_leave_the_other_names_unbound():
    either = (op.Relu(x) | op.Tanh(y)) + z
    assert bound(either, unary("r = Relu(a) out = Add(r, b)")) == {"x": "a", "y": None, "z": "b"}
    assert bound(either, unary("r = Tanh(a) out = Add(r, b)")) == {"x": None, "y": "a", "z": "b"}
    assert not find(either, unary("r = Sigmoid(a) out = Add(r, b)"))


def test_alternatives_are_tried_in_order_and_taken_back():
    pattern = op.Add(op.Mul(x, y) | op.Mul(y, x), x)
    assert bound(pattern, unary("c = Mul(a, b) out = Add(c, b)")) == {"x": "b", "y": "a"}


def test_alternative_roots():
    either = op.Relu(x) | op.Tanh(x) | product(x, 2)
    assert find(either, unary("out = Relu(a)"))
    assert find(either, unary("out = Add(a, a)")) == []
    assert find(either, unary("out = Mul(two, a)", "float two = {2}"))


def test_optional_wrappers():
    pattern = op.Relu(maybe_cast(op.Tanh(x)))
    assert bound(pattern, unary("t = Tanh(a) out = Relu(t)")) == {"x": "a"}
    cast = "t = Tanh(a) c = Cast<to=10>(t) r = Relu(c) out = Cast<to=1>(r)"
    assert bound(pattern, unary(cast)) == {"x": "a"}
    assert not find(
        pattern, unary(cast.replace("Relu(c)", "Relu(d)").replace("r =", "d = Cast<to=10>(c) r ="))
    )
    assert bound(op.Relu(maybe_cast(x)), unary("c = Cast<to=1>(a) out = Relu(c)")) == {"x": "a"}
    several = op.Relu(optional([op.Cast, op.Identity], op.Tanh(x)))
    assert find(several, unary("t = Tanh(a) i = Identity(t) out = Relu(i)"))
    assert find(
        op.Relu(optional(op.Reshape, op.Tanh(x))),
        unary("t = Tanh(a) i = Reshape(t, s) out = Relu(i)", "int64[2] s = {2, -1}"),
    )


def test_an_optional_wrapper_that_is_read_elsewhere_is_left_out():
    text = unary("c = Cast<to=1>(a) r = Relu(c) out = Add(r, c)")
    assert bound(op.Relu(maybe_cast(x)), text) == {"x": "c"}


def test_optional_at_the_root():
    pattern = maybe_cast(op.Relu(op.Tanh(x)))
    shared = "t = Tanh(a) r = Relu(t) c = Cast<to=1>(r) out = Add(c, {})"
    assert [m.root.op_type for m in find(pattern, unary(shared.format("b")))] == ["Relu", "Cast"]
    assert [m.root.op_type for m in find(pattern, unary(shared.format("r")))] == ["Relu"]


# What lies inside --------------------------------------------------------------------------------


PAIR = op.Relu(op.Tanh(x))


def test_an_inner_value_must_not_be_read_outside():
    text = unary("t = Tanh(a) r = Relu(t) out = Add(r, t)")
    assert not find(PAIR, text)
    assert reason(PAIR, text) == "Tanh 't' is used outside the match by Add 'out'"
    assert bound(op.Relu(op.Tanh(x).shared()), text) == {"x": "a"}


def test_an_inner_value_may_be_read_twice_inside():
    t = op.Tanh(x)
    assert find(op.Relu(t) + t, unary("t = Tanh(a) r = Relu(t) out = Add(r, t)"))


def test_an_inner_value_must_not_be_a_graph_output():
    text = "g (float[2] a) => (float[2] out, float[2] t) { t = Tanh(a) out = Relu(t) }"
    assert not find(PAIR, text)
    assert reason(PAIR, text) == "'t' is a graph output"
    assert find(op.Relu(op.Tanh(x).shared()), text)


CAPTURING = """
    g (bool c, float[2] a) => (float[2] out, float[2] i) {
        t = Tanh(a)
        out = Relu(t)
        i = If (c) <
            then_branch = h () => (float[2] p) { p = Exp(t) },
            else_branch = k () => (float[2] q) { q = Identity(a) }
        >
    }"""


def test_an_inner_value_must_not_be_captured():
    assert not find(PAIR, CAPTURING)
    assert reason(PAIR, CAPTURING) == "'t' is used by a subgraph"
    assert find(op.Relu(op.Tanh(x).shared()), CAPTURING)
    assert not find(product(op.Tanh(x), 2), CAPTURING.replace("Relu(t)", "Add(t, t)"))


def test_products_stop_at_captured_values_and_outputs():
    inits = "<float two = {2}>"
    scaled = CAPTURING.replace("{\n        t = Tanh(a)", inits + " {\n        t = Mul(a, two)", 1)
    scaled = scaled.replace("Relu(t)", "Mul(t, two)")
    assert bound(product(x, 2), scaled.replace("Mul(t, two)", "Relu(t)")) == {"x": "a"}
    assert not find(product(x, 4), scaled)
    assert {m["x"] for m in find(product(x, 2), scaled)} == {"a", "t"}


def test_nodes_of_an_outer_graph_are_not_matched():
    text = CAPTURING.replace("out = Relu(t)", "out = Identity(a)").replace("Exp(t)", "Relu(t)")
    assert not find(PAIR, text)
    assert bound(op.Relu(x), text) == {"x": "t"}


def test_constants_of_an_outer_graph_are():
    text = CAPTURING.replace(
        "=> (float[2] out, float[2] i) {", "=> (float[2] out, float[2] i) <float h = {0.5}> {"
    )
    assert bound(x * 0.5, text.replace("Exp(t)", "Mul(t, h)")) == {"x": "t"}


# Products and sums -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "t = Tanh(b) c = Mul(a, t) out = Mul(c, half)",
        "t = Tanh(b) c = Mul(t, half) out = Mul(c, a)",
        "t = Tanh(b) c = Div(t, two) out = Mul(a, c)",
        "t = Tanh(b) n = Neg(t) c = Mul(a, minus) out = Mul(c, n)",
        "t = Tanh(b) c = Mul(two, t) d = Mul(quarter, a) out = Mul(c, d)",
    ],
)
def test_products_in_any_order_and_association(body):
    inits = "float half = {0.5}, float two = {2}, float minus = {-0.5}, float quarter = {0.25}"
    text = unary(body, inits)
    (match,) = find(product(x, 0.5, op.Tanh(y)), text)
    assert match.bindings == {"x": "a", "y": "b"}
    assert not find(product(x, 0.25, op.Tanh(y)), text)
    assert [m for m in find(product(x, op.Tanh(y)), text) if m.root.output[0] == "out"] == []


def test_a_product_looks_only_through_values_read_once():
    text = unary("c = Mul(a, b) d = Mul(c, two) out = Add(c, d)", "float two = {2}")
    assert {m["x"] for m in find(product(x, 2), text)} == {"c"}
    assert not find(product(x, y, 2), text)


def test_an_operand_may_itself_be_a_product():
    text = unary("c = Mul(a, three) out = Mul(c, two)", "float two = {2}, float three = {3}")
    assert bound(product(x, 6), text) == {"x": "a"}
    assert bound(product(x, 2), text) == {"x": "c"}
    assert not find(product(x, 5), text)
    both = unary("c = Mul(a, b) out = Mul(c, two)", "float two = {2}")
    assert bound(product(x, y, 2), both).keys() == {"x", "y"}
    assert bound(product(x, 2), both) == {"x": "c"}


def test_divisors():
    inits = "float one = {1}, float two = {2}"
    pattern = product(x, 1 / op.Sqrt(y), 2)
    for body in (
        "s = Sqrt(b) c = Mul(a, two) out = Div(c, s)",
        "s = Sqrt(b) r = Reciprocal(s) c = Mul(r, a) out = Mul(two, c)",
        "s = Sqrt(b) r = Div(two, s) out = Mul(a, r)",
        "s = Sqrt(b) r = Div(s, two) out = Div(a, r)",
    ):
        (match,) = [m for m in find(pattern, unary(body, inits)) if m.root.output[0] == "out"]
        assert match.bindings == {"x": "a", "y": "b"}
    assert not find(pattern, unary("s = Sqrt(b) c = Mul(a, two) out = Mul(c, s)", inits))


def test_integer_division_is_no_product():
    text = (
        "g (int64[2] a) => (int64[2] out) <int64 two = {2}> { c = Div(a, two) out = Mul(c, two) }"
    )
    assert not find(product(x, 1), text)
    assert not find(product(x, 0.5), text)
    assert bound(product(x, 2), text) == {"x": "c"}


def test_numbers_of_a_product_are_bound_together():
    inits = "float eighth = {0.125}, float two = {2}"
    text = unary("t = Tanh(a) c = Mul(t, eighth) out = Mul(c, two)", inits)
    pattern = op.Relu(product(op.Tanh(x), number("s")))
    relu = text.replace("out = Mul(c, two)", "d = Mul(c, two) out = Relu(d)")
    assert bound(pattern, relu) == {"x": "a", "s": 0.25}
    assert bound(pattern, unary("t = Tanh(a) out = Relu(t)")) == {"x": "a", "s": 1.0}
    assert (
        bound(op.Relu(total(op.Tanh(x), number("s"))), unary("t = Tanh(a) out = Relu(t)"))["s"] == 0
    )
    assert not find(op.Relu(product(op.Tanh(x), number("s", where=lambda s: s > 1))), relu)


def test_a_bare_operand_of_a_product_keeps_its_own_rules():
    pattern = op.Relu(product(op.Tanh(x), number("s")))
    assert not find(pattern, unary("t = Tanh(a) r = Relu(t) out = Add(r, t)"))


def test_constants_of_a_product_that_are_asked_for_by_name():
    vector = "float[2,1] w = {1, 2}, float half = {0.5}"
    text = unary("c = Mul(a, w) out = Mul(c, half)", vector)
    assert bound(product(x, const("w"), 0.5), text) == {"x": "a", "w": "w"}
    scalar = unary("out = Mul(a, half)", vector)
    assert bound(product(x, const("w")), scalar) == {"x": "a", "w": "half"}
    assert not find(product(x, const("w")), unary("out = Mul(a, b)"))


def test_sums():
    inits = "float one = {1}, float two = {2}, float three = {3}"
    pattern = total(op.Tanh(x), -op.Relu(y), 2)
    for body in (
        "t = Tanh(a) r = Relu(b) c = Sub(t, r) out = Add(c, two)",
        "t = Tanh(a) r = Relu(b) c = Sub(r, two) out = Sub(t, c)",
        "t = Tanh(a) r = Relu(b) n = Neg(r) out = Sum(n, two, t)",
        "t = Tanh(a) r = Relu(b) c = Add(three, t) d = Add(r, one) out = Sub(c, d)",
    ):
        (match,) = [m for m in find(pattern, unary(body, inits)) if m.root.output[0] == "out"]
        assert match.bindings == {"x": "a", "y": "b"}
    assert not find(
        pattern, unary("t = Tanh(a) r = Relu(b) c = Add(t, r) out = Add(c, two)", inits)
    )
    assert not find(
        pattern, unary("t = Tanh(a) r = Relu(b) c = Sub(t, r) out = Add(c, one)", inits)
    )


def test_the_constant_of_a_sum_is_zero_unless_stated():
    text = unary("c = Add(a, one) out = Add(c, b)", "float one = {1}")
    assert bound(total(x, y, 1), text).keys() == {"x", "y"}
    assert {m["x"] for m in find(total(x, y), text)} | {
        m["y"] for m in find(total(x, y), text)
    } == {"b", "c"}


def test_nested_products_dissolve():
    text = unary("c = Mul(a, two) d = Mul(a, a) out = Mul(c, d)", "float two = {2}")
    assert find(product(product(x, x, x), 2), text)
    assert find(product(x**3 | product(x, x, x), 2), text)
    power = unary("c = Pow(a, three) out = Mul(c, two)", "float two = {2}, float three = {3}")
    assert find(product(x**3 | product(x, x, x), 2), power)
    quotient = unary("c = Div(a, two) out = Div(c, b)", "float two = {2}")
    assert bound(product(x, 1 / product(y, 2)), quotient) == {"x": "a", "y": "b"}
    sums = unary("c = Add(a, two) out = Sub(c, b)", "float two = {2}")
    assert bound(total(x, -total(y, -2)), sums) == {"x": "a", "y": "b"}


# Mistakes ----------------------------------------------------------------------------------------


def test_mistakes_in_a_pattern_are_said_when_it_is_made():
    with pytest.raises(TypeError, match="is not a pattern"):
        op.Relu("x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="an operand that is not a number"):
        product(2, 3)
    with pytest.raises(ValueError, match="must be finite and nonzero"):
        product(x, 0)
    with pytest.raises(ValueError, match="cannot be distinguished"):
        product(x, number("s"), number("t"))
    with pytest.raises(ValueError, match="either binds its constants by"):
        product(x, 2, number("s"))
    with pytest.raises(ValueError, match="rule 'r': the root of a pattern must be an operator"):
        rewrite(var("x"), name="r")(lambda g, x: x)
    with pytest.raises(ValueError, match="'x' names both"):
        rewrite(op.Mul(var("x"), number("x")))(lambda g, x: x)
    with pytest.raises(ValueError, match="of one domain"):
        optional([op.Cast, op("com.microsoft").Cast], x)


def test_numpy_numbers_are_numbers():
    half: Any = np.float32(0.5)
    assert find(x * half, unary("out = Mul(a, c)", "float c = {0.5}"))
    assert find(half * x, unary("out = Mul(a, c)", "float c = {0.5}"))
    assert find(x * np.array([1.0, 2.0]), unary("out = Mul(a, c)", "float[2] c = {1, 2}"))
