"""Capture loop-invariant values of a Loop instead of carrying them.

    w1, ... = Loop (n, c, w, ...) <body (i, k, v, ...) => (k1, v, ...) { ... v ... }>
    ->  ... = Loop (n, c, ...) <body (i, k, ...) => (k1, ...) { ... w ... }>, and w for w1

Exporters carry the weights of a recurrent layer from one iteration to the next, which hides that
they are constants. Captured, they are constants inside the subgraph, too.
"""

from __future__ import annotations

from typing import TypeVar

from onnx import NodeProto

from toolkit.ir import Graph, Model
from toolkit.ir.node import is_op

_T = TypeVar("_T")

CARRIED = 2
"""Index of the first carried value among the inputs of a Loop and of its subgraph."""


def capture_invariants(model: Model) -> None:
    """Capture the carried values that a Loop never changes."""
    # Inner loops first: their invariants may be invariants of the outer loops, too.
    for graph in reversed(list(model.graph.walk())):
        for node in list(graph.nodes):
            unchanged = _unchanged(graph, node)
            if unchanged and graph.begin("unchanged-in-loop", node):
                _capture(graph, node, unchanged)


def _unchanged(graph: Graph, node: NodeProto) -> list[int]:
    """Return the indices of the carried values that the subgraph of a Loop passes on unchanged."""
    if not is_op(node, "Loop"):
        return []
    (subgraph,) = graph.subgraphs(node)
    if len(subgraph.inputs) != len(node.input):
        return []
    carried = range(len(node.input) - CARRIED)
    inputs, outputs = subgraph.inputs, subgraph.outputs
    found = [at for at in carried if origin(subgraph, outputs[1 + at]) == inputs[CARRIED + at]]
    # An input that is also another output of the subgraph must stay an input.
    others = [name for at, name in enumerate(outputs) if at - 1 not in found]
    return [at for at in found if inputs[CARRIED + at] not in others]


def origin(subgraph: Graph, value: str) -> str:
    """Return the value behind a chain of Identity nodes."""
    producer = subgraph.producer(value)
    while producer is not None and is_op(producer, "Identity"):
        value = producer.input[0]
        producer = subgraph.producer(value)
    return value


def _capture(graph: Graph, node: NodeProto, unchanged: list[int]) -> None:
    (subgraph,) = graph.subgraphs(node)
    inputs, outputs = subgraph.interface_inputs(), subgraph.interface_outputs()
    for at in unchanged:
        if at < len(node.output) and node.output[at]:
            graph.replace(node.output[at], node.input[CARRIED + at])
    passed_on = [outputs[1 + at].name for at in unchanged]
    subgraph.set_interface(outputs=_without(outputs, unchanged, before=1))
    for at in unchanged:
        subgraph.replace(inputs[CARRIED + at].name, node.input[CARRIED + at])
    subgraph.set_interface(inputs=_without(inputs, unchanged, before=CARRIED))
    for value in passed_on:
        producer = subgraph.producer(value)
        if producer is not None:
            subgraph.prune(producer)
    graph.set_inputs(node, _without(list(node.input), unchanged, before=CARRIED))
    graph.set_outputs(node, _without(list(node.output), unchanged, before=0))


def _without(items: list[_T], unchanged: list[int], before: int) -> list[_T]:
    return [item for at, item in enumerate(items) if at - before not in unchanged]
