"""Anchors: the operators that show that a graph contains a fusable computation.

A fusion pass declares anchor paths for each of its rules, and `toolkit explain` accounts for every
anchor that is left after the pass:

    anchors: ClassVar[Anchors] = {
        "attention": ("Softmax > MatMul",),
        "gelu": ("Erf", "0.044715 > Tanh"),
    }

A path is one operator or several: `Softmax > MatMul` is a Softmax that feeds a MatMul, with at most
three other nodes between them. A number at the start is a constant operand of a node on the path.
The anchor is the first operator of the path. A rule name covers its variants: `attention` includes
`attention-with-past`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from onnx import NodeProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model

Anchors: TypeAlias = Mapping[str, tuple[str, ...]]
"""The anchor paths of each rule."""

_BETWEEN = 3
"""Nodes allowed between two operators of a path."""

_ROUNDING = 1e-2
"""Relative tolerance for the constant of a path, which may be stored in half precision."""

_MOST_VISITED = 200
"""Nodes that one search downstream visits at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    """An anchor node, and the names of the rules that declare it."""

    graph: Graph
    node: NodeProto
    rules: tuple[str, ...]


@runtime_checkable
class Anchored(Protocol):
    """A pass that declares anchor paths for its rules."""

    @property
    def anchors(self) -> Anchors: ...


def anchors_of(item: object) -> Anchors:
    """Return the anchor paths that a pass declares; none by default."""
    return item.anchors if isinstance(item, Anchored) else {}


def is_about(rule: str, name: str) -> bool:
    """Return whether `rule` is `name` or a variant: `attention-with-past` is one of `attention`."""
    return f"-{name}-" in f"-{rule}-"


def find_anchors(model: Model, declared: Iterable[Anchors]) -> list[Anchor]:
    """Return the anchors in the model, in node order, without duplicates."""
    paths = [
        (rule, _AnchorPath.parse(text))
        for anchors in declared
        for rule, texts in anchors.items()
        for text in texts
    ]
    found: list[Anchor] = []
    for graph in model.graphs():
        rules: dict[int, dict[str, None]] = {}
        nodes = graph.nodes
        for rule, path in paths:
            for anchor in path.find(graph, nodes):
                rules.setdefault(id(anchor), {})[rule] = None
        found += [
            Anchor(graph, node, tuple(rules[id(node)])) for node in nodes if id(node) in rules
        ]
    return found


def downstream(
    graph: Graph, start: NodeProto, most: int, stop: Iterable[NodeProto] = ()
) -> Iterator[tuple[int, NodeProto]]:
    """Yield the nodes downstream of `start` with their distance, nearest first.

    The search goes up to a distance of `most` and not past the nodes in `stop`.
    """
    closed = {id(node) for node in stop} - {id(start)}
    pending, seen = deque([(0, start)]), {id(start)}
    while pending:
        distance, node = pending.popleft()
        if distance:
            yield distance, node
        if distance == most or id(node) in closed:
            continue
        for value in nd.outputs_of(node):
            for user in graph.users(value):
                if id(user) not in seen and len(seen) < _MOST_VISITED:
                    seen.add(id(user))
                    pending.append((distance + 1, user))


@dataclass(frozen=True, slots=True)
class _AnchorPath:
    """A parsed anchor path: its constant, if any, and its operators."""

    constant: float | None
    ops: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> _AnchorPath:
        first, *rest = (step.strip() for step in text.split(">"))
        try:
            path = cls(float(first), tuple(rest))
        except ValueError:
            path = cls(None, (first, *rest))
        if not path.ops or not all(path.ops):
            raise ValueError(f"the anchor path '{text}' names no operator")
        return path

    def find(self, graph: Graph, nodes: list[NodeProto]) -> Iterator[NodeProto]:
        first, *rest = self.ops
        for node in nodes:
            if self.constant is None:
                starts = [node] if nd.is_op(node, first) else []
            elif _reads_number(graph, node, self.constant):
                starts = [node] if nd.is_op(node, first) else list(_reached(graph, node, first))
            else:
                continue
            yield from (start for start in starts if _leads(graph, start, rest))


def _leads(graph: Graph, start: NodeProto, ops: list[str]) -> bool:
    if not ops:
        return True
    return any(_leads(graph, node, ops[1:]) for node in _reached(graph, start, ops[0]))


def _reached(graph: Graph, start: NodeProto, op: str) -> Iterator[NodeProto]:
    """Yield the `op` nodes downstream of `start`, not past another node of its operator."""
    same = [node for _, node in downstream(graph, start, _BETWEEN + 1) if _alike(node, start)]
    for _, node in downstream(graph, start, _BETWEEN + 1, stop=same):
        if nd.is_op(node, op):
            yield node


def _alike(one: NodeProto, other: NodeProto) -> bool:
    return (one.op_type, nd.domain_of(one)) == (other.op_type, nd.domain_of(other))


def _reads_number(graph: Graph, node: NodeProto, number: float) -> bool:
    for value in nd.inputs_of(node):
        tensor = graph.tensor(value)
        if tensor is not None and all(size == 1 for size in tensor.dims):
            array = graph.const(value)
            if array is not None and array.dtype.kind not in "OSUc":
                found = float(array.reshape(-1)[0])
                if math.isclose(found, number, rel_tol=_ROUNDING):
                    return True
    return False
