"""The least IR version that a model needs: by its opset, its element types and its features.

Metadata (`metadata_props`, the `value_info` of functions) demands none: parsers skip fields that
they do not know, and the meaning of the model does not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import AttributeProto, FunctionProto, NodeProto, TensorProto, TypeProto, helper

from toolkit.ir.model import Model

_TYPES: Mapping[int, tuple[str, ...]] = {
    4: ("BFLOAT16",),
    9: ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
    10: ("INT4", "UINT4"),
    11: ("FLOAT4E2M1",),
    12: ("FLOAT8E8M0",),
    13: ("INT2", "UINT2"),
}
"""IR version -> element types that came with it."""

_IR_OF_TYPE = {
    TensorProto.DataType.Value(name): version
    for version, names in _TYPES.items()
    for name in names
    if hasattr(TensorProto, name)
}


def ir_of_opset(opset: int) -> int:
    """Return the IR version that came with an opset."""
    table = helper.OP_SET_ID_VERSION_MAP
    return max(ir for (domain, v), ir in table.items() if domain == "ai.onnx" and v <= opset)


def least_ir(model: Model) -> int:
    """Return the least IR version that has everything the model contains."""
    return max(_needs(model), default=3)


def _needs(model: Model) -> Iterator[int]:
    yield ir_of_opset(model.opsets.get("", 1))
    proto = model.to_proto()  # weights are references: this is cheap
    graph = proto.graph
    inputs = {value.name for value in graph.input}
    if any(tensor.name not in inputs for tensor in graph.initializer):
        yield 4
    if graph.quantization_annotation:
        yield 5
    if graph.sparse_initializer:
        yield 6
    if proto.training_info:
        yield 7
    if _named(proto, "configuration"):
        yield 11
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield from _of_type(value.type)
    for inner in model.graphs():
        for tensor in inner.initializers.values():
            yield _IR_OF_TYPE.get(tensor.data_type, 3)
        for node in inner.nodes:
            yield from _of_node(node)
    for function in model.functions:
        yield from _of_function(function)


def _of_function(function: FunctionProto) -> Iterator[int]:
    yield 8
    if function.attribute_proto:
        yield 9
    if function.overload:
        yield 10
    for node in function.node:
        yield from _of_node(node)
    for entry in function.opset_import:
        if entry.domain in ("", "ai.onnx"):
            yield ir_of_opset(entry.version)


def _of_node(node: NodeProto) -> Iterator[int]:
    if node.overload:
        yield 10
    if _named(node, "device_configurations"):
        yield 11
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            yield _IR_OF_TYPE.get(attribute.t.data_type, 3)
        elif attribute.name in ("to", "dtype", "output_dtype"):
            yield _IR_OF_TYPE.get(attribute.i, 3)
        elif attribute.type == AttributeProto.SPARSE_TENSOR:
            yield 6
        elif attribute.type == AttributeProto.TYPE_PROTO:
            yield 8


def _of_type(declared: TypeProto) -> Iterator[int]:
    kind = declared.WhichOneof("value")
    if kind == "tensor_type":
        yield _IR_OF_TYPE.get(declared.tensor_type.elem_type, 3)
    elif kind == "optional_type":
        yield 8
        yield from _of_type(declared.optional_type.elem_type)
    elif kind == "sequence_type":
        yield from _of_type(declared.sequence_type.elem_type)


def _named(message: NodeProto | object, field: str) -> bool:
    """Return whether a protobuf message has entries in a field that older onnx does not know."""
    return bool(getattr(message, field, ()))
