"""`share`: equal initializers are stored once, whatever their encoding, and only equal ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from passes.simplify.dedup_initializers import ShareInitializers
from tests.checks import check, model
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.storage.weights import is_external

SHARE = ShareInitializers()


def two_weights(first: TensorProto, second: TensorProto, op_type: str = "Add") -> onnx.ModelProto:
    """Return a model of y = (x op first) op second."""
    dims = list(first.dims)
    return helper.make_model(
        helper.make_graph(
            [
                helper.make_node(op_type, ["x", first.name], ["sum"]),
                helper.make_node(op_type, ["sum", second.name], ["y"]),
            ],
            "g",
            [helper.make_tensor_value_info("x", first.data_type, dims)],
            [helper.make_tensor_value_info("y", first.data_type, dims)],
            [first, second],
        ),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )


def shared(proto: onnx.ModelProto) -> list[str]:
    subject = Model.from_proto(proto)
    SHARE.run(subject, Context())
    subject.graph.verify()
    return list(subject.graph.initializers)


def test_equal_initializers_are_stored_once() -> None:
    subject = check(
        SHARE,
        """g (float[2] x) => (float[2] y)
        <float[2] a = {1, 2}, float[2] b = {1, 2}, float[2] c = {1, 3}> {
            s = Add (x, a)
            t = Mul (s, b)
            y = Add (t, c)
        }""",
    )
    assert list(subject.graph.initializers) == ["a", "c"]


@pytest.mark.parametrize(
    "weights",
    [
        "float[2] a = {1, 2}, float[1, 2] b = {1, 2}",  # other dims
        "float[2] a = {0, 2}, float[2] b = {-0.0, 2}",  # other bits
    ],
)
def test_near_misses(weights: str) -> None:
    check(
        SHARE,
        f"g (float[1, 2] x) => (float[1, 2] y) <{weights}> {{ s = Div (x, a) y = Div (s, b) }}",
        near_miss=True,
    )


def test_equal_bytes_of_another_type_are_no_match() -> None:
    check(
        SHARE,
        """g (float[2] x) => (float[2] y, int32[2] i) <float[2] a = {0, 0}, int32[2] b = {0, 0}> {
            y = Add (x, a)
            i = Add (b, b)
        }""",
        near_miss=True,
    )


def test_inputs_and_outputs_stay() -> None:
    subject = model(
        """g (float[2] x, float[2] set = {1, 2}) => (float[2] y, float[2] out)
        <float[2] out = {1, 2}, float[2] a = {1, 2}> { s = Add (x, set) y = Add (s, a) }"""
    )
    SHARE.run(subject, Context())
    assert list(subject.graph.initializers) == ["set", "out", "a"]


def test_before_ir_4_initializers_are_constants_although_they_are_inputs() -> None:
    subject = model(
        """<ir_version: 3, opset_import: ["" : 9]>
        g (float[2] x, float[2] a = {1, 2}, float[2] b = {1, 2}) => (float[2] y) {
            s = Add (x, a)
            y = Mul (s, b)
        }"""
    )
    SHARE.run(subject, Context())
    subject.graph.verify()
    assert list(subject.graph.initializers) == ["a"]
    assert subject.graph.feeds == ["x"]


ENCODINGS = [
    (TensorProto.FLOAT, [1.5, -2.0]),
    (TensorProto.FLOAT16, [1.5, -2.0]),
    (TensorProto.BFLOAT16, [1.5, -2.0]),
    (TensorProto.INT64, [1, -2]),
    (TensorProto.INT4, [1, -2, 3]),
    (TensorProto.FLOAT8E4M3FN, [1.5, -2.0]),
    (TensorProto.BOOL, [True, False]),
    (TensorProto.STRING, ["a", "bc"]),
]


@pytest.mark.parametrize(("kind", "values"), ENCODINGS, ids=[str(k) for k, _ in ENCODINGS])
def test_raw_and_typed_contents_are_the_same(kind: int, values: Any) -> None:
    typed = helper.make_tensor("a", kind, [len(values)], values)
    other = TensorProto()
    if kind == TensorProto.STRING:
        other.CopyFrom(typed)
    else:
        other.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(typed)))
        assert other.HasField("raw_data")
    other.name = "b"
    assert shared(two_weights(typed, other)) == ["a"]


def test_strings_are_compared_one_by_one() -> None:
    a = numpy_helper.from_array(np.array(["a", "bc"], object), "a")
    b = numpy_helper.from_array(np.array(["ab", "c"], object), "b")
    assert shared(two_weights(a, b)) == ["a", "b"]


def large(name: str, change_at: int | None = None) -> TensorProto:
    array = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    if change_at is not None:
        array[change_at] += 1
    return numpy_helper.from_array(array, name)


def test_large_tied_weights_and_a_difference_between_the_samples(tmp_path: Path) -> None:
    proto = two_weights(large("a"), large("b"))
    proto.graph.initializer.append(large("c", change_at=77_777))
    proto.graph.node.append(helper.make_node("Add", ["y", "c"], ["z"]))
    proto.graph.output[0].name = "z"
    onnx.save(proto, tmp_path / "m.onnx")
    subject = Model.load(tmp_path / "m.onnx")
    assert all(map(is_external, subject.graph.initializers.values()))
    SHARE.run(subject, Context())
    assert list(subject.graph.initializers) == ["a", "c"]
    subject.save(tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").stat().st_size < 0.7 * (tmp_path / "m.onnx").stat().st_size
    assert [t.name for t in onnx.load(tmp_path / "out.onnx").graph.initializer] == ["a", "c"]


BRANCHES = """g (bool c, float[N] x) => (float[N] y) {outer} {{
    y = If (c) <
        then_branch = t () => (float[N] a) <float[1] p = {{2}}> {{ a = Mul (x, p) }},
        else_branch = f () => (float[N] b) <float[1] q = {{2}}> {{ b = Add (x, q) }}
    >
}}"""


def inner_initializers(subject: Model) -> list[list[str]]:
    [node] = [n for n in subject.graph.nodes if n.op_type == "If"]
    return [list(branch.initializers) for branch in subject.graph.subgraphs(node)]


def test_branches_share_with_the_graph_around_them() -> None:
    text = BRANCHES.format(outer="<float[1] o = {2}>").replace("y = If", "x2 = Mul (x, o) y = If")
    subject = check(SHARE, text)
    assert inner_initializers(subject) == [[], []]
    assert list(subject.graph.initializers) == ["o"]


def test_small_tensors_of_separate_branches_stay_where_they_are() -> None:
    check(SHARE, BRANCHES.format(outer=""), near_miss=True)


def test_large_tensors_of_separate_branches_move_outside() -> None:
    subject = check(ShareInitializers(hoist_bytes=1), BRANCHES.format(outer=""))
    assert inner_initializers(subject) == [[], []]
    assert len(subject.graph.initializers) == 1
