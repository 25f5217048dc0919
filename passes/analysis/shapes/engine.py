"""The inference engine: apply the rules to every node in order and merge the results.

The walk does not write to the graphs, so a loop's subgraph can be inferred under an assumption and
again under a weaker one. `Engine.write` stores the result.

Declared types of inner values and outputs may be stale, for example with a batch size of 1 that was
made dynamic at the inputs only. Inference takes precedence; declarations only fill the gaps. If one
declaration contradicts the inputs, all of them are ignored.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from passes.analysis.shapes import (
    contrib,
    control_flow,
    elementwise,
    linear,
    reduction,
    reshaping,
    slice_concat,
    windows,
)
from passes.analysis.shapes.facts import (
    CONTENT_TYPES,
    MOST_CONTENTS,
    NOTHING,
    Answer,
    Fact,
    Op,
    Rule,
    Size,
    Sizes,
    vector,
)
from passes.analysis.shapes.onnx_fallback import OnnxInference
from passes.analysis.shapes.scope import Scope
from toolkit.ir import Graph, Model, Shape, TensorType, from_proto
from toolkit.symbolic import Dim, Expr, unknown

STANDARD: dict[str, Rule] = {
    **elementwise.RULES,
    **reshaping.RULES,
    **slice_concat.RULES,
    **windows.RULES,
    **linear.RULES,
    **reduction.RULES,
}
DOMAINS: dict[str, dict[str, Rule]] = {
    "": STANDARD,
    "ai.onnx": STANDARD,
    "com.microsoft": contrib.RULES,
}

_MALFORMED = (ValueError, TypeError, IndexError, KeyError, ZeroDivisionError, OverflowError)
"""Exceptions of a rule at a node that violates its operator's specification."""


class Engine:
    """One walk over a model; with `trust`, declarations fill the gaps of inference."""

    def __init__(self, model: Model, trust: bool = True) -> None:
        self.model = model
        self.trust = trust
        self.contradicted = False
        self.filled = False
        self._scopes: dict[int, Scope] = {}
        self._ask_onnx = OnnxInference()
        self._functions = {(f.domain, f.name) for f in model.functions}
        self._symbols: frozenset[str] = frozenset()

    def run(self) -> None:
        """Infer the whole model."""
        scope = Scope(self.model.graph, None, self.trust)
        for value in self.model.graph.inputs:
            self._enter_input(scope, value)
        self.walk(scope)

    def walk(self, scope: Scope) -> None:
        """Infer one graph; the scope already has the types of its inputs."""
        self._scopes[id(scope.graph)] = scope
        for node in scope.graph.nodes:
            self._visit(scope, node)

    def write(self, annotate: bool) -> None:
        """Store types and contents in the graphs; with `annotate`, declare the types."""
        for scope in self._scopes.values():
            graph = scope.graph
            for value, type_ in scope.types.items():
                if not type_.dtype:
                    continue
                inner = graph.producer(value) is not None and not graph.is_output(value)
                if annotate and inner:
                    graph.set_type(value, type_)
                elif type_ is not graph.type(value):
                    graph.learn_type(value, type_)
            for value, data in scope.learned().items():
                data.flags.writeable = False
                graph.learn_data(value, data)

    # -- one node

    def _visit(self, scope: Scope, node: NodeProto) -> None:
        facts = self._facts(scope, node)
        if facts is None:
            facts = ()
        elif isinstance(facts, Fact):
            facts = (facts,)
        for place, value in enumerate(node.output):
            if value:
                self.settle(scope, value, facts[place] if place < len(facts) else _UNKNOWN)

    def _facts(self, scope: Scope, node: NodeProto) -> Answer:
        op_type, domain = node.op_type, node.domain
        if self._functions and (domain, op_type) in self._functions:
            return None
        rule = DOMAINS.get(domain, {}).get(op_type)
        try:
            if rule is not None:
                facts = rule(Op(node, scope))
            else:
                graphs = scope.graph.subgraphs(node)
                facts = control_flow.infer(self, scope, node) if graphs else None
        except _MALFORMED:
            for graph in scope.graph.subgraphs(node):
                self._forget(graph)
            return None
        return facts if facts is not None else self._ask_onnx(node, scope)

    def _forget(self, graph: Graph) -> None:
        """Drop the facts about a subgraph: they may rest on an unconfirmed assumption."""
        for inner in graph.walk():
            self._scopes.pop(id(inner), None)

    # -- merging

    def settle(self, scope: Scope, value: str, fact: Fact) -> None:
        """Record a rule's fact about a value, merged with its known type."""
        dtype, shape, data = fact
        old = scope.graph.type(value) or NOTHING
        if old.dtype and dtype and old.dtype != dtype:
            self.contradicted = True
        dtype = dtype or old.dtype
        if data is not None:
            if dtype in CONTENT_TYPES and data.size <= MOST_CONTENTS:
                shape = data.shape
                scope.learn(value, data)
            elif shape is None:
                shape = data.shape
        merged = self._merged(scope, shape, old.shape)
        if merged == (0,) and dtype in CONTENT_TYPES:
            scope.learn(value, vector([]))
        same = old.dtype == dtype and old.shape == merged
        scope.types[value] = old if same else TensorType(dtype, merged)

    def _merged(self, scope: Scope, found: Sizes | None, old: Shape | None) -> Shape | None:
        if old is None:
            if found is None:
                return None
            return tuple([unknown(True) if size is None else size for size in found])
        if found is None:
            self.filled |= scope.fill
            return tuple([_trusted(size) for size in old]) if scope.fill else None
        if len(found) != len(old):
            self.contradicted = True
            return self._merged(scope, found, None)
        return tuple([self._size(scope, a, b) for a, b in zip(found, old, strict=True)])

    def _size(self, scope: Scope, found: Size, old: Dim) -> Dim:
        """Return the inferred size, or the declared one where that is more specific."""
        if found is old:
            return old
        if found is None:
            if isinstance(old, int) and not scope.fill:
                return unknown(True)
            self.filled |= isinstance(old, int)
            return _trusted(old)
        if isinstance(found, int):
            self.contradicted |= isinstance(old, int) and found != old
            return found
        if isinstance(old, int):
            if found.anonymous and scope.fill:
                self.filled = True
                return old
            self.contradicted |= not found.anonymous
        elif found != old and not found.anonymous and not old.anonymous:
            # One size may have two names, unless the declared one is the size of an input.
            self.contradicted |= old.symbols <= self._symbols
        return found

    # -- inputs

    def _enter_input(self, scope: Scope, value: str) -> None:
        """Enter the declared type of an input; a default value does not constrain what is fed."""
        graph = scope.graph
        declared = graph.declared_type(value)
        type_ = graph.type(value)
        default = graph.initializers.get(value)
        if default is not None and declared is not None and not graph.is_const(value):
            type_ = from_proto(declared) if type_ == _type_of(default) else type_
        if type_ is None:
            return
        scope.types[value] = type_
        for size in type_.shape or ():
            if isinstance(size, Expr):
                self._symbols |= size.symbols


def _type_of(tensor: TensorProto) -> TensorType:
    return TensorType(tensor.data_type, tuple(tensor.dims))


def _trusted(size: Dim) -> Dim:
    """Return a declared number, or a new anonymous symbol for a declared name.

    Exporters reuse an input's name, such as `batch`, for other sizes; trusting equal names would
    make other passes remove nodes wrongly.
    """
    return size if isinstance(size, int) or size.anonymous else unknown(True)


_UNKNOWN = Fact(0, None)
