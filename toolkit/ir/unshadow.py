"""Names of a subgraph that hide others around it, made distinct.

ONNX wants a name to be defined once among a graph and those around it. Its checker and onnxruntime
let the inputs of a subgraph hide a name all the same, and exporters rely on that: paddle2onnx gives
what goes through a loop the name that it has outside. Inside, the inner one is meant; it gets a
name of its own. Of an initializer that hides another, onnxruntime takes the outer one at times:
that stays an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from onnx import GraphProto, ModelProto, NodeProto

from toolkit.ir import node as nd

_Scopes = tuple[set[str], ...]
"""The names defined in a graph and in each graph around it."""


def without_shadows(proto: ModelProto) -> ModelProto:
    """The model itself where no name hides another, else a copy with distinct names."""
    bodies = list(_bodies(proto))
    if not any(_hidden(graph, around) for body in bodies for graph, around in _inside(*body)):
        return proto
    made = ModelProto()
    made.CopyFrom(proto)
    taken = {name for _, scopes in bodies for names in scopes for name in names}
    taken.update(n for body in bodies for graph, _ in _inside(*body) for n in _defined(graph))
    for nodes, scopes in _bodies(made):
        _rename(nodes, {}, scopes, taken)
    return made


def _bodies(proto: ModelProto) -> Iterator[tuple[Iterable[NodeProto], _Scopes]]:
    """The main graph and the functions: their nodes, and what they define."""
    yield proto.graph.node, (_defined(proto.graph),)
    for function in proto.functions:
        yield function.node, ({*function.input, *_outputs(function.node)},)


def _inside(nodes: Iterable[NodeProto], around: _Scopes) -> Iterator[tuple[GraphProto, _Scopes]]:
    """Every subgraph, with what is defined around it."""
    for node in nodes:
        for graph in nd.graphs_of(node):
            yield graph, around
            yield from _inside(graph.node, (_defined(graph), *around))


def _rename(
    nodes: Iterable[NodeProto], renamed: Mapping[str, str], around: _Scopes, taken: set[str]
) -> None:
    """Read what is `renamed` by its new name, and give new ones to what hides others."""
    for node in nodes:
        if renamed:
            node.input[:] = [renamed.get(name, name) for name in node.input]
        for graph in nd.graphs_of(node):
            here = _defined(graph)
            inner = {name: new for name, new in renamed.items() if name not in here}
            inner |= {name: _fresh(name, taken) for name in _hidden(graph, around)}
            _rename_values(graph, inner)
            _rename(graph.node, inner, (here, *around), taken)


def _rename_values(graph: GraphProto, renamed: Mapping[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = renamed.get(value.name, value.name)
    for note in graph.quantization_annotation:
        note.tensor_name = renamed.get(note.tensor_name, note.tensor_name)


def _hidden(graph: GraphProto, around: _Scopes) -> list[str]:
    """Inputs that hide a name."""
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
