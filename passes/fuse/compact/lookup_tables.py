"""Replace functions of one integer with a lookup table, if they are constant beyond some bound.

    f(d) = Gather(table, Clip(d, -n, n))

T5, MPNet and DeBERTa sort distances into buckets: exact small ones, logarithmic larger ones, and
one bucket beyond some distance. A table with one entry per distance replaces twenty operators on
[length, length]. Interval arithmetic proves that f is constant beyond n. The table holds f at
0 ... n, -n ... -1 (negative indices count from the end), computed by `fold`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.intervals import (
    ELEMENTWISE_BOUNDED,
    Interval,
    bounds_of,
    rounded_to,
    transfer_function,
)
from passes.analysis.operands import unsqueeze
from passes.fuse.typed_op import typed_op
from toolkit.ir import Array, Graph, Shape, TensorType, node as nd
from toolkit.ir.op_traits import VIEWS

_INTEGERS = (TensorProto.INT64, TensorProto.INT32)
_MIN_NODES = 4
_MAX_NODES = 48
_BOUNDS = tuple(1 << bits for bits in range(4, 16))
"""Candidates for n; a table has twice as many entries."""

_MAX_DISTANCE = 1 << 40
"""Upper bound of the distance between two elements of a tensor."""

_VIEWS = (*VIEWS, "Identity")


@dataclass(frozen=True, slots=True, eq=False)
class IntegerFunction:
    """The nodes, in graph order, that compute `root` from `source`; constant beyond `bound`."""

    source: str
    nodes: tuple[NodeProto, ...]
    root: NodeProto
    bound: int


def functions(g: Graph) -> list[IntegerFunction]:
    """Return all such functions that are not part of another one."""
    order = {id(node): index for index, node in enumerate(g.nodes)}
    found: list[IntegerFunction] = []
    inside: set[int] = set()
    for node in reversed(g.nodes):
        if id(node) in inside or g.dtype(node.output[0]) not in _INTEGERS:
            continue
        function = _function(g, node, order)
        if function is not None:
            inside.update(map(id, function.nodes))
            found.append(function)
    return found[::-1]


def _function(g: Graph, root: NodeProto, order: dict[int, int]) -> IntegerFunction | None:
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
        if len(sources) > 1 or len(nodes) > _MAX_NODES:
            return None
    if len(nodes) < _MIN_NODES or len(sources) != 1:
        return None
    [source] = sources
    if g.dtype(source) not in _INTEGERS or g.is_const(source):
        return None
    listed = tuple(sorted(nodes.values(), key=lambda node: order[id(node)]))
    for bound in _BOUNDS:
        if all(_is_constant(g, source, listed, ends) for ends in _tails(bound, g.dtype(source))):
            return IntegerFunction(source, listed, root, bound)
    return None


def _operands(g: Graph, node: NodeProto) -> list[str]:
    """Return the variable operands; of a view, the first."""
    inputs = node.input[:1] if nd.is_op(node, *_VIEWS) else nd.inputs_of(node)
    return [name for name in inputs if not g.is_const(name)]


def _is_inside(g: Graph, node: NodeProto) -> bool:
    """Return whether a node is elementwise on operands of one shape, up to leading sizes of 1."""
    if not nd.is_op(node, *ELEMENTWISE_BOUNDED, *_VIEWS):
        return False
    shape = _trimmed(g.shape(node.output[0]))
    operands = _operands(g, node)
    if shape is None or not operands or any(_trimmed(g.shape(v)) != shape for v in operands):
        return False
    stored = [] if nd.is_op(node, *_VIEWS) else [g.const(v) for v in nd.inputs_of(node)]
    return all(array is None or array.size == 1 for array in stored)


def _trimmed(shape: Shape | None) -> Shape | None:
    if shape is None:
        return None
    return tuple(itertools.dropwhile(lambda size: size == 1, shape))


# -- intervals


def _tails(bound: int, dtype: int) -> tuple[Interval, Interval]:
    largest = min(_MAX_DISTANCE, np.iinfo(helper.tensor_dtype_to_np_dtype(dtype)).max)
    return Interval(bound, largest), Interval(-largest, -bound)


def _is_constant(g: Graph, source: str, nodes: Sequence[NodeProto], ends: Interval) -> bool:
    known = {source: ends}
    for node in nodes:
        interval = _interval(g, node, known)
        if interval is None or interval.may_be_nan:
            return False
        known[node.output[0]] = interval
    return known[nodes[-1].output[0]].number is not None


def _interval(g: Graph, node: NodeProto, known: dict[str, Interval]) -> Interval | None:
    if nd.is_op(node, *_VIEWS):
        return known[node.input[0]]
    dtype = g.dtype(node.output[0])
    function = transfer_function(node, dtype)
    operands = [known.get(name) or _number(g.const(name)) for name in nd.inputs_of(node)]
    ends = [operand for operand in operands if operand is not None and not operand.may_be_nan]
    if function is None or len(ends) < len(operands):
        return None
    return rounded_to(function(*ends), dtype)


def _number(stored: Array | None) -> Interval | None:
    return None if stored is None else bounds_of(stored)


# -- writing


def write(g: Graph, function: IntegerFunction, clipped: dict[tuple[str, int], str]) -> None:
    """Replace a function with a lookup; the table is left to be folded.

    `clipped` holds the clipped distances written so far, by source and bound.
    """
    source, root, bound = function.source, function.root, function.bound
    known = g.type(source)
    assert known is not None
    assert known.shape is not None
    dtype = np.int64 if known.dtype == TensorProto.INT64 else np.int32
    distances: Array = np.r_[0 : bound + 1, -bound:0].astype(dtype)
    made = {source: g.constant(distances, "distances")}
    for node in function.nodes:
        value = node.output[0]
        if nd.is_op(node, *_VIEWS):
            made[value] = made[node.input[0]]
            continue
        inputs = [made.get(name) or _scalar(g, name) for name in node.input]
        type_of_table = TensorType(g.dtype(value), distances.shape)
        made[value] = typed_op(g, type_of_table, node.op_type, *inputs, at=root, **nd.attrs(node))
    if (source, bound) not in clipped:
        limits = [g.constant(np.array(end, dtype), "limit") for end in (-bound, bound)]
        clipped[source, bound] = typed_op(g, known, "Clip", source, *limits, at=root)
    operands = made[root.output[0]], clipped[source, bound]
    result = TensorType(g.dtype(root.output[0]), known.shape)
    found = typed_op(g, result, "Gather", *operands, at=root, axis=0)
    extra = (g.rank(root.output[0]) or 0) - len(known.shape)
    if extra > 0:
        found = unsqueeze(g, found, range(extra), at=root)
    g.replace(root.output[0], found)
    g.prune(root)


def _scalar(g: Graph, name: str) -> str:
    """Return a constant of one element as a scalar, to be broadcast to a table."""
    stored = g.const(name) if name else None
    return name if stored is None or not stored.ndim else g.constant(stored.reshape(()), name)
