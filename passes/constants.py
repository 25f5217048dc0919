"""Constant nodes become initializers, where every tool and runtime looks for weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toolkit.model import Model
from toolkit.nodes import is_op
from toolkit.pipeline import Context
from toolkit.tolerance import EXACT, Tolerance


@dataclass(frozen=True, slots=True)
class LiftConstants:
    """Turn Constant nodes into initializers."""

    name: ClassVar[str] = "constants"
    tolerance: ClassVar[Tolerance] = EXACT

    def run(self, model: Model, ctx: Context) -> None:
        for graph in model.graphs():
            for node in graph.nodes:
                # A graph output needs a node behind it; a sparse constant has no dense tensor.
                if not is_op(node, "Constant") or graph.is_output(node.output[0]):
                    continue
                tensor = graph.tensor(node.output[0])
                if tensor is not None and graph.begin("lift-constant", node):
                    graph.lift(node, tensor)
