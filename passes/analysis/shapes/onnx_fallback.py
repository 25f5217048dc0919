"""ONNX's own shape inference, node by node, for operators without a rule.

Symbolic sizes are passed as dim_params and recognized in the result. Other dim_params of the result
are unknown sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto, helper, numpy_helper
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError, infer_node_outputs

from passes.analysis.shapes.facts import Fact, Knowledge, numeric
from toolkit.ir import node as nd, to_proto
from toolkit.ir.op_schema import schema_of
from toolkit.storage.weights import is_external, nbytes
from toolkit.symbolic import Expr

_MOST_BYTES = 1 << 12
"""Largest constant in bytes passed to the inference: axes, sizes and scales, not weights."""


class OnnxInference:
    """Call ONNX's inference; keep the types of sequences and optionals."""

    def __init__(self) -> None:
        self._sizes: dict[str, Expr] = {}
        self._others: dict[tuple[int, str], TypeProto] = {}

    def __call__(self, node: NodeProto, known: Knowledge) -> list[Fact] | None:
        """Return the facts about the node's outputs, or None for an operator without a schema."""
        domain = nd.domain_of(node)
        schema = schema_of(node.op_type, known.graph.opset(domain), domain)
        if schema is None:
            return None
        types = {name: self._type_of(name, known) for name in node.input if name}
        contents = {name: tensor for name in types if (tensor := _contents(name, known))}
        if known.graph.subgraphs(node):
            node = known.graph.snapshot(node)  # the node itself lacks its subgraphs
        imports = [helper.make_opsetid(d, v) for d, v in known.graph.model.opsets.items()]
        try:
            found = infer_node_outputs(schema, node, types, contents, opset_imports=imports)
        except (InferenceError, ValidationError, RuntimeError, ValueError, KeyError):
            found = {}  # inputs unknown or malformed
        return [self._fact(name, found, known) for name in node.output]

    def _type_of(self, value: str, known: Knowledge) -> TypeProto:
        scope = known.graph.scope_of(value)
        other = self._others.get((id(scope), value))
        if other is not None:
            return other
        found = known.type(value)
        if found.dtype:
            return to_proto(found, spell=self._name)
        declared = None if scope is None else scope.declared_type(value)
        if scope is None or declared is None:
            return TypeProto()
        contract = scope.parent is None and scope.is_input(value)
        return declared if contract else _without_shapes(declared)

    def _name(self, size: Expr) -> str:
        name = str(size)
        self._sizes[name] = size
        return name

    def _fact(self, value: str, found: Mapping[str, TypeProto], known: Knowledge) -> Fact:
        proto = found.get(value)
        self._others.pop((id(known.graph), value), None)
        if proto is None:
            return Fact(0, None)
        if proto.WhichOneof("value") != "tensor_type":
            self._others[id(known.graph), value] = proto
            return Fact(0, None)
        tensor = proto.tensor_type
        if not tensor.HasField("shape"):
            return Fact(tensor.elem_type, None)
        sizes = [
            d.dim_value if d.HasField("dim_value") else self._sizes.get(d.dim_param)
            for d in tensor.shape.dim
        ]
        return Fact(tensor.elem_type, sizes)


def _without_shapes(declared: TypeProto) -> TypeProto:
    """Return the type of a sequence or optional without its sizes."""
    bare = TypeProto()
    bare.CopyFrom(declared)
    inner = bare
    while (kind := inner.WhichOneof("value")) in ("sequence_type", "optional_type"):
        inner = getattr(inner, str(kind)).elem_type
    if kind == "tensor_type":
        inner.tensor_type.ClearField("shape")
    return bare


def _contents(value: str, known: Knowledge) -> TensorProto | None:
    tensor = known.graph.tensor(value)
    if tensor is not None:
        if tensor.data_type == TensorProto.STRING or nbytes(tensor) > _MOST_BYTES:
            return None
        if not is_external(tensor):
            return tensor
        return numpy_helper.from_array(known.graph.model.weights.array(tensor), value)
    data = known.data(value)
    if data is None or not numeric(data):
        return None
    dtype = helper.tensor_dtype_to_np_dtype(known.type(value).dtype)
    return numpy_helper.from_array(np.asarray(data, dtype=dtype), value)
