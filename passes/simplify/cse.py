"""Common subexpressions: what is computed twice from the same values is computed once.

Two nodes are the same when operator, attributes (defaults filled in) and inputs are, the inputs of
a commutative operator in any order. Only operators that are known to be functions of their inputs
take part: ONNX's own except the random ones, and the com.microsoft ones listed here.

A subgraph sees what the enclosing graphs computed before it, and reads it from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from onnx import AttributeProto, NodeProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.op_schema import facts_of
from toolkit.ir.op_traits import COMMUTATIVE, COMMUTATIVE_VARIADIC, PURE_CONTRIB, is_random
from toolkit.verification.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_MOST_KEYED_BYTES = 1 << 12
"""A node with an attribute larger than this is not compared: constants belong to `share`."""

_STANDARD = ("", "ai.onnx.ml")

Key = tuple[object, ...]
Attributes = tuple[tuple[str, bytes], ...]


@dataclass(slots=True)
class _Scope:
    """The computations seen so far in a graph, and those of the graphs around it.

    Few nodes share operator and inputs. Only for those the attributes are compared, which takes
    longer: `first` has the first node by operator and inputs, `seen` those by all that counts.
    """

    graph: Graph
    parent: _Scope | None = None
    first: dict[Key, NodeProto] = field(default_factory=dict[Key, NodeProto])
    seen: dict[Key, NodeProto] = field(default_factory=dict[Key, NodeProto])

    def inside(self, subgraph: Graph) -> _Scope:
        """The scope of a graph that a node of this one holds."""
        return _Scope(subgraph, self)

    def around(self) -> Iterator[_Scope]:
        """This scope and those that it is in."""
        scope: _Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def find(self, node: NodeProto) -> tuple[Graph, NodeProto] | None:
        """An earlier node that computes the same as `node`, which is entered if there is none."""
        reads = self._reads(node)
        home = next((s for s in self.around() if reads in s.first), None)
        if home is None:
            self.first[reads] = node
            return None
        attributes = _attributes(self.graph, node) if _is_pure(node) else None
        if attributes is None:
            return None
        key = attributes, *reads
        rival = home.first[reads]
        rival_attributes = _attributes(home.graph, rival)
        if rival_attributes is not None:
            home.seen.setdefault((rival_attributes, *reads), rival)
        for scope in self.around():
            if key in scope.seen:
                return scope.graph, scope.seen[key]
        self.seen[key] = node
        return None

    def _reads(self, node: NodeProto) -> Key:
        """Operator and inputs, with the operands of commutative operators in one order."""
        values = [self._identity(name) for name in nd.without_blanks(node.input)]
        domain = nd.domain_of(node)
        if not domain and not node.attribute and _commutes(node.op_type, len(values)):
            values.sort()
        return domain, node.op_type, len(node.output), *values

    def _identity(self, name: str) -> tuple[str, int]:
        """What stands for a value: its place among the outputs of a node, or its name in a graph.

        Names alone would not do: scopes may reuse them, and merging into an output renames a value.
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
    """Walk the graph in order, so that the inputs of a node are merged before the node is seen.

    A value is only ever replaced by an earlier one: the order stays topological throughout.
    """
    graph = scope.graph
    for node in graph.nodes:
        inner = graph.subgraphs(node)
        for subgraph in inner:
            _merge(scope.inside(subgraph))
        found = None if inner else scope.find(node)
        if found is None:
            continue
        if _worthwhile(graph, node, *found) and graph.begin("cse", node):
            for old, new in zip(node.output, found[1].output, strict=True):
                if old:
                    graph.replace(old, new)
            graph.remove(node)


def _worthwhile(graph: Graph, node: NodeProto, home: Graph, first: NodeProto) -> bool:
    """Whether `first` of the graph `home` can take the place of `node`, and nothing grows."""
    identities = 0
    for old, new in zip(node.output, first.output, strict=True):
        if not old:
            continue
        if not new or graph.scope_of(new) is not home:
            return False
        if graph.is_output(old):
            # Two graph outputs, or one that comes from outside, need an Identity between them.
            identities += home is not graph or graph.is_output(new)
    return identities == 0 or (identities == 1 and not nd.is_op(node, "Identity", "Constant"))


def _is_pure(node: NodeProto) -> bool:
    """Whether the node is a function of its inputs and attributes."""
    domain = nd.domain_of(node)
    if domain == "com.microsoft":
        return node.op_type in PURE_CONTRIB
    # A Dropout of an old opset trains by default; one that does nothing goes by `cleanup`.
    return domain in _STANDARD and not is_random(node) and node.op_type != "Dropout"


def _commutes(op_type: str, inputs: int) -> bool:
    # Max, Sum and the like of more than two operands may round differently in another order.
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
