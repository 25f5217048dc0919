"""Stretches of the last axis: x[..., start:stop:step], cut by a Slice or a Split."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from passes.operands import int_operand
from toolkit import nodes as nd
from toolkit.graph import Graph


@dataclass(frozen=True, slots=True)
class Piece:
    """x[..., start:stop:step], with bounds as numbers from the front."""

    source: str
    start: int
    stop: int
    step: int = 1


def last_size(g: Graph, value: str) -> int | None:
    """The size of the last axis, if it is known."""
    shape = g.shape(value)
    return shape[-1] if shape and isinstance(shape[-1], int) else None


def is_last_axis(g: Graph, node: NodeProto, default: int) -> bool:
    """Whether the attribute `axis` is the last axis of what the node makes."""
    axis, rank = nd.attr(node, "axis", default), g.rank(node.output[0])
    return axis == -1 or (rank is not None and axis == rank - 1)


def piece_of(g: Graph, value: str) -> Piece | None:
    """What `value` was cut from, and where."""
    node = g.producer(value)
    if node is None:
        return None
    if nd.is_op(node, "Slice"):
        return _sliced(g, node)
    if nd.is_op(node, "Split") and is_last_axis(g, node, 0):
        sizes = [last_size(g, name) for name in node.output]
        index = list(node.output).index(value)
        before = [size for size in sizes[: index + 1] if size is not None]
        if len(before) == index + 1:
            return Piece(node.input[0], sum(before[:-1]), sum(before))
    return None


def _sliced(g: Graph, node: NodeProto) -> Piece | None:
    size, rank = last_size(g, node.input[0]), g.rank(node.input[0])
    starts, ends = int_operand(g, node, "starts", 1), int_operand(g, node, "ends", 2)
    axes = int_operand(g, node, "axes", 3, absent=[0])
    steps = int_operand(g, node, "steps", 4, absent=[1])
    if size is None or rank is None or starts is None or ends is None:
        return None
    if axes not in ([-1], [rank - 1]) or steps is None or len(steps) != 1 or steps[0] < 1:
        return None
    start, stop, step = slice(starts[0], ends[0], steps[0]).indices(size)
    return Piece(node.input[0], start, max(start, stop), step)
