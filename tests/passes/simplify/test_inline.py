"""Inlining of functions and constant branches; lifting of Constant nodes."""

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from checks import check
from onnx import ModelProto, parser

from passes.simplify.control_flow.branches import InlineBranches
from passes.simplify.inline import InlineFunctions
from passes.simplify.lift_constants import LiftConstants
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

FUNCTIONS = """
    <ir_version: 9, opset_import: ["" : 18, "my" : 1]>
    main (float[N, 4] x, bool c) => (float[N, 4] y)
    {
      t = my.twice <k = 3.0> (x)
      u = my.twice (t)
      y = If (c) <
        then_branch = yes () => (float[N, 4] p) { p = my.outer (u, x) },
        else_branch = no () => (float[N, 4] q) { q = my.outer (t) }
      >
    }
    <domain: "my", opset_import: ["" : 18]>
    twice <k: float = 2.0> (t) => (r) {
      f = Constant <value_float: float = @k> ()
      r = Mul(t, f)
    }
    <domain: "my", opset_import: ["" : 18, "my" : 1]>
    outer (t, y) => (r) {
      d = my.twice <k = 5.0> (t)
      r = my.through (d)
    }
    <domain: "my", opset_import: ["" : 18]>
    through (t) => (t) { unused = Neg(t) }
"""


def run(proto: ModelProto, feeds: dict[str, np.ndarray]) -> Any:
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


def test_nested_calls_with_attributes_in_subgraphs() -> None:
    proto = parser.parse_model(FUNCTIONS)
    model = Model.from_proto(proto)
    InlineFunctions().run(model, Context())
    model.graph.verify()
    assert not model.functions
    assert not any(n.domain for g in model.graphs() for n in g.nodes)
    for c in (True, False):
        feeds = {"x": np.ones((2, 4), np.float32), "c": np.array(c)}
        expected = 3 * 2 * 5 if c else 3 * 5
        np.testing.assert_array_equal(run(model.inlined_proto(), feeds), expected)
    model.rollback()
    assert model.to_proto() == proto


def test_a_function_of_another_opset_is_kept_when_it_means_something_else() -> None:
    text = """
        <ir_version: 9, opset_import: ["" : 18, "my" : 1]>
        main (float[2, 3] x) => (float[2] y) { y = my.total (x) }
        <domain: "my", opset_import: ["" : 12]>
        total (x) => (r) { r = ReduceSum <axes = [1], keepdims = 0> (x) }
    """
    model = Model.from_proto(parser.parse_model(text))
    ctx = Context()
    InlineFunctions().run(model, ctx)
    assert len(model.functions) == 1
    assert "ReduceSum differs between opsets 12 and 18" in ctx.notes[0]
    same = Model.from_proto(
        parser.parse_model(
            text.replace("ReduceSum <axes = [1], keepdims = 0>", "Abs").replace(
                '"" : 12', '"" : 13'
            )
        )
    )
    InlineFunctions().run(same, Context())
    assert not same.functions


def test_constant_condition_takes_its_branch() -> None:
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[N, 4] x, bool d) => (float[N, 4] y, float[N, 4] z)
        <bool c = {COND}, float[4] b = {1, 2, 3, 4}>
        {
          a = Add(x, b)
          y, z = If (c) <
            then_branch = yes () => (float[N, 4] t, float[N, 4] s)
              <float[4] k = {5, 5, 5, 5}> { t = Mul(a, k)  s = Neg(t) },
            else_branch = no () => (float[N, 4] e, float[N, 4] f) {
              i = If (d) <
                then_branch = yes2 () => (float[N, 4] u) { k = Abs(a)  u = Neg(k) },
                else_branch = no2 () => (float[N, 4] v) { k = Exp(a)  v = Neg(k) }
              >
              e = Add(i, x)
              f = Sub(i, x)
            }
          >
        }
    """
    for cond, left in (("1", ["Add", "Mul", "Neg"]), ("0", ["Add", "If", "Add", "Sub"])):
        before = parser.parse_model(text.replace("COND", cond))
        model = Model.from_proto(before)
        InlineBranches().run(model, Context())
        model.graph.verify()
        assert [n.op_type for n in model.graph.nodes] == left
        assert model.graph.outputs == ["y", "z"]
        feeds = {"x": np.random.default_rng(0).random((2, 4), np.float32), "d": np.array(True)}
        np.testing.assert_array_equal(run(model.inlined_proto(), feeds), run(before, feeds))


def test_a_branch_that_returns_a_captured_value() -> None:
    before = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[4] x) => (float[4] y) <bool c = {1}>
        {
          y = If (c) <
            then_branch = yes () => (float[4] t) { t = Identity(x) },
            else_branch = no () => (float[4] e) { e = Neg(x) }
          >
        }
    """)
    model = Model.from_proto(before)
    InlineBranches().run(model, Context())
    model.graph.verify()
    feeds = {"x": np.arange(4, dtype=np.float32)}
    np.testing.assert_array_equal(run(model.inlined_proto(), feeds), feeds["x"])


def test_a_constant_output_of_a_branch_is_lifted() -> None:
    """`constants`, which runs before, leaves it: a graph output needs a producer."""
    model = check(
        InlineBranches(),
        """
        agraph (float[2] x) => (float[2] y, float z) <bool c = {1}>
        {
          t, z = If (c) <
            then_branch = yes () => (float[2] p, float q)
              { p = Constant <value_floats = [1.0, 2.0]> ()  q = Constant <value_float = 3.0> () },
            else_branch = no () => (float[2] r, float s)
              { r = Neg (x)  s = Constant <value_float = 4.0> () }
          >
          y = Add (x, t)
        }
        """,
        """
        agraph (float[2] x) => (float[2] y, float z) <bool c = {1}, float[2] p = {1, 2}>
        { z = Constant <value_float = 3.0> ()  y = Add (x, p) }
        """,
    )
    assert sorted(n.op_type for n in model.graph.nodes) == ["Add", "Constant"]


def test_an_if_with_a_computed_condition_stays() -> None:
    check(
        InlineBranches(),
        """
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[4] x, bool c) => (float[4] y)
        {
          y = If (c) <
            then_branch = yes () => (float[4] t) { t = Abs(x) },
            else_branch = no () => (float[4] e) { e = Neg(x) }
          >
        }
        """,
        near_miss=True,
    )


def test_constants_are_lifted_under_their_name() -> None:
    check(
        LiftConstants(),
        """
        <ir_version: 8, opset_import: ["" : 17]> main (float[2] x) => (float[2] y, float k)
        { c = Constant <value = float[2] {1, 2}> ()
          k = Constant <value_float: float = 0.5> ()
          y = Add(x, c) }
        """,
        """
        <ir_version: 8, opset_import: ["" : 17]> main (float[2] x) => (float[2] y, float k)
        <float[2] c = {1, 2}>
        { k = Constant <value_float: float = 0.5> ()
          y = Add(x, c) }
        """,
    )


def test_one_inner_value_as_two_results() -> None:
    before = parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 18, "my" : 1]>
        main (float[4] x) => (float[4] y, float[4] z, float[4] v, float[4] w) <bool c = {1}>
        {
          y, z = If (c) <
            then_branch = yes () => (float[4] t, float[4] t) { t = Abs(x) },
            else_branch = no () => (float[4] e, float[4] f) { e = Neg(x)  f = Exp(x) }
          >
          v, w = my.both (x)
        }
        <domain: "my", opset_import: ["" : 18]> both (a) => (r, r) { r = Neg(a) }
    """)
    model = Model.from_proto(before)
    InlineFunctions().run(model, Context())
    InlineBranches().run(model, Context())
    model.graph.verify()
    assert not any(n.op_type in ("If", "both") for n in model.graph.nodes)
    x = np.array([-1, 2, -3, 4], np.float32)
    session = ort.InferenceSession(
        model.inlined_proto().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for result, expected in zip(session.run(None, {"x": x}), (abs(x), abs(x), -x, -x), strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("y = my.f (x, x)", "it takes 1 inputs, not 2"),
        ("y, z = my.f (x)", "it has 1 outputs, not 2"),
    ],
)
def test_a_malformed_call_stays(call: str, reason: str) -> None:
    proto = parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 18, "my" : 1]>
        main (float[N] x) => (float[N] y) {{ {call} }}
        <domain: "my", opset_import: ["" : 18]> f (t) => (r) {{ r = Neg (t) }}
    """)
    model = Model.from_proto(proto)
    context = Context()
    InlineFunctions().run(model, context)
    assert [node.op_type for node in model.graph.nodes] == ["f"]
    assert context.notes == [f"function f kept: {reason}"]
