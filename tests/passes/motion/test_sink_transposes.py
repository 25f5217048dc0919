"""`layout`: Transposes meet and cancel; where that would not leave fewer of them, nothing moves."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st
from onnx import TensorProto, helper, numpy_helper, printer, shape_inference

from passes.analysis.shapes import Shapes
from passes.motion.sink_transposes import Layout
from tests.checks import check, parse
from tests.steps import steps
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.runtime.session import Session

LAYOUT = Layout()
TO_NHWC = "Transpose <perm = [0, 2, 3, 1]>"
TO_NCHW = "Transpose <perm = [0, 3, 1, 2]>"
OLD = '<ir_version: 8, opset_import: ["" : {}]>\n'


def typed(text: str) -> str:
    return printer.to_text(shape_inference.infer_shapes(parse(text)))


def census(subject: Model) -> Counter[str]:
    return Counter(node.op_type for node in subject.graph.nodes)


def sandwich(nodes: str, result: str = "N, 3, 4, 5", weights: str = "", opset: int = 21) -> str:
    """x in NCHW -> NHWC, `nodes` from a to b, -> NCHW."""
    header = OLD.format(opset)
    signature = f"g (float[N, 3, 4, 5] x) => (float[{result}] y) {weights}"
    return typed(f"{header}{signature} {{ a = {TO_NHWC} (x) {nodes} y = {TO_NCHW} (b) }}")


@pytest.mark.parametrize(
    ("nodes", "after", "result"),
    [
        ("b = Relu (a)", "y = Relu (x)", "N, 3, 4, 5"),
        ("c = Exp (a) d = Neg (c) b = Add (c, d)", "c = Exp (x) d = Neg (c) y = Add (c, d)", ""),
        ("b = Concat <axis = 3> (a, a)", "y = Concat <axis = 1> (x, x)", "N, 6, 4, 5"),
        ("b = Concat <axis = -2> (a, a)", "y = Concat <axis = 3> (x, x)", "N, 3, 4, 10"),
        ("b = Softmax (a)", "y = Softmax <axis = 1> (x)", ""),
        ("b = Mul (a, k)", "y = Mul (x, k)", ""),
        ("b = Mul (a, channel)", "y = Mul (x, channel1)", ""),
        ("b = ReduceMean (a, hw)", "y = ReduceMean (x, hw1)", "N, 3, 1, 1"),
        ("b = Pad (a, pads)", "y = Pad (x, pads1)", "N, 3, 5, 7"),
        ("b = Slice (a, zero, two, axes)", "y = Slice (x, zero, two, axes1)", "N, 2, 2, 5"),
        ("b = Slice (a, zero, two)", "y = Slice (x, zero, two, axes0)", "2, 3, 2, 5"),
        ("b = Tile (a, times)", "y = Tile (x, times1)", "N, 9, 4, 10"),
        ("b = Clip (a, k)", "y = Clip (x, k)", ""),
    ],
)
def test_operators_between_two_transposes(nodes: str, after: str, result: str) -> None:
    weights = """<float k = {2}, float[3] channel = {1, 2, 3},
        float[1, 3, 1, 1] channel1 = {1, 2, 3}, int64[2] hw = {1, 2}, int64[2] hw1 = {2, 3},
        int64[8] pads = {0, 0, 1, 0, 0, 1, 1, 0}, int64[8] pads1 = {0, 0, 0, 1, 0, 0, 1, 1},
        int64[2] zero = {0, 0}, int64[2] two = {2, 2}, int64[2] axes = {-1, 1},
        int64[2] axes1 = {1, 2}, int64[2] axes0 = {0, 2},
        int64[4] times = {1, 1, 2, 3}, int64[4] times1 = {1, 3, 1, 2}>"""
    shape = result or "N, 3, 4, 5"
    signature = f"g (float[N, 3, 4, 5] x) => (float[{shape}] y) {weights}"
    check(LAYOUT, sandwich(nodes, shape, weights), f"{OLD.format(21)}{signature} {{ {after} }}")


def normalized(before: str, after: str, axis: int) -> str:
    scale = "float[3] scale = {1, 2, 3}" if axis != 1 else "float[1, 1] scale = {2}"
    return typed(f"""g (float[3, 3, 3] x) => (float[3, 3, 3] y) <{scale}> {{
        a = Transpose <perm = {before}> (x) n = LayerNormalization <axis = {axis}> (a, scale)
        y = Transpose <perm = {after}> (n)
    }}""")


@pytest.mark.parametrize("axis", [-1, 2])
def test_a_norm_of_the_last_axis_lets_a_transpose_of_the_others_pass(axis: int) -> None:
    found = check(LAYOUT, normalized("[1, 0, 2]", "[1, 0, 2]", axis))
    assert census(found) == {"LayerNormalization": 1}


def test_a_norm_of_root_mean_squares_does_so_too() -> None:
    text = typed("""<ir_version: 10, opset_import: ["" : 23]>
        g (float[3, 4, 5] x) => (float[3, 4, 5] y) <float[5] scale = {1, 2, 3, 4, 5}> {
        a = Transpose <perm = [1, 0, 2]> (x) n = RMSNormalization (a, scale)
        y = Transpose <perm = [1, 0, 2]> (n)
    }""")
    assert census(check(LAYOUT, text)) == {"RMSNormalization": 1}


@pytest.mark.parametrize(
    ("before", "after", "axis"),
    [
        ("[0, 2, 1]", "[0, 2, 1]", -1),  # another axis is the last
        ("[2, 0, 1]", "[1, 2, 0]", -1),
        ("[1, 0, 2]", "[1, 0, 2]", 1),  # a normalized axis moves
    ],
)
def test_other_norms_keep_their_transposes(before: str, after: str, axis: int) -> None:
    check(LAYOUT, normalized(before, after, axis), near_miss=True)


@pytest.mark.parametrize("scale", ["float[3, 3]", "float[3, 1, 3]"])
def test_a_norm_by_a_scale_along_other_axes_keeps_its_transposes(scale: str) -> None:
    text = f"""g (float[3, 3, 3] x, {scale} scale) => (float[3, 3, 3] y) {{
        a = Transpose <perm = [1, 0, 2]> (x) n = LayerNormalization (a, scale)
        y = Transpose <perm = [1, 0, 2]> (n)
    }}"""
    check(LAYOUT, typed(text), near_miss=True)


def test_a_norm_whose_mean_is_read_keeps_its_transposes() -> None:
    text = """g (float[3, 4, 5] x) => (float[3, 4, 5] y, float[4, 3, 1] mean)
        <float[5] scale = {1, 2, 3, 4, 5}> {
        a = Transpose <perm = [1, 0, 2]> (x) n, mean = LayerNormalization (a, scale)
        y = Transpose <perm = [1, 0, 2]> (n)
    }"""
    check(LAYOUT, typed(text), near_miss=True)


LINEAR = "float[5, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, float[2] b = {1, 2}"
BATCH_FIRST = "Transpose <perm = [1, 0, 2]>"


def linear(nodes: str) -> str:
    return typed(f"g (float[N, L, 5] x) => (float[N, L, 2] y) <{LINEAR}> {{ {nodes} }}")


def test_a_linear_map_of_the_last_axis_lets_a_transpose_of_the_others_pass() -> None:
    nodes = f"a = {BATCH_FIRST} (x) m = MatMul (a, w) c = Add (m, b) y = {BATCH_FIRST} (c)"
    check(LAYOUT, linear(nodes), linear("m = MatMul (x, w) y = Add (m, b)"))


@pytest.mark.parametrize(
    "nodes",
    [
        # The product is along the first axis of x, or differs between rows.
        "a = Transpose <perm = [1, 2, 0]> (x) m = MatMul (a, v) y = Transpose <perm = [2, 0, 1]> "
        "(m)",
        f"a = {BATCH_FIRST} (x) m = MatMul (a, k) y = {BATCH_FIRST} (m)",
        f"a = {BATCH_FIRST} (x) m = MatMul (h, a) y = {BATCH_FIRST} (m)",
    ],
)
def test_other_products_keep_their_transposes(nodes: str) -> None:
    constants = """float[3, 2] v = {1, 2, 3, 4, 5, 6}, float[2, 3] h = {1, 2, 3, 4, 5, 6},
        float[3, 5, 1] k = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}"""
    signature = f"g (float[3, 3, 5] x) => (float[A, B, C] y) <{constants}>"
    check(LAYOUT, typed(f"{signature} {{ {nodes} }}"), near_miss=True)


def test_axes_in_attributes() -> None:
    for nodes, after, shape in (
        ("b = ReduceMean <axes = [1, -2]> (a)", "y = ReduceMean <axes = [2, 3]> (x)", "N, 3, 1, 1"),
        (
            "b = Slice <starts = [1], ends = [3], axes = [1]> (a)",
            "y = Slice <starts = [1], ends = [3], axes = [2]> (x)",
            "N, 3, 2, 5",
        ),
        (
            "b = Slice <starts = [0, 1], ends = [9, 3]> (a)",
            "y = Slice <starts = [0, 1], ends = [9, 3], axes = [0, 2]> (x)",
            "N, 3, 2, 5",
        ),
        (
            "b = Pad <pads = [0, 0, 1, 0, 0, 0, 0, 2]> (a)",
            "y = Pad <pads = [0, 0, 0, 1, 0, 2, 0, 0]> (x)",
            "N, 5, 4, 6",
        ),
    ):
        signature = f"g (float[N, 3, 4, 5] x) => (float[{shape}] y)"
        wanted = f"{OLD.format(9)}{signature} {{ {after} }}"
        check(LAYOUT, sandwich(nodes, shape, opset=9), wanted)


def test_split_and_concat_in_one_group() -> None:
    nodes = "p, q = Split <axis = 3, num_outputs = 3> (a)".replace("p, q", "p, q, r")
    text = sandwich(f"{nodes} s = Relu (q) b = Concat <axis = 3> (p, s, r)")
    subject = check(LAYOUT, text)
    assert census(subject) == Counter(Split=1, Relu=1, Concat=1)


def test_a_reduction_takes_the_permuted_dimensions_away() -> None:
    text = f"""g (float[N, 3, 4, 5] x) => (float[N, 3] y) <int64[2] hw = {{1, 2}}> {{
        a = {TO_NHWC} (x)
        b = Relu (a)
        y = ReduceMean <keepdims = 0> (b, hw)
    }}"""
    after = "i = Constant <value = int64[2] {2, 3}> () b = Relu (x) "
    check(LAYOUT, typed(text), f"{after} y = ReduceMean <keepdims = 0> (b, i)")


def test_a_reduction_that_leaves_axes_out_of_order_stays() -> None:
    text = f"""g (float[N, 3, 4, 5] x) => (float[4, 5, 3] y) <int64[1] n = {{0}}> {{
        a = {TO_NHWC} (x)
        y = ReduceMean <keepdims = 0> (a, n)
    }}"""
    check(LAYOUT, typed(text), near_miss=True)


def test_quantization_per_tensor_and_per_channel() -> None:
    weights = """<float s = {0.5}, uint8 z = {3}, float[3] ss = {0.5, 0.25, 1},
        uint8[3] zz = {1, 2, 3}>"""
    signature = f"g (float[N, 3, 4, 5] x) => (float[N, 3, 4, 5] y) {weights}"
    for old, back, new, args in (
        ("", "", "", "s, z"),
        ("<axis = 3>", "<axis = -1>", "<axis = 1>", "ss, zz"),
    ):
        nodes = f"q = QuantizeLinear {old} (a, {args}) b = DequantizeLinear {back} (q, {args})"
        after = f"q = QuantizeLinear {new} (x, {args}) y = DequantizeLinear {new} (q, {args})"
        wanted = f"{OLD.format(21)}{signature} {{ {after} }}"
        check(LAYOUT, sandwich(nodes, weights=weights), wanted)


def test_transposes_that_do_not_cancel_become_one() -> None:
    """K of an attention: [B, S, H, D] -> [B, H, S, D], scaled, -> [B, H, D, S]."""
    text = """g (float[B, S, 2, 4] x) => (float[B, 2, 4, S] y) <float k = {0.5}> {
        a = Transpose <perm = [0, 2, 1, 3]> (x)
        b = Mul (a, k)
        y = Transpose <perm = [0, 1, 3, 2]> (b)
    }"""
    subject = check(LAYOUT, typed(text))
    assert census(subject) == Counter(Mul=1, Transpose=1)


def test_a_transpose_goes_behind_where_two_become_one() -> None:
    text = f"""g (float[N, 3, 4, 5] x, float[N, 3, 4, 5] z) => (float[N, 4, 5, 3] y) {{
        a = {TO_NHWC} (x)
        b = {TO_NHWC} (z)
        y = Add (a, b)
    }}"""
    check(LAYOUT, typed(text), f"s = Add (x, z) y = {TO_NHWC} (s)")


def test_a_residual_chain_of_convolutions() -> None:
    """What tf2onnx leaves: every Conv in NCHW, everything between in NHWC."""
    weights = "<float[3, 3, 1, 1] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, float[3] bias = {1, 2, 3}>"
    blocks: list[str] = []
    for i in range(4):
        blocks.append(
            f"""p{i} = {TO_NCHW} (v{i})
            c{i} = Conv (p{i}, w)
            q{i} = {TO_NHWC} (c{i})
            b{i} = Add (q{i}, bias)
            r{i} = Relu (b{i})
            v{i + 1} = Add (v{i}, r{i})"""
        )
    body = " ".join(blocks)
    text = f"""g (float[1, 4, 5, 3] x) => (float[1, 4, 5, 3] y) {weights} {{
        v0 = Identity (x) {body} y = Identity (v4)
    }}"""
    subject = check(LAYOUT, typed(text), atol=1e-4)
    assert census(subject)["Transpose"] == 2


# -- near misses


@pytest.mark.parametrize(
    ("nodes", "near_miss"),
    [
        ("b = Relu (a) y = MatMul (b, w)", True),  # nothing to meet at the other end
        ("b = Relu (a) c = Reshape (b, s) y = MatMul (c, w)", False),  # the Reshape is a no-op
        ("b = Add (a, z) y = MatMul (b, w)", True),
    ],
)
def test_a_single_transpose_does_not_wander(nodes: str, near_miss: bool) -> None:
    text = f"""g (float[N, 3, 4, 5] x, float[N, 4, 5, 3] z) => (float[N, 4, 5, 2] y)
        <float[3, 2] w = {{1, 2, 3, 4, 5, 6}}, int64[4] s = {{0, 4, 5, 3}}> {{
        a = {TO_NHWC} (x) {nodes}
    }}"""
    before = census(Model.from_proto(parse(text)))["Transpose"]
    subject = check(LAYOUT, typed(text), near_miss=near_miss)
    assert census(subject)["Transpose"] == before


def test_another_user_outside_keeps_both() -> None:
    signature = "g (float[N, 3, 4, 5] x) => (float[N, 3, 4, 5] y, float[N, 4, 5, 3] b)"
    text = f"{signature} {{ a = {TO_NHWC} (x) b = Relu (a) y = {TO_NCHW} (b) }}"
    subject = check(LAYOUT, typed(text), f"y = Relu (x) b = {TO_NHWC} (y)")
    assert census(subject)["Transpose"] == 1
    both = f"{signature.replace(') {', '')} {{ a = {TO_NHWC} (x) c = Exp (a) b = Relu (c) "
    both = both.replace("=> (", "=> (float[N, 4, 5, 3] c, ") + f"y = {TO_NCHW} (b) }}"
    check(LAYOUT, typed(both), near_miss=True)


def test_a_captured_value_is_read_outside() -> None:
    text = """g (bool c, float[1, 2, 3] x) => (float[1, 2, 3] y, float[1, 3, 2] z) {
        a = Transpose <perm = [0, 2, 1]> (x)
        b = Relu (a)
        y = Transpose <perm = [0, 2, 1]> (b)
        z = If (c) <
            then_branch = t () => (float[1, 3, 2] p) { p = Exp (b) },
            else_branch = f () => (float[1, 3, 2] q) { q = Neg (b) }
        >
    }"""
    subject = check(LAYOUT, typed(text))
    assert census(subject)["Transpose"] == 1


def test_softmax_before_opset_13_flattens() -> None:
    check(LAYOUT, sandwich("b = Softmax <axis = 1> (a)", opset=11), near_miss=True)


def test_an_operand_of_lower_rank_that_is_no_constant() -> None:
    text = f"""g (float[N, 3, 4, 5] x, float[3] z) => (float[N, 3, 4, 5] y) {{
        a = {TO_NHWC} (x) b = Add (a, z) y = {TO_NCHW} (b)
    }}"""
    check(LAYOUT, typed(text), near_miss=True)


def test_an_operand_of_lower_rank_whose_axes_stay_may_be_computed() -> None:
    text = """g (float[N, 3, 5] x, float[5] z) => (float[N, 3, 5] y) {
        a = Transpose <perm = [1, 0, 2]> (x) b = Add (a, z) y = Transpose <perm = [1, 0, 2]> (b)
    }"""
    check(LAYOUT, typed(text), "y = Add (x, z)")


def test_axes_from_the_caller() -> None:
    text = f"""g (float[1, 3, 4, 5] x, int64[1] axes) => (float[p, q, r, s] y) {{
        a = {TO_NHWC} (x) b = ReduceMean (a, axes) y = {TO_NCHW} (b)
    }}"""
    feed = {"x": np.ones((1, 3, 4, 5), np.float32), "axes": np.array([1])}
    check(LAYOUT, typed(text), near_miss=True, inputs=feed)


def test_operators_that_depend_on_the_layout_stay() -> None:
    weights = "<float[4] s = {1, 2, 3, 4}>"
    check(LAYOUT, sandwich("b = InstanceNormalization (a, s, s)", weights=weights), near_miss=True)


def test_a_constant_is_copied_when_others_read_it() -> None:
    text = """g (float[1, 2, 3] x, float[1, 3, 2] z) => (float[1, 2, 3] y, float[1, 3, 2] u)
        <float[3, 2] k = {1, 2, 3, 4, 5, 6}> {
        a = Transpose <perm = [0, 2, 1]> (x)
        b = Mul (a, k)
        y = Transpose <perm = [0, 2, 1]> (b)
        u = Mul (z, k)
    }"""
    after = """k1 = Constant <value = float[1, 2, 3] {1, 3, 5, 2, 4, 6}> ()
        y = Mul (x, k1) u = Mul (z, k)"""
    check(LAYOUT, typed(text), after)


def test_a_transpose_that_vanishes_is_not_there_for_others() -> None:
    # Mul could use x instead of t, but Relu would still need t: nothing is gained.
    text = """g (float[2, 3, 2] x) => (float[2, 3, 2] y) {
        r = Relu (x)
        t = Transpose <perm = [2, 1, 0]> (x)
        y = Mul (r, t)
    }"""
    check(LAYOUT, typed(text), near_miss=True)


def test_two_outputs_that_would_become_one_value() -> None:
    text = """g (float[2, 3, 4] x) => (float[4, 3, 2] y, float[4, 3, 2] z) {
        r = Relu (x)
        y = Transpose <perm = [2, 1, 0]> (r)
        z = Transpose <perm = [2, 1, 0]> (r)
    }"""
    check(LAYOUT, typed(text), near_miss=True)


# -- Reshape for Transpose


def test_a_transpose_that_moves_only_ones_is_a_reshape() -> None:
    text = f"g (float[N, 3, 1, 1] x) => (float[N, 1, 1, 3] y) {{ y = {TO_NHWC} (x) }}"
    after = "s = Constant <value = int64[4] {0, 1, 1, 3}> () y = Reshape (x, s)"
    check(LAYOUT, text, after)
    signature = "g (float[N, 3, 1, 1] x) => (float[N, 3] y) <int64[2] s = {0, -1}>"
    both = f"{signature} {{ a = {TO_NHWC} (x) y = Reshape (a, s) }}"
    ones = "axes = Constant <value = int64[2] {2, 3}> ()"
    check(LAYOUT, typed(both), f"{ones} y = Squeeze (x, axes)")


@pytest.mark.parametrize("shape", ["N, 3, 1, 2", "N, M, 1, K"])
def test_a_transpose_that_moves_more_stays(shape: str) -> None:
    sizes = shape.split(", ")
    result = ", ".join(sizes[i] for i in (0, 2, 3, 1))
    text = f"g (float[{shape}] x) => (float[{result}] y) {{ y = {TO_NHWC} (x) }}"
    check(LAYOUT, text, near_miss=True)


# -- cost and soundness


def test_cost_is_linear_where_nothing_can_be_gained() -> None:
    def chain_of(count: int) -> Model:
        nodes: list[onnx.NodeProto] = []
        for i in range(count):
            names = [f"v{i}", f"t{i}", f"a{i}", f"v{i + 1}"]
            nodes.append(helper.make_node("Transpose", names[:1], names[1:2], perm=[1, 2, 0]))
            nodes.append(helper.make_node("Relu", names[1:2], names[2:3]))
            nodes.append(helper.make_node("MatMul", [names[2], "w"], names[3:4]))
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("v0", TensorProto.FLOAT, [2, 2, 2])],
            [helper.make_tensor_value_info(f"v{count}", TensorProto.FLOAT, [2, 2, 2])],
            [numpy_helper.from_array(np.eye(2, dtype=np.float32), "w")],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
        return Model.from_proto(shape_inference.infer_shapes(proto))

    small, large = (partial(LAYOUT.run, chain_of(n), Context()) for n in (100, 400))
    assert steps(large) < 6 * steps(small)  # 16 times as much if it were quadratic


OPERATORS = ("Relu", "Neg", "Add", "Mul", "Concat", "Transpose", "Softmax", "ReduceMax")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPERATORS), st.integers(0, 99), st.integers(0, 99))))
def test_random_graphs_keep_their_meaning(steps: list[tuple[str, int, int]]) -> None:
    """Values of rank 3; two operands must have the same shape, which equal ones always have."""
    shapes: dict[str, tuple[int, ...]] = {"x": (2, 3, 4)}
    nodes: list[onnx.NodeProto] = []
    for i, (op_type, pick, choice) in enumerate(steps):
        names = list(shapes)
        source, result = names[pick % len(names)], f"v{i}"
        shape = shapes[source]
        alike = [name for name in names if shapes[name] == shape]
        other = alike[choice % len(alike)]
        axis = choice % 3
        if op_type == "Transpose":
            perm = [[0, 2, 1], [1, 2, 0], [2, 0, 1], [2, 1, 0]][choice % 4]
            nodes.append(helper.make_node("Transpose", [source], [result], perm=perm))
            shape = tuple(shape[p] for p in perm)
        elif op_type in ("Add", "Mul"):
            nodes.append(helper.make_node(op_type, [source, other], [result]))
        elif op_type == "Concat":
            nodes.append(helper.make_node("Concat", [source, other], [result], axis=axis))
            shape = tuple(s * 2 if j == axis else s for j, s in enumerate(shape))
        elif op_type == "ReduceMax":
            nodes.append(helper.make_node("ReduceMax", [source, f"axis{axis}"], [result]))
            shape = tuple(1 if j == axis else s for j, s in enumerate(shape))
        else:
            attributes: dict[str, Any] = {"axis": axis} if op_type == "Softmax" else {}
            nodes.append(helper.make_node(op_type, [source], [result], **attributes))
        if np.prod(shape) > 5000:
            nodes.pop()
        else:
            shapes[result] = shape
    last = list(shapes)[-1]
    if last == "x":
        return
    outputs = {last, list(shapes)[len(shapes) // 2]} - {"x"}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4])],
        [helper.make_tensor_value_info(v, TensorProto.FLOAT, shapes[v]) for v in sorted(outputs)],
        [numpy_helper.from_array(np.array([j]), f"axis{j}") for j in range(3)],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    proto = shape_inference.infer_shapes(proto, strict_mode=True)
    before, after = Model.from_proto(proto), Model.from_proto(proto)
    LAYOUT.run(after, Context())
    after.graph.verify()
    assert census(after)["Transpose"] <= census(before)["Transpose"]
    feed = {"x": np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)}
    for old, new in zip(Session(before).run(feed), Session(after).run(feed), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-4, atol=1e-5)
    after.journal.commit()
    LAYOUT.run(after, Context())
    assert not len(after.journal), "a second run changes more"


# -- views that move whole axes

SPLIT = """a = Reshape (x, heads) b = Transpose <perm = [0, 2, 1, 3]> (a) c = Reshape (b, merged)
    d = Transpose <perm = [1, 0, 2]> (c) y = Reshape (d, joined)"""
HEADS = """g (float[N, 5, 6] x) => (float[5, N, 6] y) <int64[4] heads = {0, 5, 2, 3},
    int64[3] merged = {-1, 5, 3}, int64[3] joined = {5, -1, 6}, int64[3] other = {5, -1, 12}>"""


def shaped(text: str) -> str:
    """The model with all that `shapes` finds out, which is more than onnx does."""
    subject = Model.from_proto(parse(text))
    Shapes().run(subject, Context())
    subject.commit()
    return printer.to_text(subject.to_proto())


def test_heads_that_are_split_and_joined_again_are_a_transpose() -> None:
    check(LAYOUT, shaped(f"{HEADS} {{ {SPLIT} }}"), "y = Transpose <perm = [1, 0, 2]> (x)")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("perm = [0, 2, 1, 3]", "perm = [0, 2, 3, 1]"),  # the parts are joined in another order
        ("(d, joined)", "(d, other)"),  # across the batch
    ],
)
def test_views_that_take_axes_apart_keep_one_transpose(old: str, new: str) -> None:
    text = f"{HEADS} {{ {SPLIT} }}".replace(old, new)
    if "other" in new:
        text = text.replace("[5, N, 6] y", "[5, M, 12] y")
    else:
        text = text.replace("merged = {-1, 5, 3}", "merged = {-1, 3, 5}").replace("[5, N", "[P, N")
        text = text.replace("joined = {5, -1, 6}", "joined = {3, -1, 10}").replace("6] y", "10] y")
    feed = {"x": np.arange(60, dtype=np.float32).reshape(2, 5, 6)}
    found = census(check(LAYOUT, shaped(text), inputs=feed))
    assert (found["Reshape"], found["Transpose"]) == (2, 1)


@pytest.mark.parametrize(
    "nodes",
    [
        # Values that are repeated, and an axis of size 1 that is new.
        """e = Unsqueeze (x, two) r = Expand (e, thrice) a = Reshape (r, apart)
        b = Transpose <perm = [1, 0, 2, 3]> (a) y = Reshape (b, last)""",
        """a = Reshape (x, heads) b = Transpose <perm = [1, 0, 2, 3]> (a) y = Reshape (b, ones)""",
    ],
)
def test_views_with_another_number_of_axes_stay_what_they_are(nodes: str) -> None:
    text = f"""g (float[4, 5, 6] x) => (float[A, B, C, D] y) <int64[1] two = {{2}},
        int64[4] thrice = {{1, 1, 3, 1}}, int64[4] apart = {{4, 5, 9, 2}},
        int64[4] last = {{5, 4, 3, 6}}, int64[4] heads = {{4, 5, 2, 3}},
        int64[4] ones = {{5, 4, 6, 1}}> {{ {nodes} }}"""
    check(LAYOUT, shaped(text), near_miss=True)
