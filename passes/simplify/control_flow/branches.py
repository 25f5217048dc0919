"""Inline the branch that an If with a known condition takes; unroll short loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnx import NodeProto

from passes.analysis.shapes import Shapes
from passes.simplify.control_flow.inline_subgraph import (
    insert_copy,
    known_flag,
    replace_results,
)
from passes.simplify.control_flow.loops import capture_invariants
from passes.simplify.control_flow.unroll import unroll
from passes.simplify.lift_constants import lift_constant
from toolkit.ir import Graph, Model
from toolkit.ir.node import is_op
from toolkit.pass_manager.protocol import Context
from toolkit.verification.tolerance import EXACT, Tolerance


@dataclass(frozen=True, slots=True)
class InlineBranches:
    """Inline the branch of an If with a known condition; unroll short loops."""

    name: ClassVar[str] = "branches"
    tolerance: ClassVar[Tolerance] = EXACT

    def run(self, model: Model, ctx: Context) -> None:
        # Shapes of inlined nodes may decide the conditions of others.
        while self._inline(model) and any(is_op(node, "If", "Loop") for node in model.nodes()):
            Shapes(annotate=False).run(model, ctx)
        capture_invariants(model)

    def _inline(self, model: Model) -> bool:
        """Inline known branches and short loops; return whether there were any."""
        changed = False
        pending = [(model.graph, node) for node in reversed(model.graph.nodes)]
        while pending:
            graph, node = pending.pop()
            branch = _taken(graph, node)
            if branch is not None and graph.begin("inline-branch", node):
                inserted = _inline(graph, node, branch)
            else:
                inserted = unroll(graph, node)
            if inserted is not None:
                changed = True
                for inner in inserted:
                    if is_op(inner, "Constant"):
                        lift_constant(graph, inner)  # no longer an output of a graph
                    else:
                        pending.append((graph, inner))
            else:
                for child in graph.subgraphs(node):
                    pending.extend((child, inner) for inner in child.nodes)
        return changed


def _taken(graph: Graph, node: NodeProto) -> Graph | None:
    if not is_op(node, "If"):
        return None
    condition = known_flag(graph, node.input[0])
    if condition is None:
        return None
    wanted = "then_branch" if condition else "else_branch"
    order = [a.name for a in node.attribute if a.HasField("g")]
    branch = graph.subgraphs(node)[order.index(wanted)]
    # The graph cannot hold sparse initializers: leave such an If alone.
    return None if branch.has_sparse else branch


def _inline(graph: Graph, node: NodeProto, branch: Graph) -> list[NodeProto]:
    """Replace the If by the nodes of the branch and return them."""
    names: dict[str, str] = {}
    inserted = insert_copy(graph, node, branch, names)
    results = [names.get(value, value) for value in branch.outputs]
    for inner, value in zip(branch.outputs, results, strict=True):
        known = branch.type(inner)
        if known is not None and graph.type(value) is None:
            graph.learn_type(value, known)
    replace_results(graph, node, results)
    return [new for new in inserted if new in graph]
