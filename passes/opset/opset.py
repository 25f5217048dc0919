"""Lift a model to a newer opset, one version at a time.

At every version, adapters rewrite the nodes whose operator changed incompatibly (see
`adapter_table`). One version is one rewrite in the journal: halfway through it nodes belong to two
opsets, so it is applied as a whole or not at all. Where a node cannot be lifted, the model stays at
the last version at which every node is valid, and the pass reports why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from onnx import NodeProto, defs, helper

from passes.opset.adapter_context import Adapter, AdapterContext, CannotLift, Types
from passes.opset.adapter_table import EXPERIMENTAL, NEEDS_TYPES, RUNTIME_OPS, adapters_of
from passes.opset.function_bodies import FunctionModel, import_version
from toolkit.errors import UsageError
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.runtime import MAX_IR, MAX_OPSET
from toolkit.settings import OpsetLimit
from toolkit.targets import Target
from toolkit.verification.tolerance import FLOAT, Tolerance

__all__ = ["Opset"]

WORKING = 23
"""The opset that has every standard operator the built-in passes fuse into."""

_TYPED_OPS = frozenset(NEEDS_TYPES.split())
_EXPERIMENTAL_OPS = frozenset(op for ops in EXPERIMENTAL.values() for op in ops)


@dataclass(frozen=True, slots=True)
class Opset:
    """Lift the model to a newer opset.

    Without `to`, lift it to the opset that the other passes work in, within the limit set by the
    user.
    """

    name: ClassVar[str] = "opset"
    tolerance: ClassVar[Tolerance] = FLOAT  # a newer kernel may sum in another order

    to: int | None = field(
        default=None,
        metadata={
            "help": f"the opset to lift the model to; none: {WORKING}, or what --opset allows"
        },
    )

    def __post_init__(self) -> None:
        if self.to is not None and not 1 <= self.to <= MAX_OPSET:
            raise UsageError(
                f"opset: to={self.to} is out of range; onnxruntime loads opsets up to {MAX_OPSET}"
            )

    def run(self, model: Model, ctx: Context) -> None:
        to = self.to if self.to is not None else _within(ctx.settings.opset)
        lift = _Lift(model, ctx.target)
        if to is None or not lift.versions or min(lift.versions) >= to:
            return
        try:
            lift.require_known_ops()
            for version in range(min(lift.versions) + 1, to + 1):
                lift.step(version)
        except CannotLift as obstacle:
            ctx.note(f"stays at opset {lift.reached}, not {to}: {obstacle}")
        if lift.adapted:
            counted = ", ".join(f"{n} {op}" for op, n in lift.adapted.most_common())
            ctx.note(f"adapted to opset {lift.reached}: {counted}")


def _within(limit: OpsetLimit) -> int | None:
    """Return the working opset, limited by the user's choice; None: do not lift."""
    if limit == "keep":
        return None
    return WORKING if limit is None else min(WORKING, limit)


class _Lift:
    """The lift of a model together with its functions."""

    def __init__(self, model: Model, target: Target) -> None:
        self.model = model
        self.adapted: Counter[str] = Counter()
        self._target = target
        self._functions = [
            FunctionModel(f, model) if import_version(f) else None for f in model.functions
        ]
        self._units = [model, *(f.model for f in self._functions if f is not None)]
        self._nodes: dict[int, list[tuple[Graph, NodeProto]]] = {}

    @property
    def versions(self) -> list[int]:
        """The opsets of the model and of the functions that use standard operators."""
        return [version for unit in self._units if (version := _version(unit))]

    @property
    def reached(self) -> int:
        return min(self.versions)

    def require_known_ops(self) -> None:
        """Raise CannotLift for an operator outside the standard, whose future is unknown."""
        local = {f.name for f in self.model.functions if f.domain in nd.STANDARD_DOMAINS}
        known = {*RUNTIME_OPS, *_EXPERIMENTAL_OPS, *local}
        for unit in self._units:
            for _, node in self._standard_nodes(unit):
                if node.op_type not in known and not defs.has(node.op_type, MAX_OPSET):
                    raise CannotLift(f"{nd.label(node)} is not an ONNX operator")

    def step(self, version: int) -> None:
        """Lift the model and all functions below `version` to it, or none of them."""
        marks = [unit.journal.position for unit in self._units]
        if not self.model.journal.begin(f"opset-{version}", "ai.onnx"):
            raise CannotLift(f"the lift to opset {version} was rejected")
        adapted: Counter[str] = Counter()
        try:
            for unit in self._units:
                if 0 < _version(unit) < version:
                    adapted += self._lift(unit, version)
        except CannotLift:
            for unit, mark in zip(self._units, marks, strict=True):
                unit.journal.undo_to(mark)
            raise
        if self._functions:
            pairs = zip(self._functions, self.model.functions, strict=True)
            self.model.set_functions([new.to_function() if new else old for new, old in pairs])
        self.adapted += adapted

    def _lift(self, unit: Model, version: int) -> Counter[str]:
        """Lift `unit` by one version; return the number of adapted nodes by operator."""
        if version >= 9:  # opset 9 came with IR 4, where initializers need not be inputs
            unit.free_initializers()
        adapters, lost = adapters_of(version), self._target.lost_kernels.get(version, ())
        for _, node in self._standard_nodes(unit):
            if node.op_type in lost:
                label = nd.label(node)
                raise CannotLift(f"{label}: onnxruntime has no kernel from opset {version} on")
        changed = [(g, node) for g, node in self._standard_nodes(unit) if node.op_type in adapters]
        types = Types(unit, infer=any(_types_missing(g, node) for g, node in changed))
        adapted = Counter(node.op_type for _, node in changed)
        for g, node in changed:
            try:
                _adapt(AdapterContext(g, node, types), adapters[node.op_type])
            except CannotLift as obstacle:
                raise CannotLift(f"{nd.label(node)}: {obstacle}") from obstacle
        if changed:
            del self._nodes[id(unit)]
        unit.set_opset("", version)
        unit.set_ir_version(max(unit.ir_version, min(_minimal_ir(version), MAX_IR)))
        return adapted

    def _standard_nodes(self, unit: Model) -> list[tuple[Graph, NodeProto]]:
        if id(unit) not in self._nodes:
            self._nodes[id(unit)] = list(_standard_nodes(unit.graph))
        return self._nodes[id(unit)]


def _adapt(context: AdapterContext, adapter: Adapter) -> None:
    if any(attribute.ref_attr_name for attribute in context.node.attribute):
        raise CannotLift("its attributes refer to those of a function call; inline functions first")
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
    """Whether an adapter needs types that the graph does not know."""
    if node.op_type not in _TYPED_OPS:
        return False
    known = [g.type(value) for value in nd.inputs_of(node)]
    return any(t is None or not t.dtype or t.shape is None for t in known)


def _minimal_ir(opset: int) -> int:
    """Return the IR version that came with an opset."""
    table = helper.OP_SET_ID_VERSION_MAP
    return max(ir for (domain, v), ir in table.items() if domain == "ai.onnx" and v <= opset)
