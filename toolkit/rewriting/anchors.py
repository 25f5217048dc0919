"""Cores: the operators by which something that could be fused is recognized in a graph.

A pass that fuses declares, for each of its rules, the marks of what the rule looks for, and
`toolkit explain` then accounts for all of them that are left:

    cores: ClassVar[Cores] = {
        "attention": ("Softmax > MatMul",),
        "gelu": ("Erf", "0.044715 > Tanh"),
    }

A mark is an operator, or several on one path: `Softmax > MatMul` is a Softmax that a MatMul reads,
with at most three other nodes between. A number at its start is a constant that a node on the path
reads. The core is the first operator of the mark. A rule stands for its variants too: what is said
of `attention` holds for `attention-with-past`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from onnx import NodeProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model

Cores: TypeAlias = Mapping[str, tuple[str, ...]]
"""The marks of each rule."""

_BETWEEN = 3
_ROUNDING = 1e-2  # constants may be in half precision
_MOST_VISITED = 200


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """A node that marks something to fuse, and the rules (as declared) that are about it."""

    graph: Graph
    node: NodeProto
    rules: tuple[str, ...]


def cores_of(item: object) -> Cores:
    """What a pass declares; nothing for the passes that do not."""
    return getattr(item, "cores", {})


def is_about(rule: str, name: str) -> bool:
    """Whether a rule is the named one or a variant: `attention` names `attention-with-past`."""
    return f"-{name}-" in f"-{rule}-"


def find_cores(model: Model, declared: Iterable[Cores]) -> list[Core]:
    """The cores that are in the model, in the order of its nodes, each one once."""
    marks = [
        (rule, _Mark.parse(text))
        for cores in declared
        for rule, texts in cores.items()
        for text in texts
    ]
    found: list[Core] = []
    for graph in model.graphs():
        rules: dict[int, dict[str, None]] = {}
        nodes = graph.nodes
        for rule, mark in marks:
            for core in mark.find(graph, nodes):
                rules.setdefault(id(core), {})[rule] = None
        found += [Core(graph, node, tuple(rules[id(node)])) for node in nodes if id(node) in rules]
    return found


def downstream(
    graph: Graph, start: NodeProto, most: int, stop: Iterable[NodeProto] = ()
) -> Iterator[tuple[int, NodeProto]]:
    """What depends on a node, nearest first with its distance; nothing behind those in `stop`."""
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
class _Mark:
    """A parsed mark: a constant that the path starts with, if any, and its operators."""

    constant: float | None
    ops: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> _Mark:
        first, *rest = (step.strip() for step in text.split(">"))
        try:
            mark = cls(float(first), tuple(rest))
        except ValueError:
            mark = cls(None, (first, *rest))
        if not mark.ops or not all(mark.ops):
            raise ValueError(f"the mark '{text}' names no operator")
        return mark

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
    """The nodes of this operator behind `start`, and not behind another one of its own kind."""
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
