"""Clone nodes under new names, to move a subgraph or a function into another graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping

from onnx import AttributeProto, GraphProto, NodeProto

from toolkit.ir import node as nd

Names = MutableMapping[str, str]


def clone(
    nodes: Iterable[NodeProto],
    names: Names,
    fresh: Callable[[str], str],
    attributes: Mapping[str, AttributeProto] | None = None,
) -> list[NodeProto]:
    """Copy `nodes`, with their operands and results renamed.

    `names` maps old names to new ones; every result without an entry gets a fresh name, which is
    added. Names that are neither defined here nor in `names` stay (outer captures). `attributes`
    are those of a function call: references to them are replaced by their values, and a reference
    to an omitted one is dropped.
    """
    copies: list[NodeProto] = []
    for node in nodes:
        copy = NodeProto()
        copy.CopyFrom(node)
        if attributes is not None:
            _resolve_references(copy, attributes)
        copies.append(copy)
    for copy in copies:
        for name in nd.outputs_of(copy):
            if name not in names:
                names[name] = fresh(name)
    for copy in copies:
        _rename_node(copy, names, fresh, attributes)
        if copy.name:
            copy.name = fresh(copy.name)
    return copies


def _rename_node(
    node: NodeProto,
    names: Names,
    fresh: Callable[[str], str],
    attributes: Mapping[str, AttributeProto] | None,
) -> None:
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for graph in nd.graphs_of(node):
        _rename_graph(graph, dict(names), fresh, attributes)


def _rename_graph(
    graph: GraphProto,
    names: Names,
    fresh: Callable[[str], str],
    attributes: Mapping[str, AttributeProto] | None,
) -> None:
    """Rename a subgraph in place: its own values get fresh names as well."""
    for declared in graph.input:
        names[declared.name] = declared.name = fresh(declared.name)
    for tensor in graph.initializer:
        if tensor.name not in names:  # else it is also an input, renamed above
            names[tensor.name] = fresh(tensor.name)
        tensor.name = names[tensor.name]
    for sparse in graph.sparse_initializer:
        names[sparse.values.name] = sparse.values.name = fresh(sparse.values.name)
    copies = clone(graph.node, names, fresh, attributes)
    graph.ClearField("node")
    graph.node.extend(copies)
    for declared in [*graph.output, *graph.value_info]:
        declared.name = names.get(declared.name, declared.name)


def _resolve_references(node: NodeProto, attributes: Mapping[str, AttributeProto]) -> None:
    for index in range(len(node.attribute) - 1, -1, -1):
        attribute = node.attribute[index]
        if not attribute.ref_attr_name:
            continue
        given = attributes.get(attribute.ref_attr_name)
        if given is None:
            del node.attribute[index]
            continue
        name = attribute.name
        attribute.CopyFrom(given)
        attribute.name = name
