"""How far a pass may move the outputs: the three classes of tolerance.

An error is max |a - b| over an output relative to the output's scale, max |reference|. What is
allowed is the class's own figure, or a few units in the last place of the number format that the
model computes in, whichever is larger: an fp16 model cannot be held to 1e-6.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from onnx import TensorProto

from toolkit.ir import node as nd

if TYPE_CHECKING:
    from toolkit.ir.graph import Graph
    from toolkit.ir.model import Model

_EPSILON: dict[int, float] = {TensorProto.FLOAT16: 2.0**-10, TensorProto.BFLOAT16: 2.0**-7}
_STORAGE_ONLY = ("Cast", "CastLike", "DequantizeLinear", "Constant", "Identity")
"""Operators that read a half-precision weight without computing in half precision."""


class Tolerance(enum.Enum):
    """What a pass promises about the numbers. Integers, booleans and strings are always equal."""

    EXACT = "exact"
    """The same operations on the same numbers: equal but for the last bits."""
    FLOAT = "float"
    """The same mathematics in another order of operations."""
    QUANT = "quant"
    """Other mathematics on purpose, as close as its number format allows."""

    def __lt__(self, other: Tolerance) -> bool:
        """Stricter than: `max` of several tolerances is the loosest."""
        return self.relative < other.relative

    @property
    def relative(self) -> float:
        """Allowed max |a - b| relative to the output's scale, for a model in 32-bit floats."""
        return {"exact": 1e-6, "float": 1e-4, "quant": 0.1}[self.value]

    def allowed(self, epsilon: float = 0.0) -> float:
        """The figure for a model that computes with this machine epsilon (see `epsilon_of`)."""
        units = 4 if self is Tolerance.EXACT else 8
        return max(self.relative, units * epsilon)


EXACT, FLOAT, QUANT = Tolerance.EXACT, Tolerance.FLOAT, Tolerance.QUANT


def epsilon_of(model: Model) -> float:
    """Machine epsilon of the coarsest 16-bit format that the model computes in; 0 for none."""
    return max((_graph_epsilon(graph) for graph in model.graphs()), default=0.0)


def _graph_epsilon(graph: Graph) -> float:
    found = 0.0
    for node in graph.nodes:
        if nd.is_op(node, "Cast"):
            found = max(found, _EPSILON.get(nd.attr(node, "to"), 0.0))
        elif not nd.is_op(node, *_STORAGE_ONLY):
            for name in nd.inputs_of(node):
                found = max(found, _EPSILON.get(graph.dtype(name), 0.0))
    return found
