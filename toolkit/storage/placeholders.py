"""A model's snapshot without its weights: typed placeholders for the tensors stored elsewhere.

onnx's checker would look for their files; with the placeholders it sees types and shapes only.
"""

from __future__ import annotations

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from toolkit.ir import node as nd
from toolkit.storage.weights import is_external

_DOMAIN = "toolkit.placeholder"


def replace_large_tensors(proto: ModelProto) -> None:
    """Make every tensor whose data is elsewhere an input of the main graph, typed but empty.

    Where that cannot be (in a function, or under a name that another branch has taken) a node of
    an unknown domain stands in. The checker passes over it, but asks less of the shapes then.
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
    """The tensor of a Constant whose data is elsewhere."""
    held = (a.t for a in node.attribute if a.type == AttributeProto.TENSOR)
    return next((tensor for tensor in held if is_external(tensor)), None)


def _make_input(main: GraphProto, name: str, tensor: TensorProto, taken: set[str]) -> bool:
    """Declare `name` as an input of the main graph, unless another tensor has that name."""
    if name in taken:
        return False
    taken.add(name)
    main.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    return True


def _make_placeholder(node: NodeProto) -> None:
    node.op_type, node.domain = "Tensor", _DOMAIN
    node.ClearField("attribute")
