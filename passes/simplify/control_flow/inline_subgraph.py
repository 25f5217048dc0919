"""Inline a subgraph into the graph that contains its node; read known conditions."""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from toolkit.ir.clone import Names, clone
from toolkit.ir.graph import Graph


def insert_copy(graph: Graph, node: NodeProto, subgraph: Graph, names: Names) -> list[NodeProto]:
    """Insert a copy of the subgraph at its node; `names` maps its inputs, then all values."""
    for name, tensor in subgraph.initializers.items():
        if name in names:  # copied by an earlier iteration
            continue
        names[name] = graph.fresh(name)
        copy = TensorProto()
        copy.CopyFrom(tensor)
        copy.name = names[name]
        graph.put_initializer(copy)
    copies = clone((subgraph.snapshot(n) for n in subgraph.nodes), names, graph.fresh)
    return [graph.insert(copy, at=node) for copy in copies]


def replace_results(graph: Graph, node: NodeProto, values: list[str]) -> None:
    """Replace each result of the node by the value at its index, and remove the node."""
    renamed: dict[str, str] = {}
    for result, value in zip(list(node.output), values, strict=True):
        if result:
            renamed[value] = graph.replace(result, renamed.get(value, value))
    graph.prune(node)


def known_flag(graph: Graph, value: str) -> bool | None:
    """Return the value of a condition: constant, or inferred from shapes (`x.shape[1] == 1`)."""
    found = known_integer(graph, value)
    return None if found is None else bool(found)


def known_integer(graph: Graph, value: str) -> int | None:
    """Return the value of an integer or a flag: constant, or inferred from shapes."""
    found = graph.const(value)
    if found is None:
        found = graph.data(value)
    if found is None or found.size != 1:
        return None
    item = found.reshape(()).item()
    return int(item) if isinstance(item, (bool, int)) else None
