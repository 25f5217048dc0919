"""The tolerance policy: how far outputs may move, for passes, exports and `verify`.

An error is max |a - b| over an output relative to the output's scale, max |reference|. A pass is
allowed the figure of its tolerance class, or a few units in the last place of the number format
that the model computes in, whichever is larger: an fp16 model cannot be held to 1e-6.

Quantized models are measured by accuracy metrics instead; see `toolkit.accuracy.budgets`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto

from toolkit.ir import node as nd

if TYPE_CHECKING:
    from toolkit.ir.graph import Graph
    from toolkit.ir.model import Model

_EPSILON: dict[int, float] = {TensorProto.FLOAT16: 2.0**-10, TensorProto.BFLOAT16: 2.0**-7}
_STORAGE_ONLY = ("Cast", "CastLike", "DequantizeLinear", "Constant", "Identity")
"""Operators that take half-precision weights without computing in half precision."""

EXPORT_TOLERANCE = 1e-4
"""Default relative error allowed between a framework and the exported graph."""

VERIFY_TOLERANCE = 1e-4
"""Default relative error that `verify` allows between two models."""

UNSTABLE = {"graph": 1e-6, "framework": 1e-3}
"""Relative error between two runs on the same feed above which an output is nondeterministic;
frameworks run multi-threaded kernels that may sum in a different order each time."""

AS_DEPLOYED = 2.0
"""With the runtime's optimizations on, a result may be this many times as far from the reference
as the original model is with them."""

SENSITIVITY, MAX_SENSITIVITY = 2.0, 10.0
"""A reordered computation may move an output by SENSITIVITY times the effect of perturbing the
original's inputs by one unit in the last place, up to MAX_SENSITIVITY times the tolerance."""

REQUANTIZED = 1.25
"""Rewriting a quantized model may increase its noise by this factor: values halfway between two
integers may be rounded the other way."""

MIN_SCALE = 5e-3
"""Smallest scale that errors are measured against. A probability of 1e-6 computed as 1 - p or by a
sigmoid has an error of one unit in the last place of 1.0, which every tolerance must allow."""

CHANNEL_SLACK, CHANNEL_FLOOR, CHANNEL_ELEMENTS = 100.0, 1e-5, 16
"""A channel of at least CHANNEL_ELEMENTS elements may be off by CHANNEL_SLACK times the tolerance
relative to its own scale, or to CHANNEL_FLOOR of the whole output's scale. One output often holds
several quantities, such as boxes of 600 pixels beside scores of 0.01; the common scale
alone would not constrain the scores."""


class Tolerance(enum.Enum):
    """The accuracy that a pass guarantees. Integers, booleans and strings must be equal."""

    EXACT = "exact"
    """The same operations on the same numbers: equal except for the last bits."""
    FLOAT = "float"
    """The same mathematics in a different order of operations."""
    QUANT = "quant"
    """Deliberately different mathematics, as close as the number format allows."""

    def __lt__(self, other: Tolerance) -> bool:
        """Return whether this tolerance is stricter; `max` returns the loosest."""
        return self.relative < other.relative

    @property
    def relative(self) -> float:
        """Allowed max |a - b| relative to the output's scale, for a model in 32-bit floats."""
        return {"exact": 1e-6, "float": 1e-4, "quant": 0.1}[self.value]

    def allowed(self, epsilon: float = 0.0) -> float:
        """Return the allowed error of a model with this machine epsilon (see `epsilon_of`)."""
        units = 4 if self is Tolerance.EXACT else 8
        return max(self.relative, units * epsilon)


EXACT, FLOAT, QUANT = Tolerance.EXACT, Tolerance.FLOAT, Tolerance.QUANT


def allowed_for(value: Any, tolerance: float) -> float:
    """Return the tolerance of one output, widened to 8 units in the last place of a half type."""
    dtype = np.asarray(value).dtype
    if dtype.itemsize != 2 or dtype.kind in "iub":
        return tolerance
    kind = TensorProto.FLOAT16 if dtype == np.float16 else TensorProto.BFLOAT16
    return max(tolerance, 8 * _EPSILON[kind])


def epsilon_of(model: Model) -> float:
    """Return the machine epsilon of the coarsest 16-bit format the model computes in, or 0."""
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
