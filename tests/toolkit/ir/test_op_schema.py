"""Facts from ONNX's schemas at the opset of a model."""

from __future__ import annotations

import pytest
from onnx import AttributeProto, helper

from tests.checks import model
from toolkit.ir.op_schema import OpFacts, facts_of, schema_of


def facts(node: str, opset: int) -> OpFacts | None:
    text = f"""<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1, "mine" : 1]>
        g (float[N] x) => (float[N] y) {{ {node} }}"""
    subject = model(text)
    return facts_of(subject.graph, subject.graph.nodes[0])


@pytest.mark.parametrize(("opset", "axis"), [(12, 1), (13, -1)])
def test_defaults_are_those_of_the_opset(opset: int, axis: int) -> None:
    found = facts("y = Softmax (x)", opset)
    assert found is not None
    default = AttributeProto.FromString(found.defaults["axis"])
    assert helper.get_attribute_value(default) == axis


def test_optional_outputs_are_counted_from_the_first() -> None:
    found = facts("y, m = Dropout (x)", 21)
    assert found is not None
    assert found.optional_outputs == {1}
    assert "seed" not in found.defaults, "an attribute without a default"


@pytest.mark.parametrize("node", ["y = com.microsoft.Gelu (x)", "y = mine.Relu (x)"])
def test_operators_of_other_domains_have_no_facts(node: str) -> None:
    assert facts(node, 21) is None


def test_an_operator_has_no_schema_before_its_first_opset() -> None:
    assert schema_of("Gelu", 19, "") is None
    assert schema_of("Gelu", 20, "") is not None
