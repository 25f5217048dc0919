"""The times of a node in float and in int8, from the target's table of measured kernels.

The time of a kernel is its work (multiplications of a convolution, elements of an element-wise
operator) times a rate. The table has rates for the shapes of `int8_kernels.py`; other shapes get an
average, weighted by the distance of channels and pixels on a logarithmic scale. Operators that were
measured behind a convolution take the difference to that convolution alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx import NodeProto

from passes.quantize.layers.layers import is_fused
from toolkit.ir import node as nd
from toolkit.runtime.cost_table import Costs, Regime, costs_in_use

INT8_SHIPPED = Path(__file__).parent / "data"
TOPIC = "int8"

Sizes = Mapping[str, tuple[int, ...]]
"""The shapes of values on one feed."""

_WIDTH_COUNTS = 2.0
"""Weight of channels relative to pixels in the distance of two shapes."""

_FEW_CHANNELS = 4
"""Input channels up to which a convolution counts as the first of an image network."""

_Work = Callable[[int, int], float]
_WORK: Mapping[str, _Work] = {
    "conv-1x1": lambda tokens, width: tokens * width * width,
    "conv-3x3": lambda tokens, width: 9 * tokens * width * width,
    "conv-depthwise-3x3": lambda tokens, width: 9 * tokens * width,
    "conv-depthwise-5x5": lambda tokens, width: 25 * tokens * width,
    "conv-first": lambda tokens, width: 27 * tokens * width / 4,
    "linear": lambda tokens, width: tokens * width * width,
}
"""Multiplications of one run in a regime; computations not listed here count elements."""

_BEHIND = {
    **dict.fromkeys(
        ("add", "mul", "sigmoid", "silu", "hardswish", "leaky-relu", "max-pool", "average-pool"),
        "conv-1x1",
    ),
    "concat": "conv-1x1",
    "global-average-pool": "once",
    "resize": "once",
}
"""Operators measured behind another computation, and its name."""

_POINTWISE = {
    **dict.fromkeys(("Add", "Sub", "Sum", "Max", "Min"), "add"),
    **dict.fromkeys(("Mul", "Div"), "mul"),
    **dict.fromkeys(("Sigmoid", "HardSigmoid", "Tanh", "Softmax"), "sigmoid"),
    **dict.fromkeys(("Swish", "com.microsoft::QuickGelu", "Gelu", "com.microsoft::Gelu"), "silu"),
    **dict.fromkeys(("Relu", "Clip", "LeakyRelu", "PRelu"), "leaky-relu"),
    **dict.fromkeys(("Concat", "Split", "Slice", "Pad", "Transpose"), "concat"),
    **dict.fromkeys(("GlobalAveragePool", "ReduceMean"), "global-average-pool"),
    "HardSwish": "hardswish",
    "MaxPool": "max-pool",
    "AveragePool": "average-pool",
    "Resize": "resize",
}
_BY_INPUT = ("GlobalAveragePool", "ReduceMean")
"""Operators whose work is the elements of their input."""


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds in float and in int8."""

    in_float: float
    in_int8: float

    @property
    def saving(self) -> float:
        return self.in_float - self.in_int8


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernel times at any shape: rates by regime for each computation and kind."""

    rates: Mapping[tuple[str, str], Mapping[Regime, float]]
    origin: str = ""

    @classmethod
    def of_costs(cls, costs: Costs, origin: str = "") -> Kernels:
        listed = ((c, s.name) for c, found in costs.computations.items() for s in found)
        return cls({key: _rates(costs, *key) for key in listed}, origin)

    @classmethod
    def in_use(cls) -> Kernels:
        return cls.of_costs(*costs_in_use(INT8_SHIPPED, TOPIC))

    def times(
        self, name: str, work: float, tokens: float, width: float, int8: str = "int8"
    ) -> Times:
        """Return the times of a computation, at the rates for these pixels and channels."""
        return Times(*(work * self._rate(name, kind, tokens, width) for kind in ("float", int8)))

    def crossing(self, elements: float, width: float) -> float:
        """Return the microseconds of a conversion to or from int8, with the change of layout."""
        return elements * self._rate("boundary", "mixed", elements / max(width, 1), width)

    def of(self, node: NodeProto, sizes: Sizes) -> Times | None:
        """Return the times of a node; None for an unknown operator or shape."""
        if nd.is_op(node, "Conv"):
            return self._conv(node, sizes)
        if nd.is_op(node, "MatMul", "Gemm") or is_fused(node):
            return self._linear(node, sizes)
        name = _POINTWISE.get(nd.qualified(node))
        shape = sizes.get(node.input[0] if nd.is_op(node, *_BY_INPUT) else node.output[0])
        if name is None or shape is None:
            return None
        elements = math.prod(shape)
        width = shape[1] if len(shape) > 2 else (shape[-1] if shape else 1)
        return self.times(name, elements, elements / max(width, 1), width)

    def _conv(self, node: NodeProto, sizes: Sizes) -> Times | None:
        weight, out = sizes.get(node.input[1]), sizes.get(node.output[0])
        if weight is None or out is None or len(weight) < 3:
            return None
        outputs, inputs, *kernel = weight
        groups = max(1, int(nd.attr(node, "group", 1)))
        pixels = out[0] * math.prod(out[2:])
        work = pixels * math.prod(weight)
        if inputs == 1 and groups > 1:
            large = math.prod(kernel) > 16
            name, width = f"conv-depthwise-{'5x5' if large else '3x3'}", float(outputs)
        elif inputs * groups <= _FEW_CHANNELS:
            name, width, pixels = "conv-first", float(outputs), 4 * pixels
        else:
            name = "conv-1x1" if math.prod(kernel) == 1 else "conv-3x3"
            width = math.sqrt(inputs * outputs / groups)
        return self.times(name, work, pixels, width)

    def _linear(self, node: NodeProto, sizes: Sizes) -> Times | None:
        a, out = sizes.get(node.input[0]), sizes.get(node.output[0])
        if not a or not out:
            return None
        inner = a[0] if nd.attr(node, "transA", 0) else a[-1]
        tokens = math.prod(out[:-1])
        width = math.sqrt(inner * out[-1])
        return self.times("linear", tokens * inner * out[-1], tokens, width, "static")

    def _rate(self, name: str, kind: str, tokens: float, width: float) -> float:
        return _interpolated(self.rates.get((name, kind), {}), tokens, width)


def _rates(costs: Costs, name: str, kind: str) -> dict[Regime, float]:
    """Return the microseconds per unit of work on one thread."""
    found = _measured(costs, name, kind)
    work = _WORK.get(name, lambda tokens, width: tokens * width)
    if name == "boundary":
        both = (_measured(costs, name, "float"), _measured(costs, name, "int8"))
        own = {
            r: (time - sum(other.get(r, 0.0) for other in both)) / 2 for r, time in found.items()
        }
    else:
        alone = _measured(costs, _BEHIND[name], kind) if name in _BEHIND else {}
        own = {r: time - alone.get(r, 0.0) for r, time in found.items()}
    return {r: max(0.0, time) / work(r.tokens, r.width) for r, time in own.items()}


def _measured(costs: Costs, name: str, kind: str) -> dict[Regime, float]:
    """Return the microseconds on one thread; int8 stands in for a kind that was not measured."""
    found = {s.name: s.microseconds for s in costs.computations.get(name, ())}
    times = found.get(kind) or found.get("int8", {})
    return {regime: time for regime, time in times.items() if regime.threads == 1}


def _interpolated(rates: Mapping[Regime, float], tokens: float, width: float) -> float:
    """Return the mean of the rates, weighted by nearness of the regime; 0 without any."""
    total = weights = 0.0
    for regime, rate in rates.items():
        distance = _WIDTH_COUNTS * abs(math.log(max(width, 1) / regime.width))
        distance += abs(math.log(max(tokens, 1) / regime.tokens))
        weight = (distance + 0.05) ** -3
        total += weight * rate
        weights += weight
    return total / weights if weights else 0.0
