"""Constant folding: folded nodes, nodes that stay, and the size budget."""

from typing import Any

import numpy as np
import pytest
from checks import check
from onnx import TensorProto, helper, numpy_helper, parser

from passes.simplify.fold import Fold
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import TensorType
from toolkit.pass_manager.protocol import Context


def folded(text: str, **options: int | None) -> Model:
    model = Model.from_proto(parser.parse_model(text))
    Fold(**options).run(model, Context())
    model.graph.verify()
    return model


def ops(model: Model) -> list[str]:
    return [n.op_type for g in model.graphs() for n in g.nodes]


def test_integer_arithmetic_and_movement() -> None:
    check(
        Fold(),
        """
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[N, 12] x) => (float[M, 3, 4] y)
        <int64[1] a = {3}, int64[1] b = {4}, int64[1] m = {-1}>
        { c = Concat<axis=0>(m, a, b)
          y = Reshape(x, c) }
        """,
        """
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[N, 12] x) => (float[M, 3, 4] y)
        <int64[3] c = {-1, 3, 4}>
        { y = Reshape(x, c) }
        """,
    )


@pytest.mark.parametrize(
    ("like", "after"),
    [("x", ["Mystery", "Cast", "Mul"]), ("m", ["Mystery", "Cast", "CastLike", "Expand", "Mul"])],
)
def test_cast_like_of_a_constant_folds_if_the_type_is_known(like: str, after: list[str]) -> None:
    model = folded(f"""
        <ir_version: 8, opset_import: ["" : 17, "my.ops" : 1]>
        main (float[2, 4] x) => (float[2, 4] y, float[4] n)
        <double one = {{1}}, int64[1] shape = {{4}}>
        {{ m = my.ops.Mystery(x)  n = Cast<to=1>(m)
           c = CastLike(one, {like})  e = Expand(c, shape)  y = Mul(x, e) }}
    """)
    assert ops(model) == after


def test_floating_point_is_computed_by_the_runtime() -> None:
    model = folded("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[4] x) => (float[4] y) <float[4] w = {1, 2, 3, 4}>
        { e = Exp(w)  s = Softmax(e)  y = Mul(x, s) }
    """)
    assert ops(model) == ["Mul"]
    constant: Any = model.graph.const(model.graph.nodes[0].input[1])
    weights = np.exp(np.array([1, 2, 3, 4], np.float32))
    expected = np.exp(weights - weights.max()) / np.exp(weights - weights.max()).sum()
    np.testing.assert_allclose(constant, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "node",
    [
        "r = RandomNormal <shape = [4]> ()",
        "r = RandomUniform <shape = [4], seed = 1.0> ()",
        "r = RandomNormalLike (w)",
        "r = Bernoulli (w)",
        "r, m = Dropout (w, half, yes)",
    ],
)
def test_random_ops_are_never_folded(node: str) -> None:
    model = folded(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[4] x) => (float[4] y)
        <float[4] w = {{0.1, 0.2, 0.3, 0.4}}, float half = {{0.5}}, bool yes = {{1}}>
        {{ {node}  y = Mul(x, r) }}
    """)
    assert len(ops(model)) == 2


def test_int8_weights_stay_int8() -> None:
    model = folded("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[2] x) => (float[2] y) <int8[2] w = {1, 2}, float s = {0.5}, int8 z = {0}>
        { d = DequantizeLinear(w, s, z)  y = Mul(x, d) }
    """)
    assert ops(model) == ["DequantizeLinear", "Mul"]


def test_a_blow_up_is_refused_and_a_small_one_is_not() -> None:
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[N] x) => (float[512, 1024] y) <int64[2] s = {512, 1024}>
        { e = ConstantOfShape <value: tensor = float[1] {2.0}> (s)  y = Add(x, e) }
    """
    assert ops(folded(text)) == ["ConstantOfShape", "Add"]
    assert ops(folded(text, max_bytes=4 << 20)) == ["Add"]


def test_many_small_blow_ups_are_bounded_together() -> None:
    count = 40
    body = " ".join(f"e{i} = Expand(w{i}, s) y{i} = Add(x, e{i})" for i in range(count))
    outputs = ", ".join(f"float[10, 10] y{i}" for i in range(count))
    weights = ", ".join(f"float w{i} = {{{i}}}" for i in range(count))
    model = folded(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[1] x) => ({outputs}) <int64[2] s = {{10, 10}}, {weights}> {{ {body} }}
    """)
    assert 0 < ops(model).count("Expand") < count
    assert model.nbytes() < 4 << 10


def test_a_table_of_a_small_model_is_left_to_the_runtime() -> None:
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[N, 128] x) => (float[N, 256] y) <
            int64[2] s = {128, 256}, int64[1, 2] at = {0, 1}, float[1, 2] w = {3, 4},
            float[128] factor = {FACTOR}
        > {
            zeros = ConstantOfShape <value: tensor = float[1] {0}> (s)
            table = ScatterElements <axis = 1> (zeros, at, w)
            twice = Add(factor, factor)
            scaled = Mul(x, twice)
            y = MatMul(scaled, table)
        }
    """.replace("FACTOR", ", ".join("1" for _ in range(128)))
    left = ["ConstantOfShape", "ScatterElements", "Mul", "MatMul"]
    assert ops(folded(text)) == left
    assert ops(folded(text, max_bytes=1 << 18)) == ["Mul", "MatMul"]
    # The budget is proportional to the stored weights.
    large = Model.from_proto(parser.parse_model(text))
    large.graph.constant(np.ones((4096, 1024), np.float32), hint="unread")
    Fold().run(large, Context())
    assert ops(large) == ["Mul", "MatMul"]


def test_a_large_weight_freed_by_folding_is_folded() -> None:
    array = np.random.default_rng(0).standard_normal((1024, 700)).astype(np.float32)
    nodes = [
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"]),
    ]
    proto = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", 1, ["n", 700])],
            [helper.make_tensor_value_info("y", 1, ["n", 1024])],
            [numpy_helper.from_array(array, "w")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    model = Model.from_proto(proto)
    Fold().run(model, Context())
    assert ops(model) == ["MatMul"]
    np.testing.assert_array_equal(model.graph.const(model.graph.nodes[0].input[1]), array.T)
    # A weight with a second user would be stored twice: it stays.
    proto.graph.node.append(helper.make_node("MatMul", ["y", "w"], ["z"]))
    proto.graph.output.append(helper.make_tensor_value_info("z", 1, ["n", 700]))
    kept = Model.from_proto(proto)
    Fold().run(kept, Context())
    assert ops(kept) == ["Transpose", "MatMul", "MatMul"]


def test_constant_graph_output_is_computed_once() -> None:
    model = folded("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[2] x) => (float[2] y, float[2] z) <float[2] w = {1, 2}>
        { a = Neg(w)  z = Abs(a)  y = Add(x, z) }
    """)
    assert ops(model) == ["Identity", "Add"]
    model.commit()
    Fold().run(model, Context())
    assert not len(model.journal)


def test_inside_subgraphs_and_of_whole_loops() -> None:
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 2}, int64 n = {3}, bool t = {1}>
        {
          a = Neg(w)
          s = Loop (n, t, a) <body = body (int64 i, bool go, float[2] acc)
              => (bool again, float[2] sum) { again = Identity(go)  sum = Add(acc, w) }>
          y = If (c) <
            then_branch = yes () => (float[2] p) { k = Abs(a)  p = Add(x, k) },
            else_branch = no () => (float[2] q) { q = Sub(x, s) }
          >
        }
    """
    model = Model.from_proto(parser.parse_model(text))
    model.graph.set_type("s", TensorType(1, (2,)))  # a loop's result needs a declared type
    Fold().run(model, Context())
    model.graph.verify()
    assert sorted(ops(model)) == ["Add", "If", "Sub"]


def test_branches_of_a_folded_if_are_not_folded() -> None:
    model = folded("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float x) => (float y) <float w = {2}, bool c = {0}>
        {
          a = Neg(w)
          y = If (c) <
            then_branch = one () => (float t) { t = Abs(a) },
            else_branch = two () => (float e) { e = Abs(w) }
          >
        }
    """)
    assert ops(model) == ["Identity"]


def test_overridable_initializers_are_no_constants() -> None:
    model = folded("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[2] x, float[2] w) => (float[2] y) <float[2] w = {1, 2}>
        { a = Neg(w)  y = Add(x, a) }
    """)
    assert ops(model) == ["Neg", "Add"]


def test_unknown_domains_are_passed_over() -> None:
    model = folded("""
        <ir_version: 8, opset_import: ["" : 17, "my.ops" : 1]>
        main (float[2] x) => (float[2] y) <float[2] w = {1, 2}>
        { a = my.ops.Mystery(w)  b = Neg(a)  y = Add(x, b) }
    """)
    assert ops(model) == ["Mystery", "Neg", "Add"]


def test_an_op_without_kernel_costs_only_itself() -> None:
    # onnxruntime has no Det for doubles; the Exp beside it is folded nevertheless.
    model = folded("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[2] x) => (float[2] y, double d)
        <float[2] w = {1, 2}, double[2,2] m = {1, 2, 3, 4}>
        { d = Det(m)  a = Exp(w)  y = Add(x, a) }
    """)
    assert ops(model) == ["Det", "Add"]


def test_empty_tensors() -> None:
    model = folded("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[0] x) => (float[0] y) <float[0, 3] w = {}, int64[1] s = {0}>
        { e = Reshape(w, s)  y = Add(x, e) }
    """)
    assert ops(model) == ["Add"]


def test_a_branch_with_random_operators_is_not_folded() -> None:
    model = folded("""
        <ir_version: 8, opset_import: ["" : 17]>
        main (float[2] x) => (float[2] y)
        <float[2] w = {1, 2}, bool c = {1}, float half = {0.5}, bool yes = {1}>
        {
          r = If (c) <
            then_branch = one () => (float[2] t) { t = Dropout(w, half, yes) },
            else_branch = two () => (float[2] e) { e = Neg(w) }
          >
          y = Add(x, r)
        }
    """)
    assert "If" in ops(model)


def test_a_size_known_only_after_running() -> None:
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[4, 2] x) => (float[a, b] y)
        <float[4, 2] c = {1, 2, 3, 4, 5, 6, 7, 8}, int64[4] p = {0, 0, 0, 0}>
        { d = Pad <mode = "edge"> (c, p)  s = Shape(d)
          e = ConstantOfShape <value = float[1] {1}> (s)  y = Add(x, e) }
    """
    assert ops(folded(text)) == ["Add"]


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("t = Gather(s, one)  y = Equal(t, x)", ["Equal"]),
        # onnxruntime computes this one, and returns text only
        ("t = StringConcat(s, s)  y = Equal(t, x)", ["StringConcat", "Equal"]),
    ],
)
def test_strings_that_are_not_utf8(body: str, left: list[str]) -> None:
    proto = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 20]>
        g (string[n] x) => (bool[m] y) <int64[1] one = {{1}}> {{ {body} }}
    """)
    proto.graph.initializer.append(
        TensorProto(name="s", data_type=TensorProto.STRING, dims=[2], string_data=[b"a", b"\xff"])
    )
    model = Model.from_proto(proto)
    Fold().run(model, Context())
    assert ops(model) == left
    strings = model.graph.tensor(model.graph.nodes[0].input[0])
    assert strings is not None
    assert strings.string_data[-1] == b"\xff"
