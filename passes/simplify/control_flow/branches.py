"""Inline the branch that an If with a known condition takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnx import NodeProto, TensorProto

from passes.simplify.control_flow.loops import capture_invariants
from passes.simplify.lift_constants import lift_constant
from toolkit.ir.clone import clone
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.node import is_op
from toolkit.pass_manager.protocol import Context
from toolkit.verification.tolerance import EXACT, Tolerance


@dataclass(frozen=True, slots=True)
class InlineBranches:
    """Inline the branch of an If with a known condition; capture loop-invariant values."""

    name: ClassVar[str] = "branches"
    tolerance: ClassVar[Tolerance] = EXACT

    def run(self, model: Model, ctx: Context) -> None:
        self._inline(model)
        capture_invariants(model)

    def _inline(self, model: Model) -> None:
        pending = [(model.graph, node) for node in reversed(model.graph.nodes)]
        while pending:
            graph, node = pending.pop()
            branch = _taken(graph, node)
            if branch is not None and graph.begin("inline-branch", node):
                for inner in _inline(graph, node, branch):
                    if is_op(inner, "Constant"):
                        lift_constant(graph, inner)  # not liftable before, as an output
                    else:
                        pending.append((graph, inner))
            else:
                for child in graph.subgraphs(node):
                    pending.extend((child, inner) for inner in child.nodes)


def _taken(graph: Graph, node: NodeProto) -> Graph | None:
    if not is_op(node, "If"):
        return None
    condition = _known(graph, node.input[0])
    if condition is None:
        return None
    wanted = "then_branch" if condition else "else_branch"
    order = [a.name for a in node.attribute if a.HasField("g")]
    branch = graph.subgraphs(node)[order.index(wanted)]
    # The graph cannot hold sparse initializers: leave such an If alone.
    return None if branch.has_sparse else branch


def _known(graph: Graph, value: str) -> bool | None:
    """Return the value of a condition: constant, or inferred from shapes (`x.shape[1] == 1`)."""
    found = graph.const(value)
    if found is None:
        found = graph.data(value)
    if found is None or found.size != 1:
        return None
    item = found.reshape(()).item()
    return bool(item) if isinstance(item, (bool, int)) else None


def _inline(graph: Graph, node: NodeProto, branch: Graph) -> list[NodeProto]:
    """Replace the If by the nodes of the branch and return them."""
    names: dict[str, str] = {}
    for name, tensor in branch.initializers.items():
        names[name] = graph.fresh(name)
        copy = TensorProto()
        copy.CopyFrom(tensor)
        copy.name = names[name]
        graph.put_initializer(copy)
    copies = clone((branch.snapshot(n) for n in branch.nodes), names, graph.fresh)
    inserted = [graph.insert(copy, at=node) for copy in copies]
    for value, inner in zip(list(node.output), branch.outputs, strict=True):
        if not value:
            continue
        inside = names.get(inner, inner)
        known = branch.type(inner)
        if known is not None and graph.type(inside) is None:
            graph.learn_type(inside, known)
        names[inner] = graph.replace(value, inside)
    graph.prune(node)
    return [new for new in inserted if new in graph]
