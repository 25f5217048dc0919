"""The walk: rules applied to every node in order, and what they say settled against what is known.

Nothing is written while the engine walks, so that a loop's body can be inferred under a guess and
again under a weaker one. `Engine.write` puts the result into the graphs.

What a model declares of inner values and outputs may be stale: a batch size of 1 that somebody made
dynamic at the inputs only. So inference comes first, and declarations only fill what it leaves
open. Where one declaration contradicts what follows from the inputs, none of them is believed.
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
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import Shape, TensorType, from_proto
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
"""What a rule runs into at a node that breaks its operator's contract."""


class Engine:
    """One walk over a model. `trust` says whether declarations fill what inference leaves open."""

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
        """Infer one graph, whose inputs the scope already knows."""
        self._scopes[id(scope.graph)] = scope
        for node in scope.graph.nodes:
            self._visit(scope, node)

    def write(self, annotate: bool) -> None:
        """Tell the graphs what is new about types and contents; `annotate` declares the types."""
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
        """Drop what was found inside of a graph: it may stand on a guess that was not confirmed."""
        for inner in graph.walk():
            self._scopes.pop(id(inner), None)

    # -- settling

    def settle(self, scope: Scope, value: str, fact: Fact) -> None:
        """Note what a rule says of a value, completed by what is known of it already."""
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
        """The size that inference found, or the declared one where that says more."""
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
            # Two names for one size are fine, unless the declared one is the size of an input.
            self.contradicted |= old.symbols <= self._symbols
        return found

    # -- inputs

    def _enter_input(self, scope: Scope, value: str) -> None:
        """The declared inputs are the contract; a default value says nothing about what is fed."""
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
    """What a declaration says about a size that inference cannot tell.

    A number is believed, a name is not: exporters write an input's `batch` on outputs that are as
    large as something else as well, and by equal names nodes would be dropped.
    """
    return size if isinstance(size, int) or size.anonymous else unknown(True)


_UNKNOWN = Fact(0, None)
