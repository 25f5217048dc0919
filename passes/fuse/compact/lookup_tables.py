"""Functions of one integer that are constant from some number on, as a table.

    f(d) = Gather(table, Clip(d, -n, n))

T5, MPNet and DeBERTa sort distances into buckets: exact ones nearby, logarithmic ones beyond, all
the same from some distance on. Twenty operators on [length, length] say what a table with an entry
for each distance can be asked. That f does not change beyond n is shown by intervals: every
operator on the way is monotone in each operand, so the ends of its result are found at the ends of
its operands, floats widened by more than they may be rounded. The table itself is f on 0 ... n,
-n ... -1 (negative places count from the end), left for `fold`, and so for the runtime, to compute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import unsqueeze
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import FLOATS, Shape, TensorType

Interval = tuple[float, float]

_INTEGERS = (TensorProto.INT64, TensorProto.INT32)
_LEAST_NODES = 4
_MOST_NODES = 48
_BOUNDS = tuple(1 << bits for bits in range(4, 16))
"""Where a function may stop changing: a table has twice as many entries."""

_LARGEST = float(1 << 40)
"""No distance between two elements of a tensor is larger."""

_ROUNDING = 1e-5
"""More than a few roundings of a float32."""


def _least(x: float, y: float) -> float:
    return min(x, y)


def _most(x: float, y: float) -> float:
    return max(x, y)


def _ceil(x: float) -> float:
    return float(math.ceil(x))


def _floor(x: float) -> float:
    return float(math.floor(x))


def _same(x: float) -> float:
    return x


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def _not(x: float) -> float:
    return 1 - x


def _sign(x: float) -> float:
    return (x > 0) - (x < 0)


def _where(condition: float, x: float, y: float) -> float:
    return x if condition else y


_MONOTONE: dict[str, Callable[..., float]] = {
    "Abs": float.__abs__,
    "Add": float.__add__,
    "And": _least,
    "Cast": _same,
    "Ceil": _ceil,
    "Clip": _clip,
    "Div": float.__truediv__,
    "Floor": _floor,
    "Greater": float.__gt__,
    "GreaterOrEqual": float.__ge__,
    "Less": float.__lt__,
    "LessOrEqual": float.__le__,
    "Log": math.log,
    "Max": _most,
    "Min": _least,
    "Mul": float.__mul__,
    "Neg": float.__neg__,
    "Not": _not,
    "Or": _most,
    "Sign": _sign,
    "Sqrt": math.sqrt,
    "Sub": float.__sub__,
    "Where": _where,
}
"""Operators that are monotone in each operand, where that does not change its sign."""

_SIGNED = {"Abs": 0, "Div": 1}
"""Which operand of an operator must not change its sign."""

_VIEWS = ("Unsqueeze", "Squeeze", "Reshape", "Identity")


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """What `root` is of `source`, by nodes in graph order; constant beyond `bound`."""

    source: str
    nodes: tuple[NodeProto, ...]
    root: NodeProto
    bound: int


def functions(g: Graph) -> list[Function]:
    """All of them that no other one contains."""
    order = {id(node): place for place, node in enumerate(g.nodes)}
    found: list[Function] = []
    inside: set[int] = set()
    for node in reversed(g.nodes):
        if id(node) in inside or g.dtype(node.output[0]) not in _INTEGERS:
            continue
        function = _function(g, node, order)
        if function is not None:
            inside.update(map(id, function.nodes))
            found.append(function)
    return found[::-1]


def _function(g: Graph, root: NodeProto, order: dict[int, int]) -> Function | None:
    nodes: dict[int, NodeProto] = {}
    sources: set[str] = set()
    pending = [root.output[0]]
    while pending:
        value = pending.pop()
        node = g.producer(value)
        if node is None or not _is_inside(g, node):
            sources.add(value)
        elif id(node) not in nodes:
            nodes[id(node)] = node
            pending.extend(_operands(g, node))
        if len(sources) > 1 or len(nodes) > _MOST_NODES:
            return None
    if len(nodes) < _LEAST_NODES or len(sources) != 1:
        return None
    [source] = sources
    if g.dtype(source) not in _INTEGERS or g.is_const(source):
        return None
    listed = tuple(sorted(nodes.values(), key=lambda node: order[id(node)]))
    for bound in _BOUNDS:
        if all(_is_constant(g, source, listed, ends) for ends in _beyond(bound)):
            return Function(source, listed, root, bound)
    return None


def _operands(g: Graph, node: NodeProto) -> list[str]:
    """What an operator works on; a view's other operand only says how."""
    inputs = node.input[:1] if nd.is_op(node, *_VIEWS) else nd.inputs_of(node)
    return [name for name in inputs if not g.is_const(name)]


def _is_inside(g: Graph, node: NodeProto) -> bool:
    """Whether an operator works by element on values of one shape, but for ones in front."""
    if not nd.is_op(node, *_MONOTONE, *_VIEWS):
        return False
    shape = _core(g.shape(node.output[0]))
    operands = _operands(g, node)
    if shape is None or not operands or any(_core(g.shape(v)) != shape for v in operands):
        return False
    stored = [] if nd.is_op(node, *_VIEWS) else [g.const(v) for v in nd.inputs_of(node)]
    return all(array is None or array.size == 1 for array in stored)


def _core(shape: Shape | None) -> Shape | None:
    if shape is None:
        return None
    return tuple(itertools.dropwhile(lambda size: size == 1, shape))


# -- intervals


def _beyond(bound: int) -> tuple[Interval, Interval]:
    return (float(bound), _LARGEST), (-_LARGEST, float(-bound))


def _is_constant(g: Graph, source: str, nodes: Sequence[NodeProto], ends: Interval) -> bool:
    known = {source: ends}
    for node in nodes:
        interval = _interval(g, node, known)
        if interval is None:
            return False
        known[node.output[0]] = interval
    low, high = known[nodes[-1].output[0]]
    return low == high


def _interval(g: Graph, node: NodeProto, known: dict[str, Interval]) -> Interval | None:
    if nd.is_op(node, *_VIEWS):
        return known[node.input[0]]
    operands = [known.get(name) or _number(g.const(name)) for name in nd.inputs_of(node)]
    signed = _SIGNED.get(node.op_type)
    ends = [operand for operand in operands if operand is not None]
    if len(ends) < len(operands) or (signed is not None and _may_be_zero(ends[signed])):
        return None
    if nd.is_op(node, "Cast") and g.dtype(node.output[0]) == TensorProto.BOOL:
        return None
    try:
        corners = [_MONOTONE[node.op_type](*corner) for corner in itertools.product(*ends)]
        low, high = min(corners), max(corners)
        if g.dtype(node.output[0]) not in FLOATS:
            return float(math.trunc(low)), float(math.trunc(high))
    except (ValueError, TypeError, OverflowError):  # not defined there, or operands left out
        return None
    return low - _ROUNDING * abs(low), high + _ROUNDING * abs(high)


def _number(stored: Array | None) -> Interval | None:
    if stored is None or stored.dtype.kind not in "fiub":
        return None
    number = float(stored.reshape(-1)[0])
    return None if math.isnan(number) else (number, number)


def _may_be_zero(ends: Interval) -> bool:
    return ends[0] <= 0 <= ends[1]


# -- writing


def write(g: Graph, function: Function, clipped: dict[tuple[str, int], str]) -> None:
    """Put a look-up in the function's place; the table is left to be folded.

    `clipped` has the distances that were limited before, by source and bound.
    """
    source, root, bound = function.source, function.root, function.bound
    known = g.type(source)
    assert known is not None
    assert known.shape is not None
    dtype = np.int64 if known.dtype == TensorProto.INT64 else np.int32
    places: Array = np.r_[0 : bound + 1, -bound:0].astype(dtype)
    made = {source: g.constant(places, "distances")}
    for node in function.nodes:
        value = node.output[0]
        if nd.is_op(node, *_VIEWS):
            made[value] = made[node.input[0]]
            continue
        inputs = [made.get(name) or _scalar(g, name) for name in node.input]
        made[value] = g.add(node.op_type, inputs, 1, nd.attrs(node), at=root).output[0]
        g.learn_type(made[value], TensorType(g.dtype(value), places.shape))
    if (source, bound) not in clipped:
        limits = [g.constant(np.array(end, dtype), "limit") for end in (-bound, bound)]
        clipped[source, bound] = g.op("Clip", source, *limits, at=root)
        g.learn_type(clipped[source, bound], known)
    found = g.op("Gather", made[root.output[0]], clipped[source, bound], at=root, axis=0)
    g.learn_type(found, TensorType(g.dtype(root.output[0]), known.shape))
    extra = (g.rank(root.output[0]) or 0) - len(known.shape)
    if extra > 0:
        found = unsqueeze(g, found, range(extra), at=root)
    g.replace(root.output[0], found)
    g.prune(root)


def _scalar(g: Graph, name: str) -> str:
    """A constant of one element, without axes: tables have one."""
    stored = g.const(name) if name else None
    return name if stored is None or not stored.ndim else g.constant(stored.reshape(()), name)
