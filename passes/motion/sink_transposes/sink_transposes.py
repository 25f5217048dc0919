"""The pass `layout`."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onnx import NodeProto

from passes.analysis.operands import permutation, reshape, reshape_target
from passes.motion.sink_transposes.region import TransposeRegion, inverse_of, is_identity
from passes.simplify.canonicalize import views
from toolkit.ir import Graph, Model, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.rule import apply_rules, rewrite
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context


@rewrite(op.Transpose(var("x")), opset=5)
def transpose_of_ones(g: Graph, x: str, node: NodeProto) -> str | None:
    """A Transpose that only moves axes of size 1 is a Reshape, which copies nothing."""
    shape, perm = g.shape(x), permutation(g, node)
    if shape is None or perm is None or len(shape) != len(perm):
        return None
    moving = [axis for axis in perm if shape[axis] != 1]
    target = reshape_target(shape, tuple(shape[axis] for axis in perm))
    if moving != sorted(moving) or target is None:
        return None
    return reshape(g, x, target, at=node)


@dataclass(frozen=True, slots=True)
class Layout:
    """Push Transposes together and cancel them; merge Reshapes."""

    name: ClassVar[str] = "layout"
    tolerance: ClassVar[Tolerance] = FLOAT  # a sum over permuted axes rounds in another order

    def run(self, model: Model, ctx: Context) -> None:
        apply_rules(model, views.RULES, ctx)
        changed = True
        while changed:  # a move may enable another, far from where it was made
            moved = sum(push_transposes(graph) for graph in model.graphs())
            changed = apply_rules(model, _RULES, ctx) or moved


_RULES = (transpose_of_ones, *views.RULES)


def _transposes(graph: Graph) -> list[NodeProto]:
    return [node for node in graph.nodes if nd.is_op(node, "Transpose")]


def push_transposes(graph: Graph) -> int:
    """Move regions across Transposes as long as this removes some; return the number of moves."""
    pending = deque(_transposes(graph))
    moves = 0
    while pending:
        node = pending.popleft()
        if node not in graph:
            continue
        start, nodes = graph.model.journal.position, len(graph)
        touched = _push(graph, node)
        if touched is None:
            continue
        if len(graph) < nodes:
            moves += 1
            pending.extend(touched)
        else:  # miscounted: moves without gain could alternate endlessly
            graph.model.journal.undo_to(start)
    return moves


def _push(graph: Graph, node: NodeProto) -> list[NodeProto] | None:
    """Move a region below or above a Transpose; return the Transposes changed, or None."""
    perm = permutation(graph, node)
    if perm is None or is_identity(perm):
        return None
    after = TransposeRegion(graph, perm)
    if after.grow(graph.users(node.output[0])) and graph.begin("push-transpose", node):
        return after.move()
    producer = graph.producer(node.input[0])
    before = TransposeRegion(graph, inverse_of(perm))
    if producer is not None and before.grow([producer]) and graph.begin("pull-transpose", node):
        return before.move()
    return None
