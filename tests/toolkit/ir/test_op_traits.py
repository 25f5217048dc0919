"""Traits agree with ONNX's schemas, and movement with its reference implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, defs, helper
from onnx.reference import ReferenceEvaluator

from toolkit.ir import op_traits

_TRAITS = {
    name: trait for name, trait in vars(op_traits).items() if name[0].isupper() and name.isupper()
}


@pytest.mark.parametrize("trait", sorted(_TRAITS))
def test_traits_name_operators_of_onnx(trait: str) -> None:
    contrib = trait in ("PURE_CONTRIB", "INTEGER_COMPUTE", "QUANTIZED_WEIGHTS")
    known = {schema.name for schema in defs.get_all_schemas()} | {"SimplifiedLayerNormalization"}
    names = [name for name in _TRAITS[trait] if "::" not in name]
    assert contrib or set(names) <= known


@pytest.mark.parametrize("op_type", sorted(op_traits.MOVEMENT))
def test_movement_keeps_the_element_type(op_type: str) -> None:
    schema = defs.get_schema(op_type)
    assert {output.type_str for output in schema.outputs} == {schema.inputs[0].type_str}


_OPERANDS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "Compress": ([[1, 0, 1, 1]], {"axis": 1}),
    "DepthToSpace": ([], {"blocksize": 2}),
    "Expand": ([[2, 4, 2, 2]], {}),
    "Flatten": ([], {"axis": 2}),
    "Gather": ([[1, 3]], {"axis": 1}),
    "GatherElements": ([np.tile([[0, 1], [1, 0]], (1, 4, 1, 1))], {"axis": 3}),
    "GatherND": ([[0, 3]], {}),
    "Identity": ([], {}),
    "Reshape": ([[2, -1]], {}),
    "ReverseSequence": ([[2, 1, 1, 2]], {"batch_axis": 1, "time_axis": 2}),
    "Slice": ([[1], [3], [1]], {}),
    "SpaceToDepth": ([], {"blocksize": 2}),
    "Split": ([], {"axis": 1, "num_outputs": 2}),
    "Squeeze": ([[0]], {}),
    "Tile": ([[1, 1, 2, 1]], {}),
    "Transpose": ([], {"perm": [0, 2, 3, 1]}),
    "Unsqueeze": ([[0]], {}),
}


@pytest.mark.parametrize("op_type", sorted(op_traits.MOVEMENT))
def test_movement_only_moves_elements_of_the_first_operand(op_type: str) -> None:
    others, attributes = _OPERANDS[op_type]
    arrays = [np.array(other, bool if op_type == "Compress" else np.int64) for other in others]
    names = [f"i{number}" for number in range(len(others))]
    outputs = ["y", "z"] if op_type == "Split" else ["y"]
    node = helper.make_node(op_type, ["x", *names], outputs, **attributes)
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    stored = [
        helper.make_tensor(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape, a)
        for n, a in zip(names, arrays, strict=True)
    ]
    graph = helper.make_graph([node], "g", values, results, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    x = np.arange(16, dtype=np.float32).reshape(1, 4, 2, 2)
    for result in map(np.asarray, ReferenceEvaluator(model).run(None, {"x": x})):
        assert np.isin(result, x).all()
        if op_type in op_traits.VIEWS:
            assert result.reshape(-1).tolist() == x.reshape(-1).tolist()
