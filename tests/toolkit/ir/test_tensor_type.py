"""Types, nodes and operators: the small facts that everything else stands on."""

import pytest
from onnx import TensorProto, helper

from toolkit.ir import node as nd
from toolkit.ir.op_traits import BROADCASTING, ELEMENTWISE, REDUCTIONS, is_random
from toolkit.ir.tensor_type import TensorType, dtype_name, from_proto, is_nameless, to_proto


def declared(*shape: str | int) -> TensorType:
    found = from_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, shape))
    assert found is not None
    return found


@pytest.mark.parametrize("text", ["", "?", "*", "None", "none", "-1", "unk", "Unknown", "dynamic"])
def test_what_exporters_write_for_unknown_is_no_name(text):
    assert is_nameless(text)
    one, other = declared(text, text).shape or (0, 0)
    assert one != other


@pytest.mark.parametrize("text", ["N", "batch", "unk__12", "None_1", "anything", "2 * n", "?1x"])
def test_names_are_names(text):
    assert not is_nameless(text)
    one, other = declared(text, text).shape or (0, 0)
    assert one == other


def test_sizes_are_written_as_they_are_spelled():
    type_ = declared("n", "?", 3)
    written = to_proto(type_).tensor_type.shape.dim
    assert [(d.dim_param, d.dim_value) for d in written] == [("n", 0), ("", 0), ("", 3)]
    named = to_proto(type_, spell=lambda size: "some").tensor_type.shape.dim
    assert [(d.dim_param, d.dim_value) for d in named] == [("some", 0), ("some", 0), ("", 3)]
    assert from_proto(to_proto(TensorType(TensorProto.INT64, None))).shape is None


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(TensorProto.FLOAT, "float32"), (TensorProto.STRING, "string"), (0, "unknown")],
)
def test_names_of_element_types(dtype, name):
    assert dtype_name(dtype) == name


def test_operators_by_name():
    assert nd.qualified(helper.make_node("Relu", [], [])) == "Relu"
    assert nd.qualified(helper.make_node("Relu", [], [], domain="ai.onnx")) == "Relu"
    assert nd.qualified(helper.make_node("Gelu", [], [], domain="acme")) == "acme::Gelu"
    assert [nd.plain_domain(d) for d in ("", "ai.onnx", "acme")] == ["", "", "acme"]


def test_blanks_at_the_end_are_nothing():
    assert nd.without_blanks(["a", "", "b", "", ""]) == ["a", "", "b"]
    assert nd.without_blanks(["", ""]) == []


def test_random_operators():
    assert is_random(helper.make_node("RandomNormal", [], ["y"]))
    assert is_random(helper.make_node("Dropout", ["x", "", "training"], ["y"]))
    assert not is_random(helper.make_node("Dropout", ["x", "ratio", ""], ["y"]))
    assert not is_random(helper.make_node("Bernoulli", ["x"], ["y"], domain="acme"))
    assert not (BROADCASTING | REDUCTIONS) & ELEMENTWISE
