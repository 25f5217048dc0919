"""Inline an If whose condition is known as the branch it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnx import NodeProto, TensorProto

from passes.simplify.control_flow.loops import read_around_loops
from passes.simplify.lift_constants import lift_constant
from toolkit.ir.clone import clone
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.node import is_op
from toolkit.pass_manager.protocol import Context
from toolkit.verification.tolerance import EXACT, Tolerance


@dataclass(frozen=True, slots=True)
class InlineBranches:
    """Inline the branch that a constant If takes; take out of a Loop what it never changes."""

    name: ClassVar[str] = "branches"
    tolerance: ClassVar[Tolerance] = EXACT

    def run(self, model: Model, ctx: Context) -> None:
        self._inline(model)
        read_around_loops(model)

    def _inline(self, model: Model) -> None:
        pending = [(model.graph, node) for node in reversed(model.graph.nodes)]
        while pending:
            graph, node = pending.pop()
            branch = _taken(graph, node)
            if branch is not None and graph.begin("inline-branch", node):
                for inner in _inline(graph, node, branch):
                    if is_op(inner, "Constant"):
                        lift_constant(graph, inner)  # as an output of the branch it had to stay
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
    # Sparse initializers have no place to go in the edit API; an If with them is left alone.
    return None if branch.has_sparse else branch


def _known(graph: Graph, value: str) -> bool | None:
    """A condition's value: stored, or followed by shape inference (`x.shape[1] == 1`)."""
    found = graph.const(value)
    if found is None:
        found = graph.data(value)
    if found is None or found.size != 1:
        return None
    item = found.reshape(()).item()
    return bool(item) if isinstance(item, (bool, int)) else None


def _inline(graph: Graph, node: NodeProto, branch: Graph) -> list[NodeProto]:
    """Put the branch in the place of the If; the nodes that came in."""
    names: dict[str, str] = {}
    for name, tensor in branch.initializers.items():
        names[name] = graph.fresh(name)
        copy = TensorProto()
        copy.CopyFrom(tensor)
        copy.name = names[name]
        graph.put_initializer(copy)
    bodies = clone((branch.snapshot(n) for n in branch.nodes), names, graph.fresh)
    inserted = [graph.insert(body, at=node) for body in bodies]
    for value, inner in zip(list(node.output), branch.outputs, strict=True):
        if not value:
            continue
        inside = names.get(inner, inner)
        known = branch.type(inner)
        if known is not None and graph.type(inside) is None:
            graph.learn_type(inside, known)
        names[inner] = graph.replace(value, inside)
    graph.prune(node)
    return [body for body in inserted if body in graph]
