"""`cse`: equal nodes merge, and no others."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from passes.simplify.cse import CommonSubexpressions
from tests.checks import check, model
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

CSE = CommonSubexpressions()


def ops(subject: Model) -> list[str]:
    return [node.op_type for node in subject.graph.nodes]


def test_equal_nodes_merge_and_then_their_users() -> None:
    check(
        CSE,
        """g (float[N] x) => (float[N] y) {
            a = Exp (x)
            b = Exp (x)
            c = Neg (a)
            d = Neg (b)
            y = Add (c, d)
        }""",
        "a = Exp (x) c = Neg (a) y = Add (c, c)",
    )


@pytest.mark.parametrize("name", ["Add", "Mul", "Max"])
def test_operand_order_of_commutative_operators(name: str) -> None:
    check(
        CSE,
        f"""g (float[N] x, float[N] z) => (float[N] y) {{
            a = {name} (x, z)
            b = {name} (z, x)
            y = Sub (a, b)
        }}""",
        f"a = {name} (x, z) y = Sub (a, a)",
    )


@pytest.mark.parametrize(
    "pair",
    [
        "a = Sub (x, z) b = Sub (z, x)",
        "a = Relu (x) b = Relu (z)",
        "a = Elu <alpha = 1.0> (x) b = Elu <alpha = 2.0> (x)",
        "a = Sum (x, z, x) b = Sum (x, x, z)",  # another order is another rounding
        "a = RandomNormalLike (x) b = RandomNormalLike (x)",
        "a = RandomNormalLike <seed = 1.0> (x) b = RandomNormalLike <seed = 1.0> (x)",
        "a = Clip (x, z0) b = Clip (x, , z0)",
    ],
)
def test_near_misses(pair: str) -> None:
    run = "Random" not in pair
    text = f"g (float[N] x, float[N] z, float z0) => (float[N] y) {{ {pair} y = Add (a, b) }}"
    check(CSE, text, near_miss=True, run=run)


def test_dropout_may_train() -> None:
    check(
        CSE,
        """g (float[N] x, float r, bool t) => (float[N] y) {
            a = Dropout (x, r, t)
            b = Dropout (x, r, t)
            y = Add (a, b)
        }""",
        near_miss=True,
        run=False,
    )


def test_an_explicit_default_equals_an_omitted_attribute() -> None:
    check(
        CSE,
        """g (float[2, 3] x) => (float[2, 3] y) {
            a = Softmax <axis = -1> (x)
            b = Softmax (x)
            y = Sub (a, b)
        }""",
        "a = Softmax <axis = -1> (x) y = Sub (a, a)",
    )


def test_omitted_trailing_inputs_are_no_difference() -> None:
    subject = check(
        CSE,
        """g (float[N] x, float lo) => (float[N] y) {
            a = Clip (x, lo)
            b = Clip (x, lo, )
            y = Add (a, b)
        }""",
        inputs={"x": np.ones(3, np.float32), "lo": np.array(0, np.float32)},
    )
    assert ops(subject) == ["Clip", "Add"]


def test_all_outputs_merge() -> None:
    check(
        CSE,
        """g (float[4] x) => (float[2] y) {
            a, b = Split <num_outputs = 2> (x)
            c, d = Split <num_outputs = 2> (x)
            y = Sub (a, d)
        }""",
        "a, b = Split <num_outputs = 2> (x) y = Sub (a, b)",
    )


def test_unknown_domains_may_have_state() -> None:
    check(
        CSE,
        """<ir_version: 10, opset_import: ["" : 21, "mine" : 1]>
        g (float[N] x) => (float[N] y) { a = mine.Op (x) b = mine.Op (x) y = Add (a, b) }""",
        near_miss=True,
        run=False,
    )


def test_known_contrib_operators_merge() -> None:
    check(
        CSE,
        """g (float[N] x) => (float[N] y) {
            a = com.microsoft.QuickGelu (x)
            b = com.microsoft.QuickGelu (x)
            y = Add (a, b)
        }""",
        "a = com.microsoft.QuickGelu (x) y = Add (a, a)",
    )


def test_an_output_takes_the_place_of_an_inner_value() -> None:
    subject = check(
        CSE,
        "g (float[N] x) => (float[N] y, float[N] z) { a = Exp (x) z = Neg (a) y = Exp (x) }",
    )
    assert ops(subject) == ["Exp", "Neg"]
    assert subject.graph.outputs == ["y", "z"]


def test_users_of_a_value_renamed_to_an_output_merge_too() -> None:
    check(
        CSE,
        """g (float[N] x) => (float[N] y, float[N] b) {
            a = Exp (x)
            c = Neg (a)
            b = Exp (x)
            d = Neg (b)
            y = Add (c, d)
        }""",
        "b = Exp (x) c = Neg (b) y = Add (c, c)",
    )


def test_of_two_equal_outputs_one_is_computed() -> None:
    check(
        CSE,
        "g (float[N] x) => (float[N] y, float[N] z) { y = Exp (x) z = Exp (x) }",
        "y = Exp (x) z = Identity (y)",
    )


def test_two_outputs_that_name_one_input_stay() -> None:
    check(
        CSE,
        "g (float[N] x) => (float[N] y, float[N] z) { y = Identity (x) z = Identity (x) }",
        near_miss=True,
    )


def test_several_equal_outputs_of_one_node_would_need_more_nodes() -> None:
    check(
        CSE,
        """g (float[4] x) => (float[2] a, float[2] b, float[2] c, float[2] d) {
            a, b = Split <num_outputs = 2> (x)
            c, d = Split <num_outputs = 2> (x)
        }""",
        near_miss=True,
    )


def test_a_branch_captures_an_equal_value_of_the_enclosing_graph() -> None:
    check(
        CSE,
        """g (bool c, float[N] x) => (float[N] y, float[N] e) {
            e = Exp (x)
            y = If (c) <
                then_branch = t () => (float[N] a) { e1 = Exp (x) a = Neg (e1) },
                else_branch = f () => (float[N] b) { e2 = Exp (x) b = Abs (e2) }
            >
        }""",
        """g (bool c, float[N] x) => (float[N] y, float[N] e) {
            e = Exp (x)
            y = If (c) <
                then_branch = t () => (float[N] a) { a = Neg (e) },
                else_branch = f () => (float[N] b) { b = Abs (e) }
            >
        }""",
    )


def test_branches_merge_neither_with_each_other_nor_with_later_nodes() -> None:
    check(
        CSE,
        """g (bool c, float[N] x) => (float[N] y, float[N] e) {
            y = If (c) <
                then_branch = t () => (float[N] a) { e1 = Exp (x) a = Neg (e1) },
                else_branch = f () => (float[N] b) { e2 = Exp (x) b = Abs (e2) }
            >
            z = Relu (y)
            e = Exp (z)
        }""",
        near_miss=True,
    )


def test_a_branch_output_from_outside_stays_behind_an_identity() -> None:
    check(
        CSE,
        """g (bool c, float[N] x) => (float[N] y, float[N] e) {
            e = Identity (x)
            y = If (c) <
                then_branch = t () => (float[N] a) { a = Identity (x) },
                else_branch = f () => (float[N] b) { b = Neg (x) }
            >
        }""",
        near_miss=True,
    )


def test_names_reused_in_another_scope_are_other_values() -> None:
    check(
        CSE,
        """g (int64 n, bool c, float[2] x) => (float[2] y, float[2] e) {
            e = Exp (x)
            y = Loop (n, c, x) <
                body = b (int64 i, bool go, float[2] v) => (bool go2, float[2] w) {
                    go2 = Identity (go)
                    u = Neg (v)
                    w = Exp (u)
                }
            >
        }""",
        near_miss=True,
        inputs={"n": np.array(2), "c": np.array(True), "x": np.ones(2, np.float32)},
    )


def test_equal_constants_merge_but_large_ones_are_left_to_share() -> None:
    subject = check(
        CSE,
        """g (float[2] x) => (float[2] y) {
            a = Constant <value = float[2] {1, 2}> ()
            b = Constant <value = float[2] {1, 2}> ()
            c = Add (x, a)
            y = Mul (c, b)
        }""",
    )
    assert ops(subject) == ["Constant", "Add", "Mul"]


def test_subgraph_owners_are_not_compared() -> None:
    loop = """Loop (n, c, x) <
        body = b (int64 i, bool go, float[2] v) => (bool go2, float[2] w) {
            go2 = Identity (go) w = RandomNormalLike (v)
        }
    >"""
    signature = "g (int64 n, bool c, float[2] x) => (float[2] y)"
    subject = model(f"{signature} {{ a = {loop} b = {loop} y = Add (a, b) }}")
    CSE.run(subject, Context())
    assert ops(subject) == ["Loop", "Loop", "Add"]


def test_many_equal_nodes() -> None:
    nodes = [helper.make_node("Exp", ["x"], [f"e{i}"]) for i in range(3000)]
    total = helper.make_node("Sum", [n.output[0] for n in nodes[:50]], ["y"])
    graph = helper.make_graph(
        [*nodes, total],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    subject = Model.from_proto(helper.make_model(graph))
    CSE.run(subject, Context())
    subject.graph.verify()
    assert ops(subject) == ["Exp", "Sum"]
