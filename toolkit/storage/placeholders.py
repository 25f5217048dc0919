"""Replace the external tensors of a snapshot by typed placeholders.

onnx's checker would open the files of the tensors; placeholders give it types and shapes only.
"""

from __future__ import annotations

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from toolkit.ir import node as nd
from toolkit.storage.weights import is_external

_DOMAIN = "toolkit.placeholder"


def replace_large_tensors(proto: ModelProto) -> None:
    """Turn every external tensor into an input of the main graph.

    Tensors of one name, in sibling subgraphs, become inputs of different names. In a function the
    placeholder is a node of an unknown domain, which the checker accepts without inferring shapes.
    """
    _replace_in_graph(proto.graph, proto.graph, {value.name for value in proto.graph.input})
    for function in proto.functions:
        large = [node for node in function.node if _large_tensor(node) is not None]
        for node in large:
            _make_placeholder(node)
        if large:
            function.opset_import.append(helper.make_opsetid(_DOMAIN, 1))
    proto.opset_import.append(helper.make_opsetid(_DOMAIN, 1))


def _replace_in_graph(graph: GraphProto, main: GraphProto, taken: set[str]) -> None:
    small = [tensor for tensor in graph.initializer if not is_external(tensor)]
    large = [tensor for tensor in graph.initializer if is_external(tensor)]
    kept: list[NodeProto] = []
    for node in graph.node:
        for inner in nd.graphs_of(node):
            _replace_in_graph(inner, main, taken)
        tensor = _large_tensor(node)
        if tensor is None:
            kept.append(node)
        else:
            _make_input(graph, main, node.output[0], tensor, taken)
    inputs = {value.name for value in graph.input}
    for tensor in large:
        if tensor.name not in inputs:
            _make_input(graph, main, tensor.name, tensor, taken)
    if large or len(kept) < len(graph.node):
        replaced = GraphProto(initializer=small, node=kept)
        for field in ("node", "initializer"):
            graph.ClearField(field)
        graph.MergeFrom(replaced)


def _large_tensor(node: NodeProto) -> TensorProto | None:
    """Return the external tensor among the attributes of a node, or None."""
    held = (a.t for a in node.attribute if a.type == AttributeProto.TENSOR)
    return next((tensor for tensor in held if is_external(tensor)), None)


def _make_input(
    graph: GraphProto, main: GraphProto, name: str, tensor: TensorProto, taken: set[str]
) -> None:
    """Declare an input of the main graph, under another name if `name` is taken."""
    new = name
    while new in taken:
        new += "_"
    if new != name:
        _rename_uses(graph, name, new)
    taken.add(new)
    main.input.append(helper.make_tensor_value_info(new, tensor.data_type, tensor.dims))


def _rename_uses(graph: GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
        for inner in nd.graphs_of(node):
            _rename_uses(inner, old, new)
    for output in graph.output:
        output.name = new if output.name == old else output.name


def _make_placeholder(node: NodeProto) -> None:
    node.op_type, node.domain = "Tensor", _DOMAIN
    node.ClearField("attribute")
