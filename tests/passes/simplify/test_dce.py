"""`dead`: everything unused is removed, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from passes.simplify.dce import RemoveDead
from tests import checks
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

DEAD = RemoveDead()
HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'


def model(text: str) -> Model:
    return checks.model(text if text.startswith("<") else HEADER + text)


def check(text: str, after: str | None = None, **options: Any) -> Model:
    text = text if text.startswith("<") else HEADER + text
    return checks.check(DEAD, text, after, **options)


def run(subject: Model) -> Model:
    DEAD.run(subject, Context())
    subject.graph.verify()
    return subject


def test_dead_nodes_are_removed_with_their_producers() -> None:
    check(
        """g (float[N] x) => (float[N] y) {
            a = Exp (x)
            b = Log (a)
            y = Relu (x)
            c = Add (b, y)
        }""",
        "y = Relu (x)",
    )


def test_needed_nodes_stay() -> None:
    check(
        "g (float[N] x) => (float[N] y, float[N] z) { z = Exp (x) y = Relu (z) }",
        near_miss=True,
    )


def test_unused_inputs_stay_they_are_a_contract() -> None:
    text = "g (float[N] x, float[N] unused) => (float[N] y) { y = Relu (x) }"
    subject = check(text, near_miss=True)
    assert subject.graph.inputs == ["x", "unused"]


def test_unused_initializers_go_and_captured_ones_stay() -> None:
    subject = check(
        """g (bool c, float[2] x) => (float[2] y) <float[2] w = {1, 2}, float[1] lost = {3}> {
            y = If (c) <
                then_branch = t () => (float[2] a) { a = Add (x, w) },
                else_branch = e () => (float[2] b) { b = Identity (x) }
            >
        }""",
    )
    assert list(subject.graph.initializers) == ["w"]


def test_an_overridable_initializer_stays() -> None:
    check(
        "g (float[2] x, float[2] w = {1, 2}) => (float[2] y) { y = Relu (x) }",
        near_miss=True,
    )


def test_before_ir_4_an_unused_initializer_is_removed_with_its_input() -> None:
    subject = run(
        model(
            """<ir_version: 3, opset_import: ["" : 9]>
            g (float[2] x, float[2] w = {1, 2}, float[2] k = {1, 2}) => (float[2] y) {
                y = Add (x, k)
            }"""
        )
    )
    assert list(subject.graph.initializers) == ["k"]
    assert subject.graph.feeds == ["x"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("y, mask = Dropout (x)", "y = Dropout (x)"),
        (
            "y, indices = MaxPool <kernel_shape = [2, 2]> (x)",
            "y = MaxPool <kernel_shape = [2, 2]> (x)",
        ),
        (
            "s = Shape (x) c = ConstantOfShape (s) y, m, i = LayerNormalization (x, c)",
            "s = Shape (x) c = ConstantOfShape (s) y = LayerNormalization (x, c)",
        ),
    ],
)
def test_unused_optional_outputs_are_removed(before: str, after: str) -> None:
    signature = "g (float[1, 1, 4, 4] x) => (float[1, 1, h, w] y)"
    check(f"{signature} {{ {before} }}", after)


def test_an_optional_output_in_the_middle_is_left_blank() -> None:
    subject = check(
        """g (float[3, 1, 2] x, float[1, 8, 2] w, float[1, 8, 2] r) => (float[1, 1, 2] c) {
            y, h, c = LSTM <hidden_size = 2> (x, w, r)
        }""",
    )
    assert list(subject.graph.nodes[0].output) == ["", "", "c"]


def test_used_optional_outputs_stay() -> None:
    check(
        """g (float[1, 1, 4, 4] x) => (float[1, 1, 3, 3] y, int64[1, 1, 3, 3] i) {
            y, i = MaxPool <kernel_shape = [2, 2]> (x)
        }""",
        near_miss=True,
    )


def test_outputs_that_select_training_mode_stay() -> None:
    """Before opset 14, BatchNormalization trains when it has five outputs."""
    check(
        """<ir_version: 7, opset_import: ["" : 9]>
        g (float[2, 3, 4] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[2, 3, 4] y) {
            y, m1, v1, m2, v2 = BatchNormalization (x, s, b, m, v)
        }""",
        near_miss=True,
        run=False,
    )


def test_required_outputs_stay() -> None:
    check(
        """g (float[4] x, int64[1] k) => (float[n] y) { y, i = TopK (x, k) }""",
        near_miss=True,
        inputs={"x": np.arange(4, dtype=np.float32), "k": np.array([2])},
    )


IF = """g (bool c, float[2] x) => (float[2] y) {
    e = Exp (x)
    y, z = If (c) <
        then_branch = t () => (float[2] a, float[2] a2) { a = Relu (x) a2 = Log (e) },
        else_branch = f () => (float[2] b, float[2] b2) { b = Neg (x) b2 = Sqrt (e) }
    >
}"""

SMALL_IF = """g (bool c, float[2] x) => (float[2] y) {
    y = If (c) <
        then_branch = t () => (float[2] a) { a = Relu (x) },
        else_branch = f () => (float[2] b) { b = Neg (x) }
    >
}"""


def test_an_unused_result_of_if_is_removed_with_its_producers() -> None:
    check(
        IF,
        SMALL_IF,
    )


def test_dead_nodes_in_branches_free_the_values_they_capture() -> None:
    check(
        """g (bool c, float[2] x) => (float[2] y) {
            e = Exp (x)
            y = If (c) <
                then_branch = t () => (float[2] a) { dead = Log (e) a = Relu (x) },
                else_branch = f () => (float[2] b) { b = Neg (x) }
            >
        }""",
        SMALL_IF,
    )


LOOP = """g (int64 n, bool c, float[2] x) => ({outputs}) {{
    last, all, squares = Loop (n, c, x) <
        body = b (int64 i, bool go, float[2] v)
            => (bool go2, float[2] w, float[2] w1, float[2] w2) {{
            go2 = Identity (go)
            w = Add (v, v)
            w1 = Identity (w)
            w2 = Mul (w, w)
        }}
    >
}}"""
LOOP_FEED = {"n": np.array(3), "c": np.array(True), "x": np.ones(2, np.float32)}


def test_unused_scan_outputs_of_a_loop_are_removed() -> None:
    subject = check(LOOP.format(outputs="float[3, 2] all"), inputs=LOOP_FEED)
    loop = subject.graph.nodes[0]
    # Carried values stay, used outside or not.
    assert list(loop.output) == ["last", "all"]
    [body] = subject.graph.subgraphs(loop)
    assert [node.op_type for node in body.nodes] == ["Identity", "Add", "Identity"]


def test_used_scan_outputs_stay() -> None:
    outputs = "float[2] last, float[3, 2] all, float[3, 2] squares"
    check(LOOP.format(outputs=outputs), inputs=LOOP_FEED, near_miss=True)


def test_scan_attributes_of_dropped_outputs_go_too() -> None:
    subject = check(
        """g (float[2] s, float[4, 2] x) => (float[4, 2] b) {
            last, a, b = Scan (s, x) <
                num_scan_inputs = 1,
                scan_output_axes = [1, 0],
                scan_output_directions = [0, 1],
                body = g2 (float[2] u, float[2] v) => (float[2] w, float[2] a1, float[2] b1) {
                    w = Add (u, v)
                    a1 = Identity (w)
                    b1 = Exp (w)
                }
            >
        }""",
    )
    [scan] = subject.graph.nodes
    assert list(scan.output) == ["last", "b"]
    listed = {a.name: list(a.ints) for a in scan.attribute if a.name.startswith("scan_output")}
    assert listed == {"scan_output_axes": [0], "scan_output_directions": [1]}


def test_a_node_without_outputs_is_there_for_its_effect() -> None:
    proto = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Print", ["x"], [], domain="mine"),
                helper.make_node("Relu", ["x"], ["y"]),
            ],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("mine", 1)],
    )
    subject = run(Model.from_proto(proto))
    assert [node.op_type for node in subject.graph.nodes] == ["Print", "Relu"]
    assert subject.opsets == {"": 21, "mine": 1}


FUNCTIONS = """<ir_version: 10, opset_import: ["" : 21, "mine" : 1, "lost" : 1]>
g (float[2] x) => (float[2] y) { y = mine.outer (x) }
<domain: "mine", opset_import: ["" : 21, "mine" : 1]> outer (a) => (b) { b = mine.inner (a) }
<domain: "mine", opset_import: ["" : 21]> inner (a) => (b) { b = Relu (a) }
<domain: "mine", opset_import: ["" : 21]> unused (a) => (b) { b = Exp (a) }
"""


def test_unused_functions_and_imports_are_removed() -> None:
    subject = run(model(FUNCTIONS))
    assert [function.name for function in subject.functions] == ["outer", "inner"]
    assert subject.opsets == {"": 21, "mine": 1}


def test_cost_is_linear_and_deep_graphs_do_not_recurse() -> None:
    nodes = [helper.make_node("Relu", [f"v{i}"], [f"v{i + 1}"]) for i in range(5000)]
    graph = helper.make_graph(
        [*nodes, helper.make_node("Relu", ["v0"], ["y"])],
        "g",
        [helper.make_tensor_value_info("v0", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    subject = run(Model.from_proto(helper.make_model(graph)))
    assert len(subject.graph) == 1
