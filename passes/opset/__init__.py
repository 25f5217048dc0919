"""Lift a model of any age to a newer opset, one version at a time.

At every version, the nodes whose operator changed its meaning are rewritten by an adapter (see
`table`). A version is one rewrite of the journal: halfway through it the nodes belong to two
opsets, so it is made as a whole or not at all. Where a node cannot go on, the model stops at the
last version at which every node is valid, and the pass says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from onnx import NodeProto, defs, helper

from passes.opset.adapter_context import CannotLift, Site, Types
from passes.opset.function_bodies import Body, import_version
from tests.passes.opset.compatible_changes import (
    EXPERIMENTAL,
    NEEDS_TYPES,
    NO_KERNEL,
    RUNTIME_OPS,
    Adapter,
    adapters_of,
)
from toolkit.errors import UsageError
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.runtime.session import MAX_IR, MAX_OPSET
from toolkit.settings import OpsetLimit
from toolkit.verification.tolerance import FLOAT, Tolerance

__all__ = ["Opset"]

WORKING = 23
"""The opset in which the built-in passes know an operator for every meaning that they look for."""

_TYPED_OPS = frozenset(NEEDS_TYPES.split())
_EXPERIMENTAL_OPS = frozenset(op for ops in EXPERIMENTAL.values() for op in ops)


@dataclass(frozen=True, slots=True)
class Opset:
    """Lift the model to a newer version of ONNX's own operators.

    Without an opset of its own it goes to the one that the other passes work in, within the limit
    that the user set for the whole run.
    """

    name: ClassVar[str] = "opset"
    tolerance: ClassVar[Tolerance] = FLOAT  # a newer version may have a kernel that sums otherwise

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
        to = self.to if self.to is not None else _within(ctx.opset)
        lift = _Lift(model, on_runtime=ctx.on_runtime)
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
    """The working opset as far as the user allows it; None: no lift."""
    if limit == "keep":
        return None
    return WORKING if limit is None else min(WORKING, limit)


class _Lift:
    """The model on its way up, and the bodies of its functions with it."""

    def __init__(self, model: Model, on_runtime: bool) -> None:
        self.model = model
        self.adapted: Counter[str] = Counter()
        self._on_runtime = on_runtime
        self._bodies = [Body(f, model) if import_version(f) else None for f in model.functions]
        self._units = [model, *(b.model for b in self._bodies if b is not None)]
        self._indexes: dict[int, _Index] = {}

    @property
    def versions(self) -> list[int]:
        """The opsets of the model and the functions that use ONNX's own operators."""
        return [version for unit in self._units if (version := _version(unit))]

    @property
    def reached(self) -> int:
        return min(self.versions)

    def require_known_ops(self) -> None:
        """Raise for an operator of no standard: nobody knows what the next opset makes of it."""
        local = {f.name for f in self.model.functions if f.domain in nd.STANDARD_DOMAINS}
        known = {*RUNTIME_OPS, *_EXPERIMENTAL_OPS, *local}
        for unit in self._units:
            for op_type, places in self._index(unit).items():
                if op_type not in known and not defs.has(op_type, MAX_OPSET):
                    raise CannotLift(f"{nd.label(places[0].node)} is no operator of ONNX")

    def step(self, version: int) -> None:
        """Lift everything that is below `version` to it, or nothing."""
        marks = [unit.journal.position for unit in self._units]
        if not self.model.journal.begin(f"opset-{version}", "ai.onnx"):
            raise CannotLift(f"opset {version} did not hold")
        adapted: Counter[str] = Counter()
        try:
            for unit in self._units:
                if 0 < _version(unit) < version:
                    adapted += self._lift(unit, version)
        except CannotLift:
            for unit, mark in zip(self._units, marks, strict=True):
                unit.journal.undo_to(mark)
            raise
        if self._bodies:
            pairs = zip(self._bodies, self.model.functions, strict=True)
            self.model.set_functions([b.to_function() if b else f for b, f in pairs])
        self.adapted += adapted

    def _lift(self, unit: Model, version: int) -> Counter[str]:
        """Make `unit`, at the version before, one of `version`; the adapted nodes by operator."""
        if version >= 9:  # opset 9 came with IR 4, which frees initializers from being inputs
            unit.free_initializers()
        index = self._index(unit)
        adapters = adapters_of(version)
        for op in NO_KERNEL.get(version, "").split():
            if self._on_runtime and op in index:
                label = nd.label(index[op][0].node)
                raise CannotLift(f"{label}: onnxruntime has no kernel from opset {version} on")
        changed = sorted(place for op in adapters if op in index for place in index[op])
        types = Types(unit, infer=any(_types_missing(place) for place in changed))
        adapted = Counter(place.node.op_type for place in changed)
        for place in changed:
            try:
                _adapt(Site(place.graph, place.node, types), adapters[place.node.op_type])
            except CannotLift as obstacle:
                raise CannotLift(f"{nd.label(place.node)}: {obstacle}") from obstacle
        if changed:
            del self._indexes[id(unit)]
        unit.set_opset("", version)
        unit.set_ir_version(max(unit.ir_version, min(_minimal_ir(version), MAX_IR)))
        return adapted

    def _index(self, unit: Model) -> _Index:
        """The nodes of ONNX's own domain by operator."""
        found = self._indexes.get(id(unit))
        if found is None:
            found = self._indexes[id(unit)] = {}
            for order, (graph, node) in enumerate(_standard_nodes(unit.graph)):
                found.setdefault(node.op_type, []).append(_Place(order, graph, node))
        return found


@dataclass(frozen=True, slots=True, order=True)
class _Place:
    """A node and where it is; places sort in the order in which nodes are adapted."""

    order: int
    graph: Graph = field(compare=False)
    node: NodeProto = field(compare=False)


_Index = dict[str, list[_Place]]


def _adapt(site: Site, adapter: Adapter) -> None:
    if any(attribute.ref_attr_name for attribute in site.node.attribute):
        raise CannotLift("its attributes are the caller's; inline functions first")
    adapter(site)


def _version(unit: Model) -> int:
    """The opset of ONNX's own operators; 1 before there were imports, 0 when none is used."""
    return unit.opsets.get("", 0 if unit.opsets else 1)


def _standard_nodes(graph: Graph) -> Iterator[tuple[Graph, NodeProto]]:
    """All nodes of ONNX's own domain; those inside a node come before it."""
    for node in graph.nodes:
        for child in graph.subgraphs(node):
            yield from _standard_nodes(child)
        if not nd.domain_of(node):
            yield graph, node


def _types_missing(place: _Place) -> bool:
    """Whether an adapter will ask for types that the graph does not know."""
    if place.node.op_type not in _TYPED_OPS:
        return False
    known = [place.graph.type(value) for value in nd.inputs_of(place.node)]
    return any(t is None or not t.dtype or t.shape is None for t in known)


def _minimal_ir(opset: int) -> int:
    """The IR version that came with an opset."""
    table = helper.OP_SET_ID_VERSION_MAP
    return max(ir for (domain, v), ir in table.items() if domain == "ai.onnx" and v <= opset)
