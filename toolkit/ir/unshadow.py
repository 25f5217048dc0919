"""Rename the inputs of subgraphs that shadow an outer name.

ONNX requires unique names among a graph and the graphs around it. Its checker and onnxruntime still
let the inputs of a subgraph shadow a name, and exporters rely on it: paddle2onnx gives loop-carried
values their outer names. In the subgraph the name means the inner value, which is renamed.
Shadowing by an initializer stays an error, because onnxruntime sometimes takes the outer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from onnx import GraphProto, ModelProto, NodeProto

from toolkit.ir import node as nd

_Scopes = tuple[set[str], ...]
"""The names defined in a graph and in each graph around it."""


def without_shadows(proto: ModelProto) -> ModelProto:
    """Return the model itself if no name shadows another, else a copy with distinct names."""
    scopes = list(_top_scopes(proto))
    if not any(_shadowing(*inner) for scope in scopes for inner in _subgraphs(*scope)):
        return proto
    made = ModelProto()
    made.CopyFrom(proto)
    taken = {name for _, (names,) in scopes for name in names}
    taken.update(n for scope in scopes for graph, _ in _subgraphs(*scope) for n in _defined(graph))
    for nodes, around in _top_scopes(made):
        _rename(nodes, {}, around, taken)
    return made


def _top_scopes(
    proto: ModelProto,
) -> Iterator[tuple[Iterable[NodeProto], tuple[set[str]]]]:
    """Yield the main graph and the functions: their nodes, and the names that they define."""
    yield proto.graph.node, (_defined(proto.graph),)
    for function in proto.functions:
        yield function.node, ({*function.input, *_outputs(function.node)},)


def _subgraphs(nodes: Iterable[NodeProto], around: _Scopes) -> Iterator[tuple[GraphProto, _Scopes]]:
    """Yield every subgraph with the names defined around it."""
    for node in nodes:
        for graph in nd.graphs_of(node):
            yield graph, around
            yield from _subgraphs(graph.node, (_defined(graph), *around))


def _rename(
    nodes: Iterable[NodeProto], renamed: Mapping[str, str], around: _Scopes, taken: set[str]
) -> None:
    """Apply `renamed` to the nodes, and rename inputs of subgraphs that shadow a name."""
    for node in nodes:
        if renamed:
            node.input[:] = [renamed.get(name, name) for name in node.input]
        for graph in nd.graphs_of(node):
            here = _defined(graph)
            inner = {name: new for name, new in renamed.items() if name not in here}
            inner |= {name: _fresh(name, taken) for name in _shadowing(graph, around)}
            for value in (*graph.input, *graph.output, *graph.value_info):
                value.name = inner.get(value.name, value.name)
            for note in graph.quantization_annotation:
                note.tensor_name = inner.get(note.tensor_name, note.tensor_name)
            _rename(graph.node, inner, (here, *around), taken)


def _shadowing(graph: GraphProto, around: _Scopes) -> list[str]:
    """Return the inputs that shadow a name."""
    names = (value.name for value in graph.input)
    return [name for name in names if any(name in defined for defined in around)]


def _defined(graph: GraphProto) -> set[str]:
    stored = (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))
    return {*(value.name for value in (*graph.input, *stored)), *_outputs(graph.node)}


def _outputs(nodes: Iterable[NodeProto]) -> Iterator[str]:
    return (name for node in nodes for name in node.output if name)


def _fresh(name: str, taken: set[str]) -> str:
    count = 1
    while f"{name}_{count}" in taken:
        count += 1
    taken.add(f"{name}_{count}")
    return f"{name}_{count}"
