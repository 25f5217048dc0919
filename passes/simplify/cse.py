"""Common subexpression elimination.

Two nodes are equal if their operators, attributes (with defaults) and inputs are, the inputs of a
commutative operator in any order. Only pure operators are merged: ONNX's own except the random
ones, and those of `PURE_CONTRIB`.

A node of a subgraph may be replaced by an earlier one of an enclosing graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from onnx import AttributeProto, NodeProto

from toolkit.ir import Graph, Model, node as nd
from toolkit.ir.op_schema import facts_of
from toolkit.ir.op_traits import COMMUTATIVE, COMMUTATIVE_VARIADIC, PURE_CONTRIB, is_random
from toolkit.verification.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_MOST_KEYED_BYTES = 1 << 12
"""Largest attribute in bytes of a node that is compared; large constants are left to `share`."""

_STANDARD = ("", "ai.onnx.ml")

Key = tuple[object, ...]
Attributes = tuple[tuple[str, bytes], ...]


@dataclass(slots=True)
class _Scope:
    """The nodes visited so far in a graph by key, and through `parent` in the enclosing ones."""

    graph: Graph
    parent: _Scope | None = None
    seen: dict[Key, NodeProto] = field(default_factory=dict[Key, NodeProto])

    def enclosing(self) -> Iterator[_Scope]:
        """Yield this scope and those that enclose it."""
        scope: _Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def find(self, node: NodeProto) -> tuple[Graph, NodeProto] | None:
        """Return an earlier node equal to `node` and its graph; without one, enter `node`."""
        attributes = _attributes(self.graph, node) if _is_pure(node) else None
        if attributes is None:
            return None
        values = [self._identity(name) for name in nd.without_blanks(node.input)]
        domain = nd.domain_of(node)
        if not domain and not node.attribute and _commutes(node.op_type, len(values)):
            values.sort()
        key = domain, node.op_type, len(node.output), attributes, *values
        for scope in self.enclosing():
            if key in scope.seen:
                return scope.graph, scope.seen[key]
        self.seen[key] = node
        return None

    def _identity(self, name: str) -> tuple[str, int]:
        """Return a key of a value: a producer and output index, or a name and its graph.

        Names alone are ambiguous: scopes may reuse them, and merging into an output renames values.
        """
        home = self.graph.scope_of(name) if name else None
        producer = None if home is None else home.producer(name)
        if producer is None:
            return name, id(home)
        return f"#{list(producer.output).index(name)}", id(producer)


@dataclass(frozen=True, slots=True)
class CommonSubexpressions:
    """Compute equal expressions once."""

    name: ClassVar[str] = "cse"
    tolerance: ClassVar[Tolerance] = EXACT

    def run(self, model: Model, ctx: Context) -> None:
        _merge(_Scope(model.graph))


def _merge(scope: _Scope) -> None:
    """Visit the nodes in order; the inputs of a node are merged before the node itself.

    A value is only replaced by an earlier one, so the order stays topological.
    """
    graph = scope.graph
    for node in graph.nodes:
        inner = graph.subgraphs(node)
        for subgraph in inner:
            _merge(_Scope(subgraph, scope))
        found = None if inner else scope.find(node)
        if found is None:
            continue
        if _worthwhile(graph, node, *found) and graph.begin("cse", node):
            for old, new in zip(node.output, found[1].output, strict=True):
                if old:
                    graph.replace(old, new)
            graph.remove(node)


def _worthwhile(graph: Graph, node: NodeProto, home: Graph, first: NodeProto) -> bool:
    """Return whether `first` of the graph `home` can replace `node` without adding nodes."""
    identities = 0
    for old, new in zip(node.output, first.output, strict=True):
        if not old:
            continue
        if not new or graph.scope_of(new) is not home:
            return False
        if graph.is_output(old):
            # An output that is another output or a captured value needs an Identity.
            identities += home is not graph or graph.is_output(new)
    return identities == 0 or (identities == 1 and not nd.is_op(node, "Identity", "Constant"))


def _is_pure(node: NodeProto) -> bool:
    """Return whether the node is a function of its inputs and attributes."""
    domain = nd.domain_of(node)
    if domain == "com.microsoft":
        return node.op_type in PURE_CONTRIB
    # Old opsets train by default; `cleanup` removes a Dropout that is a no-op.
    return domain in _STANDARD and not is_random(node) and node.op_type != "Dropout"


def _commutes(op_type: str, inputs: int) -> bool:
    # Sums of more than two operands may round differently in another order.
    return op_type in COMMUTATIVE or (op_type in COMMUTATIVE_VARIADIC and inputs == 2)


def _attributes(graph: Graph, node: NodeProto) -> Attributes | None:
    """Return the attributes in canonical form, without defaults; None if one is too large."""
    found: list[tuple[str, bytes]] = []
    for attribute in node.attribute:
        if attribute.ByteSize() > _MOST_KEYED_BYTES:
            return None
        plain = AttributeProto()
        plain.CopyFrom(attribute)
        plain.ClearField("doc_string")
        if plain.HasField("t"):
            plain.t.ClearField("name")
        found.append((plain.name, plain.SerializeToString(deterministic=True)))
    facts = facts_of(graph, node) if found else None
    defaults = () if facts is None else facts.defaults.items()
    return tuple(sorted(set(found).difference(defaults)))
