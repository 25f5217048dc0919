"""Model-local functions: who calls which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from onnx import FunctionProto, NodeProto

from toolkit.ir import node as nd

Key = tuple[str, str, str]
"""(domain, name, overload): what a call and a function have in common."""

Calls = Mapping[Key, set[Key]]


def called_by(node: NodeProto) -> Key:
    return nd.domain_of(node), node.op_type, node.overload


def key_of(function: FunctionProto) -> Key:
    return nd.plain_domain(function.domain), function.name, function.overload


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes and those of the graphs inside them (of a function, which has no index)."""
    for node in nodes:
        yield node
        for graph in nd.graphs_of(node):
            yield from all_nodes(graph.node)


def calls_among(functions: Iterable[FunctionProto]) -> Calls:
    """Which of the functions each of them calls."""
    bodies = {key_of(f): f.node for f in functions}
    return {key: bodies.keys() & set(map(called_by, all_nodes(n))) for key, n in bodies.items()}


def reached(calls: Calls, first: Iterable[Key]) -> set[Key]:
    """The functions that these calls come to, in any number of steps."""
    pending = list(first)
    found: set[Key] = set()
    while pending:
        key = pending.pop()
        if key in calls and key not in found:
            found.add(key)
            pending.extend(calls[key])
    return found


def circle(calls: Calls) -> list[Key]:
    """Functions of which each calls the next, and the last one the first; empty without any."""
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        return list(reversed(error.args[1][1:]))  # callees first, and one of them twice
    return []
