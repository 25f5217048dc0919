"""Placeholders stand for large tensors while onnx's checker runs."""

from __future__ import annotations

import onnx
from onnx import ModelProto, TensorProto, shape_inference

from tests.toolkit.storage.large_models import SIDE, everywhere, tensors_of
from toolkit.storage.placeholders import replace_large_tensors
from toolkit.storage.serialize import strip_proto
from toolkit.storage.weights import Weights, is_external


def replaced(proto: ModelProto) -> ModelProto:
    found = strip_proto(proto, Weights())
    replace_large_tensors(found)
    return found


def inputs_of(proto: ModelProto) -> dict[str, list[int]]:
    found = {value.name: value.type.tensor_type for value in proto.graph.input}
    assert {t.elem_type for name, t in found.items() if name != "on"} == {TensorProto.FLOAT}
    return {name: [dim.dim_value for dim in t.shape.dim] for name, t in found.items()}


def test_large_tensors_become_typed_inputs() -> None:
    proto = replaced(everywhere())
    large = [SIDE, SIDE]
    assert inputs_of(proto) == {
        "x": large,
        "on": [],
        "w": large,
        "c": large,
        "p": large,
        "q": large,
    }
    assert {tensor.name for tensor in tensors_of(proto)} == {"small", "words"}
    onnx.checker.check_model(proto)


def test_shapes_are_inferred_from_the_inputs() -> None:
    proto = replaced(everywhere())
    inferred = shape_inference.infer_shapes(proto, strict_mode=True)
    [branched] = [value for value in inferred.graph.value_info if value.name == "branched"]
    assert [dim.dim_value for dim in branched.type.tensor_type.shape.dim] == [SIDE, SIDE]


def test_a_function_gets_a_node_in_place_of_its_constant() -> None:
    [function] = replaced(everywhere()).functions
    assert [(node.op_type, list(node.output)) for node in function.node] == [
        ("Tensor", ["k"]),
        ("Mul", ["v"]),
    ]
    assert not any(is_external(a.t) for node in function.node for a in node.attribute)


def test_an_initializer_that_is_an_input_stays_one_input() -> None:
    proto = everywhere()
    proto.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, [SIDE, SIDE]))
    found = replaced(proto)
    assert [value.name for value in found.graph.input].count("w") == 1
    assert "w" not in {tensor.name for tensor in tensors_of(found)}
    onnx.checker.check_model(found)


def test_equal_names_in_sibling_subgraphs_become_different_inputs() -> None:
    proto = everywhere()
    [branches] = [node for node in proto.graph.node if node.op_type == "If"]
    for attribute in branches.attribute:
        attribute.g.initializer[0].name = attribute.g.node[0].input[1] = "p"
    found = replaced(proto)
    assert {"p", "p_"} < set(inputs_of(found))
    onnx.checker.check_model(found)
