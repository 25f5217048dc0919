"""The conversion of a model and its functions between opsets, one version at a time.

Adapters rewrite the nodes whose operator changed (`adapter_table` upwards, `lowering_table`
downwards). One version is one rewrite in the journal: halfway through it nodes belong to two
opsets, so it is applied as a whole or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from onnx import NodeProto, defs

from passes.opset.adapter_context import Adapter, AdapterContext, CannotConvert, Types
from passes.opset.adapter_table import EXPERIMENTAL, NEEDS_TYPES, RUNTIME_OPS, adapters_of
from passes.opset.function_bodies import FunctionModel, expand, import_version
from passes.opset.ir_version import ir_of_opset, least_ir
from passes.opset.lowering_table import DECOMPOSITIONS, LOWERING, LOWEST
from passes.opset.relabel import changes_at, may_need_types, occurring_types, relabel
from toolkit.ir import Graph, Model, node as nd
from toolkit.runtime import MAX_IR, MAX_OPSET
from toolkit.targets import Target
from toolkit.targets.releases import operand_types

_TYPED_OPS = frozenset(NEEDS_TYPES.split())
_EXPERIMENTAL_OPS = frozenset(op for ops in EXPERIMENTAL.values() for op in ops)
_MOST_OBSTACLES = 3
"""The number of nodes that a message names."""


class Conversion:
    """The conversion of a model together with its functions.

    `adapted` counts the nodes that adapters rewrote, by operator; `stuck` those that could not be
    lowered.
    """

    def __init__(self, model: Model, target: Target) -> None:
        self.model = model
        self.adapted: Counter[str] = Counter()
        self.stuck: Counter[str] = Counter()
        self._target = target
        self._functions = [
            FunctionModel(f, model) if import_version(f) else None for f in model.functions
        ]
        self._local = {f.name for f in model.functions if f.domain in nd.STANDARD_DOMAINS}
        self._units = [model, *(f.model for f in self._functions if f is not None)]
        self._nodes: dict[int, list[tuple[Graph, NodeProto]]] = {}
        self._occurring: frozenset[str] | None = None

    @property
    def versions(self) -> list[int]:
        """The opsets of the model and of the functions that use standard operators."""
        return [version for unit in self._units if (version := _version(unit))]

    def require_known_ops(self) -> None:
        """Raise CannotConvert for an operator outside the standard, whose future is unknown."""
        known = {*RUNTIME_OPS, *_EXPERIMENTAL_OPS, *self._local}
        for unit in self._units:
            for _, node in self._standard_nodes(unit):
                if node.op_type not in known and not defs.has(node.op_type, MAX_OPSET):
                    raise CannotConvert(f"{nd.label(node)} is not an ONNX operator")

    def lift(self, version: int) -> None:
        """Lift the model and all functions below `version` to it, or none of them."""
        self._step(version, [unit for unit in self._units if 0 < _version(unit) < version], None)

    def lower(self, version: int, decompose: bool) -> None:
        """Lower the model and all functions above `version` to it, by one, or none of them."""
        if version < LOWEST:
            raise CannotConvert(f"models are not lowered below opset {LOWEST}")
        self._step(version, [unit for unit in self._units if _version(unit) > version], decompose)

    def _step(self, version: int, units: list[Model], decompose: bool | None) -> None:
        marks = [unit.journal.position for unit in self._units]
        if not self.model.journal.begin(f"opset-{version}", "ai.onnx"):
            raise CannotConvert(f"the conversion to opset {version} was rejected")
        adapted: Counter[str] = Counter()
        try:
            for unit in units:
                if decompose is None:
                    adapted += self._lift(unit, version)
                else:
                    adapted += self._lower(unit, version, decompose)
        except CannotConvert:
            self._nodes.clear()
            for unit, mark in zip(self._units, marks, strict=True):
                unit.journal.undo_to(mark)
            raise
        if self._functions:
            pairs = zip(self._functions, self.model.functions, strict=True)
            self.model.set_functions([new.to_function() if new else old for new, old in pairs])
        self.adapted += adapted

    # -- upwards

    def _lift(self, unit: Model, version: int) -> Counter[str]:
        """Lift `unit` by one version; return the number of adapted nodes by operator."""
        if version >= 9:  # opset 9 came with IR 4, where initializers need not be inputs
            unit.free_initializers()
        adapters = adapters_of(version)
        own_kernels = not self._target.standard_only  # other runtimes may have others
        for graph, node in self._standard_nodes(unit):
            if (
                own_kernels
                and node.op_type not in adapters
                and self._target.loses_kernel(node.op_type, version, operand_types(graph, node))
            ):
                label = nd.label(node)
                raise CannotConvert(f"{label}: onnxruntime has no kernel from opset {version} on")
        changed = [(g, node) for g, node in self._standard_nodes(unit) if node.op_type in adapters]
        missing = any(n.op_type in _TYPED_OPS and _types_missing(g, n) for g, n in changed)
        types = Types(unit, infer=missing)
        adapted = Counter(node.op_type for _, node in changed)
        for g, node in changed:
            try:
                _adapt(AdapterContext(g, node, types), adapters[node.op_type])
            except CannotConvert as obstacle:
                raise CannotConvert(f"{nd.label(node)}: {obstacle}") from obstacle
        if changed:
            del self._nodes[id(unit)]
        unit.set_opset("", version)
        unit.set_ir_version(max(unit.ir_version, min(ir_of_opset(version), MAX_IR)))
        return adapted

    # -- downwards

    def _lower(self, unit: Model, version: int, decompose: bool) -> Counter[str]:
        """Lower `unit` by one version; return the number of adapted nodes by operator."""
        newer = version + 1
        occurring = self._types_of_all_units()
        adapted: Counter[str] = Counter()
        types = Types(unit, infer=self._types_missing(unit, newer, occurring))
        unit.set_opset("", version)  # from here on, the rewrite is not empty and can be cut back
        changed = self._changed(unit, newer)
        obstacles: list[str] = []
        while changed:
            expanded: list[tuple[Graph, NodeProto]] = []
            for graph, node in changed:
                context = AdapterContext(graph, node, types)
                before, operator = unit.journal.position, node.op_type
                label = nd.label(node)
                try:
                    expanded += _lower_node(context, newer, occurring, decompose)
                except CannotConvert as obstacle:
                    obstacles.append(f"{label} needs opset {newer}: {obstacle}")
                    self.stuck[operator] += 1
                    continue
                adapted[operator] += unit.journal.position > before
            changed = [(g, n) for g, n in expanded if n in g and changes_at(n.op_type, newer)]
        if obstacles:
            more = len(obstacles) - _MOST_OBSTACLES
            shown = obstacles[:_MOST_OBSTACLES] + [f"and {more} more"] * (more > 0)
            raise CannotConvert("; ".join(shown))
        if adapted.total():
            del self._nodes[id(unit)]
            self._occurring = None
        return +adapted

    def _changed(self, unit: Model, version: int) -> list[tuple[Graph, NodeProto]]:
        """Return the nodes whose operator is new, or has changed, in an opset."""
        return [
            (graph, node)
            for graph, node in self._standard_nodes(unit)
            if changes_at(node.op_type, version) and node.op_type not in self._local
        ]

    def _types_of_all_units(self) -> frozenset[str]:
        if self._occurring is None:
            self._occurring = frozenset().union(*map(occurring_types, self._units))
        return self._occurring

    def _types_missing(self, unit: Model, newer: int, occurring: frozenset[str]) -> bool:
        return any(
            _types_missing(graph, node)
            for graph, node in self._changed(unit, newer)
            if node.op_type in LOWERING.get(newer, {})
            or node.op_type in DECOMPOSITIONS.get(newer, {})
            or may_need_types(node.op_type, newer, occurring)
        )

    def _standard_nodes(self, unit: Model) -> list[tuple[Graph, NodeProto]]:
        if id(unit) not in self._nodes:
            self._nodes[id(unit)] = list(_standard_nodes(unit.graph))
        return self._nodes[id(unit)]


def _lower_node(
    context: AdapterContext, newer: int, occurring: frozenset[str], decompose: bool
) -> list[tuple[Graph, NodeProto]]:
    """Bring a node to the opset before `newer`; return nodes that are still to be lowered."""
    node, journal = context.node, context.graph.model.journal
    mark, op_type = journal.position, node.op_type
    try:
        adapter = LOWERING.get(newer, {}).get(op_type)
        if adapter is not None:
            _adapt(context, adapter)
        if node.op_type == op_type:  # what an adapter turned it into is valid in both opsets
            relabel(context, newer, occurring)
    except CannotConvert:
        if not decompose:
            raise
        journal.undo_to(mark)
        adapter = DECOMPOSITIONS.get(newer, {}).get(op_type)
        if adapter is None:
            expanded = expand(context, newer)
            if expanded is None:
                raise
            return expanded
        _adapt(context, adapter)
        if node.op_type == op_type:
            relabel(context, newer, occurring)
    return []


def _adapt(context: AdapterContext, adapter: Adapter) -> None:
    if any(attribute.ref_attr_name for attribute in context.node.attribute):
        raise CannotConvert(
            "its attributes refer to those of a function call; inline functions first"
        )
    adapter(context)


def _version(unit: Model) -> int:
    """Return the standard opset: 1 for a model without imports, 0 when it imports other domains."""
    return unit.opsets.get("", 0 if unit.opsets else 1)


def _standard_nodes(graph: Graph) -> Iterator[tuple[Graph, NodeProto]]:
    """Yield all standard-domain nodes, those of subgraphs before their owner."""
    for node in graph.nodes:
        for child in graph.subgraphs(node):
            yield from _standard_nodes(child)
        if not nd.domain_of(node):
            yield graph, node


def _types_missing(g: Graph, node: NodeProto) -> bool:
    """Whether the graph does not know all types of a node's inputs."""
    known = [g.type(value) for value in nd.inputs_of(node)]
    return any(t is None or not t.dtype or t.shape is None for t in known)


def lower_ir(model: Model, floor: int) -> None:
    """Lower the IR version to the least that the model needs, but not below `floor`."""
    least = max(floor, least_ir(model))
    if least < model.ir_version:
        model.set_ir_version(least)
