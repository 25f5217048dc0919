"""Model-local functions: who calls which, and which nobody does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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


def drop_uncalled(model: Model) -> None:
    """Keep the functions that a graph calls, and those that they call."""
    known = {key_of(f): f for f in model.functions}
    pending = [called_by(node) for graph in model.graphs() for node in graph.nodes]
    needed: set[Key] = set()
    while pending:
        key = pending.pop()
        if key in known and key not in needed:
            needed.add(key)
            pending.extend(map(called_by, all_nodes(known[key].node)))
    kept = [function for key, function in known.items() if key in needed]
    if len(kept) < len(known) and model.journal.begin("unused-function", ""):
        model.set_functions(kept)
