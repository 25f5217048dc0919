"""Channels-last regions of a graph: selection and rewriting.

A matrix product reads and writes images as [N, H, W, C], a convolution as [N, C, H, W]. Elementwise
operators and Concat between them work in either layout. A minimum cut selects all their layouts at
once and transposes the fewest elements: matrix products are on one side, operators with a fixed
layout on the other (see `search.min_cut`).

A value produced in one layout and used in the other gets one Transpose. Right after a convolution,
onnxruntime merges it into a layout change of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.search.min_cut import FLOAT_END, Item, Value, best_regions
from toolkit.ir import Graph, node as nd

_UNARY = (
    *("Sigmoid", "Tanh", "Relu", "LeakyRelu", "Elu", "HardSigmoid", "HardSwish", "Softplus"),
    *("Gelu", "Swish", "Mish", "Clip", "com.microsoft::QuickGelu", "com.microsoft::Gelu"),
)
"""Unary elementwise operators."""
_VARIADIC = ("Add", "Sub", "Mul", "Div", "Sum", "Max", "Min")
_LEAST_RANK = 3
_FORCED = 1e9
"""The gain of a matrix product, above all costs."""
_PER_ELEMENT = 1e-3
"""The cost of transposing one element."""
_TIE_BREAK = 1e-3
"""The cost of an operator in channels-first layout. It breaks ties in favor of the earliest cut,
whose Transpose is right after the convolution."""


def channels_last_nodes(g: Graph, products: Container[int]) -> set[int]:
    """Return the ids of the layout-agnostic nodes to compute channels last.

    `products` holds the ids of the matrix products.
    """
    nodes = list(g.nodes)
    free = layout_agnostic(g)
    items: list[Item] = []
    for node in nodes:
        if id(node) in products:
            items.append(Item(_FORCED, 0.0))
        else:
            items.append(Item(_TIE_BREAK, 0.0) if id(node) in free else Item(0.0))
    chosen = best_regions(items, transposable_values(g, lambda name: _size(g, name)))
    return {id(nodes[at]) for at in chosen if id(nodes[at]) not in products}


def layout_agnostic(g: Graph) -> set[int]:
    """Return the ids of the nodes that can compute in either layout."""
    return {id(n) for n in g.nodes if _is_transpose_to_last(g, n) or _is_layout_agnostic(g, n)}


def transposable_values(g: Graph, cost: Callable[[str], float]) -> Iterator[Value]:
    """Yield the values between nodes with the cost of transposing each.

    A Transpose to channels last is a boundary: its result is used as it is, and its operand is
    transposed by the node itself unless it is channels last already.
    """
    number = {id(node): at for at, node in enumerate(g.nodes)}
    for name in (*g.feeds, *(name for node in g.nodes for name in nd.outputs_of(node))):
        producer = g.producer(name)
        if producer is not None and _is_transpose_to_last(g, producer):
            continue
        users = [number.get(id(user), FLOAT_END) for user in g.users(name)]
        if g.is_output(name) or g.is_captured(name):
            users.append(FLOAT_END)
        if users:
            at = FLOAT_END if producer is None else number[id(producer)]
            yield Value(at, tuple(users), cost(name), cost(name))


class ChannelsLast:
    """Channels-last copies of values, created on demand."""

    def __init__(self, g: Graph) -> None:
        self._g = g
        names = {name for node in g.nodes for name in (*nd.inputs_of(node), *nd.outputs_of(node))}
        shapes = {name: g.shape(name) for name in names}
        self._ranks = {name: len(shape) for name, shape in shapes.items() if shape is not None}
        self._channels = {name: s[1] for name, s in shapes.items() if s is not None and len(s) > 1}
        self._last: dict[str, str] = {}
        self._back: list[NodeProto] = []

    def of(self, value: str, rank: int) -> str:
        """Return the channels-last copy of a value."""
        if value not in self._last:
            self._last[value] = self._g.op("Transpose", value, perm=_to_last(rank))
        return self._last[value]

    def put(self, value: str, made: str, rank: int) -> None:
        """Define `value`, left without a producer, as a Transpose of channels-last `made`."""
        perm = [0, rank - 1, *range(1, rank - 1)]
        self._back.append(self._g.add("Transpose", [made], [value], {"perm": perm}))
        self._last[value] = made

    def move(self, node: NodeProto) -> None:
        """Rewrite a node to compute channels last."""
        g, result = self._g, node.output[0]
        if not g.begin("channels-last", node):
            return
        x = node.input[0]
        if _is_transpose_to_last(g, node):
            self._last[x] = g.replace(result, self.of(x, self._ranks[x]))
            g.prune(node)
            return
        rank = self._ranks[result]
        if nd.is_op(node, "Reshape"):
            shape = np.array([0, -1, self._channels[x]], np.int64)
            inputs = [self.of(x, self._ranks[x]), g.constant(shape, "shape")]
        else:
            inputs = [n if _has_no_layout(g, n) else self.of(n, self._ranks[n]) for n in node.input]
        if nd.is_op(node, "Concat"):
            axis = nd.attr(node, "axis", 0) % rank
            g.set_attr(node, "axis", axis if axis == 0 else (axis - 2) % (rank - 1) + 1)
        made = g.fresh(result)
        g.set_inputs(node, inputs)
        g.set_outputs(node, [made])
        self.put(result, made, rank)

    def sweep(self) -> None:
        """Remove unused Transposes back to channels first."""
        for node in self._back:
            if node in self._g and self._g.is_unused(node.output[0]):
                self._g.prune(node)


def _to_last(rank: int) -> list[int]:
    return [0, *range(2, rank), 1]


def _is_layout_agnostic(g: Graph, node: NodeProto) -> bool:
    shapes = [g.shape(name) for name in node.input if not _has_no_layout(g, name)]
    result = g.shape(node.output[0])
    if len(nd.outputs_of(node)) != 1 or result is None or len(result) < _LEAST_RANK:
        return False
    if nd.is_op(node, "Reshape"):
        return shapes[:1] != [None] and _flattens(shapes[0] or (), result, node)
    if any(g.is_const(name) and not _has_no_layout(g, name) for name in node.input):
        return False
    if nd.qualified(node) in _UNARY:
        return len(shapes) == 1
    if nd.is_op(node, *_VARIADIC):
        return all(shape == result for shape in shapes)
    return nd.is_op(node, "Concat") and all(s and len(s) == len(result) for s in shapes)


def _has_no_layout(g: Graph, name: str) -> bool:
    """Whether an operand is absent or a scalar."""
    known = g.const(name) if name else None
    return not name or (known is not None and known.size == 1)


def _flattens(before: tuple[object, ...], after: tuple[object, ...], node: NodeProto) -> bool:
    """Whether a Reshape turns [N, C, H, W] into [N, C, H W]."""
    known = len(before) > _LEAST_RANK == len(after) and isinstance(before[1], int)
    return known and before[:2] == after[:2] and not nd.attr(node, "allowzero", 0)


def _is_transpose_to_last(g: Graph, node: NodeProto) -> bool:
    """Whether a node is a Transpose to channels last."""
    rank = g.rank(node.input[0]) if given(node, 0) else None
    if not nd.is_op(node, "Transpose") or rank is None or rank < _LEAST_RANK:
        return False
    return list(nd.attr(node, "perm", ())) == _to_last(rank)


def _size(g: Graph, name: str) -> float:
    """Return the cost of transposing a value; unknown dimensions count as 1."""
    sizes = [size for size in g.shape(name) or () if isinstance(size, int)]
    return 1.0 + _PER_ELEMENT * math.prod(sizes)
