"""Model-local functions: who calls which, and which nobody does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from onnx import FunctionProto, NodeProto

from toolkit import nodes as nd
from toolkit.model import Model

Key = tuple[str, str, str]
"""(domain, name, overload): what a call and a function have in common."""


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


def recursive(functions: Mapping[Key, FunctionProto]) -> set[Key]:
    """The functions that call themselves, directly or through others, which ONNX forbids."""
    calls = _calls(functions)
    return {key for key in calls if key in _reached(calls, calls[key])}


def _calls(functions: Mapping[Key, FunctionProto]) -> dict[Key, set[Key]]:
    return {key: set(map(called_by, all_nodes(f.node))) for key, f in functions.items()}


def _reached(calls: Mapping[Key, set[Key]], first: Iterable[Key]) -> set[Key]:
    """The functions that these calls come to, in any number of steps."""
    pending = list(first)
    reached: set[Key] = set()
    while pending:
        key = pending.pop()
        if key in calls and key not in reached:
            reached.add(key)
            pending.extend(calls[key])
    return reached


def drop_uncalled(model: Model) -> None:
    """Keep the functions that a graph calls, and those that they call."""
    known = {key_of(f): f for f in model.functions}
    calls = _calls(known)
    needed = _reached(calls, map(called_by, model.nodes()))
    kept = [function for key, function in known.items() if key in needed]
    if len(kept) < len(known) and model.journal.begin("unused-function", ""):
        model.set_functions(kept)
