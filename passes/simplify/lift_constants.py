"""Turn Constant nodes into initializers, where every tool and runtime looks for weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnx import NodeProto

from toolkit.ir import Graph, Model
from toolkit.ir.node import is_op
from toolkit.pass_manager.protocol import Context
from toolkit.verification.tolerance import EXACT, Tolerance


@dataclass(frozen=True, slots=True)
class LiftConstants:
    """Turn Constant nodes into initializers."""

    name: ClassVar[str] = "constants"
    tolerance: ClassVar[Tolerance] = EXACT

    def run(self, model: Model, ctx: Context) -> None:
        for graph in model.graphs():
            for node in graph.nodes:
                if is_op(node, "Constant"):
                    lift_constant(graph, node)


def lift_constant(graph: Graph, node: NodeProto) -> None:
    """Turn a Constant into an initializer, unless it is a graph output or sparse."""
    tensor = None if graph.is_output(node.output[0]) else graph.tensor(node.output[0])
    if tensor is not None and graph.begin("lift-constant", node):
        graph.lift(node, tensor)
