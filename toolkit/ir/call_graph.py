"""The call graph of model-local functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from onnx import FunctionProto, NodeProto

from toolkit.ir import node as nd

Key = tuple[str, str, str]
"""(domain, name, overload): identifies a function, and the function that a node calls."""

Calls = Mapping[Key, set[Key]]
"""The functions that each function calls."""


def called_by(node: NodeProto) -> Key:
    """Return the key of the function that a node would call."""
    return nd.domain_of(node), node.op_type, node.overload


def key_of(function: FunctionProto) -> Key:
    """Return the key of a function."""
    return nd.plain_domain(function.domain), function.name, function.overload


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield the nodes and those of their subgraphs, from the protobuf."""
    for node in nodes:
        yield node
        for graph in nd.graphs_of(node):
            yield from all_nodes(graph.node)


def calls_among(functions: Iterable[FunctionProto]) -> Calls:
    """Return the calls of each function to the others."""
    nodes = {key_of(f): f.node for f in functions}
    return {key: nodes.keys() & set(map(called_by, all_nodes(n))) for key, n in nodes.items()}


def reached(calls: Calls, first: Iterable[Key]) -> set[Key]:
    """Return the functions reachable from these calls."""
    pending = list(first)
    found: set[Key] = set()
    while pending:
        key = pending.pop()
        if key in calls and key not in found:
            found.add(key)
            pending.extend(calls[key])
    return found


def find_cycle(calls: Calls) -> list[Key]:
    """Return a cycle of calls, callers first; empty if there is none."""
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        return list(reversed(error.args[1][1:]))  # callees first, the first one also last
    return []
