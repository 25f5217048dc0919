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

    In a function, and for a name that is already taken, the placeholder is a node of an unknown
    domain. The checker accepts it, but cannot infer shapes from it.
    """
    taken = {value.name for value in proto.graph.input}
    _replace_in_graph(proto.graph, proto.graph, taken)
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
        elif not _make_input(main, node.output[0], tensor, taken):
            _make_placeholder(node)
            kept.append(node)
    inputs = {value.name for value in graph.input}
    for tensor in large:
        if tensor.name in inputs or _make_input(main, tensor.name, tensor, taken):
            continue
        kept.insert(0, NodeProto(op_type="Tensor", domain=_DOMAIN, output=[tensor.name]))
    if large or len(kept) < len(graph.node):
        replaced = GraphProto(initializer=small, node=kept)
        for field in ("node", "initializer"):
            graph.ClearField(field)
        graph.MergeFrom(replaced)


def _large_tensor(node: NodeProto) -> TensorProto | None:
    """Return the external tensor among the attributes of a node, or None."""
    held = (a.t for a in node.attribute if a.type == AttributeProto.TENSOR)
    return next((tensor for tensor in held if is_external(tensor)), None)


def _make_input(main: GraphProto, name: str, tensor: TensorProto, taken: set[str]) -> bool:
    """Declare an input of the main graph; return False if the name is taken."""
    if name in taken:
        return False
    taken.add(name)
    main.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    return True


def _make_placeholder(node: NodeProto) -> None:
    node.op_type, node.domain = "Tensor", _DOMAIN
    node.ClearField("attribute")
