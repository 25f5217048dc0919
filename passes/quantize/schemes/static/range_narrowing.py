"""Narrow a calibration range to the part that the tensor's users distinguish.

Sigmoid is nearly flat far from zero, SiLU and GELU far below it; HardSwish and HardSigmoid are flat
there exactly. Codes for the flat parts are wasted: the range is clipped where this changes the
results of all users by at most half an 8-bit step.

    Sigmoid(x)     |x| <= t,   sigmoid(-t) = 1 / 510
    x Sigmoid(x)   x >= -t,    t exp(-t) ~ step / 2,    step = (high + t) / 255
    GELU(x)        x >= -t,    the same with t Phi(-t)
    HardSwish(x)   x >= -3;    HardSigmoid(x): where alpha x + beta is in 0..1;    Relu(x): x >= 0
    x + c          the range of the sum, shifted by -c

For data movement and max pooling, the users of the result determine the range.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from onnx import NodeProto

from passes.quantize.schemes.static.quantizable_ops import bounds_of
from toolkit.calibrate.statistics import Range
from toolkit.ir import Graph, node as nd
from toolkit.ir.op_traits import MOVEMENT
from toolkit.quantization.number_format import UINT8

_MONOTONE = (*MOVEMENT, "MaxPool", "GlobalMaxPool")
"""Operators whose results are elements of the first operand, and monotone in them."""
_DEPTH = 8
"""The longest chain of operators to follow."""
_STEPS = UINT8.steps
_SIGMOID_END = math.log(2 * _STEPS - 1)
"""The t where sigmoid(-t) is half a step of [0, 1]."""


def needed_range(g: Graph, tensor: str, seen: Range, depth: int = _DEPTH) -> Range:
    """Return the part of the range `seen` that the users of `tensor` distinguish."""
    if g.is_output(tensor) or g.is_captured(tensor) or not g.users(tensor):
        return seen
    low, high = 0.0, 0.0
    for user in g.users(tensor):
        part = _through(g, user, tensor, seen, depth) or _needed_by(g, user, tensor, seen)
        low, high = min(low, part.low), max(high, part.high)
    return Range.around(max(low, seen.low), min(high, seen.high))


def _through(g: Graph, user: NodeProto, tensor: str, seen: Range, depth: int) -> Range | None:
    """Return the part that users of the result distinguish, or None for another `user`."""
    if not depth:
        return None
    if nd.is_op(user, *_MONOTONE) and list(user.input).count(tensor) == 1:
        parts = [needed_range(g, name, seen, depth - 1) for name in nd.outputs_of(user)]
        return Range(min(part.low for part in parts), max(part.high for part in parts))
    added = [g.const(name) for name in user.input if name != tensor]
    if nd.is_op(user, "Add") and len(added) == 1 and added[0] is not None and added[0].size:
        least, most = float(added[0].min()), float(added[0].max())
        if not math.isfinite(most - least):
            return None
        part = needed_range(g, user.output[0], Range(seen.low + least, seen.high + most), depth - 1)
        return Range(part.low - most, part.high - least)
    return None


def _needed_by(g: Graph, user: NodeProto, tensor: str, seen: Range) -> Range:
    """Return the part that one user distinguishes."""
    gated = nd.is_op(user, "Mul") and any(_is_gate(g, name, tensor) for name in user.input)
    if gated or (nd.is_op(user, "Sigmoid") and _is_only_gate(g, user, tensor)):
        return Range(-_tail(seen.high, lambda t: t / (1 + math.exp(t))), seen.high)
    if nd.is_op(user, "Sigmoid"):
        return Range(-_SIGMOID_END, _SIGMOID_END)
    if nd.is_op(user, "Gelu") or nd.qualified(user) == "com.microsoft::Gelu":
        return Range(-_tail(seen.high, lambda t: t * math.erfc(t / math.sqrt(2)) / 2), seen.high)
    if nd.is_op(user, "HardSwish"):
        return Range(-3.0, seen.high)
    if nd.is_op(user, "HardSigmoid"):
        alpha, beta = nd.attr(user, "alpha", 0.2), nd.attr(user, "beta", 0.5)
        return Range(-beta / alpha, (1 - beta) / alpha) if alpha > 0 else seen
    bounds = bounds_of(g, user)
    if bounds is not None and bounds[0] <= 0 <= bounds[1]:
        return Range(max(bounds[0], seen.low), min(bounds[1], seen.high))
    return seen


def _is_only_gate(g: Graph, sigmoid: NodeProto, tensor: str) -> bool:
    """Whether every user of Sigmoid(x) multiplies it by x."""
    output = sigmoid.output[0]
    users = g.users(output)
    gates = all(nd.is_op(user, "Mul") and tensor in user.input for user in users)
    return bool(users) and gates and not g.is_output(output) and not g.is_captured(output)


def _is_gate(g: Graph, value: str, tensor: str) -> bool:
    producer = g.producer(value)
    return producer is not None and nd.is_op(producer, "Sigmoid") and producer.input[0] == tensor


def _tail(high: float, error: Callable[[float], float]) -> float:
    """Return the least t >= 2 where clipping at -t costs at most half a step of [-t, high]."""
    t = 2.0
    while error(t) > (high + t) / _STEPS / 2:
        t += 0.0625
    return t
