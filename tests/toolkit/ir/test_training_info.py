"""Initializers that training info or a quantization annotation names stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, StringStringEntryProto, TensorAnnotation, helper, numpy_helper

import toolkit
from tests.checks import assert_same_outputs, parse, random_feeds
from toolkit.ir.model import Model

NAMED = ("step", "rate", "scale")
"""Read by no node of the graph, and equal in contents to others: to be dropped or merged."""


@pytest.fixture
def trained() -> ModelProto:
    proto = parse(
        """g (float[N, 2] x) => (float[N, 2] y)
        <float[2] w = {1, 2}, float[2] twin = {1, 2}, float[2] unused = {5, 6}>
        { a = Add (x, w)  b = Add (a, twin)  y = Identity (b) }"""
    )
    for name in NAMED:
        proto.graph.initializer.append(numpy_helper.from_array(np.array([1, 2], np.float32), name))
    annotation = TensorAnnotation(tensor_name="x")
    annotation.quant_parameter_tensor_names.append(
        StringStringEntryProto(key="SCALE_TENSOR", value="scale")
    )
    proto.graph.quantization_annotation.append(annotation)
    info = proto.training_info.add()
    info.algorithm.CopyFrom(
        helper.make_graph(
            [
                helper.make_node("Mul", ["twin", "rate"], ["decay"]),
                helper.make_node("Sub", ["twin", "decay"], ["twin_next"]),
                helper.make_node("Add", ["step", "rate"], ["step_next"]),
            ],
            "algorithm",
            [],
            [],
        )
    )
    start = numpy_helper.from_array(np.array([0, 0], np.float32))
    info.initialization.CopyFrom(
        helper.make_graph(
            [helper.make_node("Constant", [], ["zero"], value=start)], "start", [], []
        )
    )
    info.initialization_binding.add(key="step", value="zero")
    info.update_binding.add(key="twin", value="twin_next")
    info.update_binding.add(key="step", value="step_next")
    return proto


@pytest.mark.parametrize("passes", ["dead", "share", "simplify", "simplify,simplify"])
def test_named_initializers_stay(trained: ModelProto, passes: str) -> None:
    model = toolkit.optimize(trained, passes=passes, validate="off").model
    before = {t.name: t for t in trained.graph.initializer}
    after = {t.name: t for t in model.to_proto().graph.initializer}
    for name in (*NAMED, "twin"):
        assert after[name] == before[name]
    assert_same_outputs(trained, model, [random_feeds(Model.from_proto(trained))])


def test_the_updated_weight_is_still_the_one_that_is_read(trained: ModelProto) -> None:
    """`w` and `twin` are equal only until the first update: they must not become one."""
    model = toolkit.optimize(trained, passes="simplify", validate="off").model
    read = {name for node in model.graph.nodes for name in node.input}
    assert {"w", "twin"} <= read


def test_others_go(trained: ModelProto) -> None:
    model = toolkit.optimize(trained, passes="simplify", validate="off").model
    assert "unused" not in model.graph.initializers


def test_training_info_is_kept_as_it_came(trained: ModelProto) -> None:
    model = toolkit.optimize(trained, passes="simplify", validate="off").model
    proto = model.to_proto()
    assert len(proto.training_info) == 1
    kept, given = proto.training_info[0], trained.training_info[0]
    assert kept.SerializeToString() == given.SerializeToString()
    assert proto.graph.quantization_annotation == trained.graph.quantization_annotation
