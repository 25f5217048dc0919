"""The part of a tensor's range that its readers can tell apart.

Sigmoid is flat far from zero, SiLU and GELU are flat far below it, HardSwish and HardSigmoid are
exactly so. Levels that are spent there are lost: the range is cut where all readers together change
by no more than half a step of 8 bits.

    Sigmoid(x)     |x| <= t,   sigmoid(-t) = 1 / 510
    x Sigmoid(x)   x >= -t,    t exp(-t) ~ step / 2,    step = (high + t) / 255
    GELU(x)        x >= -t,    the same with t Phi(-t)
    HardSwish(x)   x >= -3;    HardSigmoid(x): where alpha x + beta is in 0..1;    Relu(x): x >= 0
    x + c          where the readers of the sum tell it apart, moved by c

What only carries values, or picks the greatest, is looked through: what its readers cannot tell
apart, it need not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from onnx import NodeProto

from passes.quantize.schemes.static.quantizable_ops import bounds_of
from toolkit.calibrate.statistics import Range
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph

_PASSING = (
    *("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split"),
    *("Expand", "Tile", "DepthToSpace", "SpaceToDepth", "MaxPool", "GlobalMaxPool"),
)
"""Every result is one of the values that it reads first, and greater for greater ones."""
_REACH = 8
"""Operators that are looked through, one behind the other, at most."""
_STEPS = 255
_SIGMOID_END = math.log(2 * _STEPS - 1)


def useful(g: Graph, tensor: str, seen: Range, reach: int = _REACH) -> Range:
    """What is left of the range of `tensor` when its readers are asked."""
    if g.is_output(tensor) or g.is_captured(tensor) or not g.users(tensor):
        return seen
    low, high = 0.0, 0.0
    for reader in g.users(tensor):
        part = _behind(g, reader, tensor, seen, reach) or _part(g, reader, tensor, seen)
        low, high = min(low, part.low), max(high, part.high)
    return Range.around(max(low, seen.low), min(high, seen.high))


def _behind(g: Graph, reader: NodeProto, tensor: str, seen: Range, reach: int) -> Range | None:
    """What the readers of a reader tell apart; None where it does more than carry or move."""
    if not reach:
        return None
    if nd.is_op(reader, *_PASSING) and list(reader.input).count(tensor) == 1:
        parts = [useful(g, name, seen, reach - 1) for name in nd.outputs_of(reader)]
        return Range(min(part.low for part in parts), max(part.high for part in parts))
    added = [g.const(name) for name in reader.input if name != tensor]
    if nd.is_op(reader, "Add") and len(added) == 1 and added[0] is not None and added[0].size:
        least, most = float(added[0].min()), float(added[0].max())
        if not math.isfinite(most - least):
            return None
        part = useful(g, reader.output[0], Range(seen.low + least, seen.high + most), reach - 1)
        return Range(part.low - most, part.high - least)
    return None


def _part(g: Graph, reader: NodeProto, tensor: str, seen: Range) -> Range:
    """The part that one reader can tell apart."""
    if nd.is_op(reader, "Sigmoid"):
        gate = _gated(g, reader, tensor)
        if gate:
            return Range(-_tail(seen.high, lambda t: t / (1 + math.exp(t))), seen.high)
        return Range(-_SIGMOID_END, _SIGMOID_END)
    if nd.is_op(reader, "Mul") and any(_is_gate(g, name, tensor) for name in reader.input):
        return Range(-_tail(seen.high, lambda t: t / (1 + math.exp(t))), seen.high)
    if nd.is_op(reader, "Gelu") or nd.qualified(reader) == "com.microsoft::Gelu":
        return Range(-_tail(seen.high, lambda t: t * math.erfc(t / math.sqrt(2)) / 2), seen.high)
    if nd.is_op(reader, "HardSwish"):
        return Range(-3.0, seen.high)
    if nd.is_op(reader, "HardSigmoid"):
        alpha, beta = nd.attr(reader, "alpha", 0.2), nd.attr(reader, "beta", 0.5)
        return Range(-beta / alpha, (1 - beta) / alpha) if alpha > 0 else seen
    bounds = bounds_of(g, reader)
    if bounds is not None and bounds[0] <= 0 <= bounds[1]:
        return Range(max(bounds[0], seen.low), min(bounds[1], seen.high))
    return seen


def _gated(g: Graph, sigmoid: NodeProto, tensor: str) -> bool:
    """Whether Sigmoid(x) only ever multiplies x."""
    output = sigmoid.output[0]
    users = g.users(output)
    gates = all(nd.is_op(user, "Mul") and tensor in user.input for user in users)
    return bool(users) and gates and not g.is_output(output) and not g.is_captured(output)


def _is_gate(g: Graph, value: str, tensor: str) -> bool:
    maker = g.producer(value)
    return maker is not None and nd.is_op(maker, "Sigmoid") and maker.input[0] == tensor


def _tail(high: float, error: Callable[[float], float]) -> float:
    """The least t, from 2 on, where what is cut off is at most half a step of [-t, high]."""
    t = 2.0
    while error(t) > (high + t) / _STEPS / 2:
        t += 0.0625
    return t
