"""What goes through a Loop unchanged is read from around it.

    w1, ... = Loop (n, c, w, ...) <body (i, k, v, ...) => (k1, v, ...) { ... v ... }>
    ->  ... = Loop (n, c, ...) <body (i, k, ...) => (k1, ...) { ... w ... }>, and w for w1

Exporters hand the weights of a recurrent layer from one step to the next. For the body these are
values like any other; read from around it, they are the constants that they were.
"""

from __future__ import annotations

from typing import TypeVar

from onnx import NodeProto

from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.node import is_op

_T = TypeVar("_T")

_CARRIED = 2
"""Inputs of a Loop, and of its body, in front of the values that it carries."""


def read_around_loops(model: Model) -> None:
    """Take out of every Loop what it carries and never changes."""
    # Inner loops first: what these pass on unchanged, the outer ones may pass on too.
    for graph in reversed(list(model.graph.walk())):
        for node in list(graph.nodes):
            unchanged = _unchanged(graph, node)
            if unchanged and graph.begin("unchanged-in-loop", node):
                _read_around(graph, node, unchanged)


def _unchanged(graph: Graph, node: NodeProto) -> list[int]:
    """Which of the values that a Loop carries its body only passes on, counted from 0."""
    if not is_op(node, "Loop"):
        return []
    (body,) = graph.subgraphs(node)
    if len(body.inputs) != len(node.input):
        return []
    carried = range(len(node.input) - _CARRIED)
    found = [
        at for at in carried if _origin(body, body.outputs[1 + at]) == body.inputs[_CARRIED + at]
    ]
    # As another output too, an input of the body must stay one: its name is in the interface.
    others = [name for at, name in enumerate(body.outputs) if at - 1 not in found]
    return [at for at in found if body.inputs[_CARRIED + at] not in others]


def _origin(body: Graph, value: str) -> str:
    maker = body.producer(value)
    while maker is not None and is_op(maker, "Identity"):
        value = maker.input[0]
        maker = body.producer(value)
    return value


def _read_around(graph: Graph, node: NodeProto, unchanged: list[int]) -> None:
    (body,) = graph.subgraphs(node)
    inputs, outputs = body.interface_inputs(), body.interface_outputs()
    for at in unchanged:
        if at < len(node.output) and node.output[at]:
            graph.replace(node.output[at], node.input[_CARRIED + at])
    passed_on = [outputs[1 + at].name for at in unchanged]
    body.set_interface(outputs=_without(outputs, unchanged, before=1))
    for at in unchanged:
        body.replace(inputs[_CARRIED + at].name, node.input[_CARRIED + at])
    body.set_interface(inputs=_without(inputs, unchanged, before=_CARRIED))
    for value in passed_on:
        maker = body.producer(value)
        if maker is not None:
            body.prune(maker)
    graph.set_inputs(node, _without(list(node.input), unchanged, before=_CARRIED))
    graph.set_outputs(node, _without(list(node.output), unchanged, before=0))


def _without(items: list[_T], unchanged: list[int], before: int) -> list[_T]:
    return [item for at, item in enumerate(items) if at - before not in unchanged]
