"""Stretches of the last axis: x[..., start:stop:step], cut by a Slice or a Split.

Every k-th element is also the i-th column of pairs or larger groups:

    x.reshape(..., n, k)[..., i] = x[..., i::k]
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from passes.analysis.operands import int_operand, ints
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph

_LONGEST_CHAIN = 8


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


def piece_within(g: Graph, value: str, whole: str) -> Piece | None:
    """The stretch of `whole` that `value` is."""
    piece = piece_of(g, value)
    if piece is not None and piece.source == whole:
        return piece
    column = column_of(g, value)
    size, shape = last_size(g, whole), g.shape(whole)
    if column is None or size is None or shape is None:
        return None
    groups, count = g.shape(column.source), column.step
    if groups != (*shape[:-1], size // count, count) or _unviewed(g, column.source) != _unviewed(
        g, whole
    ):
        return None
    return Piece(whole, column.start, size, count)


def column_of(g: Graph, value: str) -> Piece | None:
    """The column x[..., i] that `value` is, also with an axis of size 1 behind; `step` is how many
    there are."""
    node = g.producer(value)
    if node is None:
        return None
    if nd.is_op(node, "Gather"):
        index, count = ints(g, node.input[1]), last_size(g, node.input[0])
        rank = g.rank(node.input[0])
        if index is None or len(index) != 1 or count is None or rank is None:
            return None
        if nd.attr(node, "axis", 0) not in (-1, rank - 1):
            return None
        return Piece(node.input[0], index[0] % count, count, count)
    if nd.is_op(node, "Squeeze", "Reshape") and last_size(g, node.input[0]) == 1:
        before, after = g.shape(node.input[0]), g.shape(value)
        if before is None or before[:-1] != after:
            return None
        value = node.input[0]
    piece = piece_of(g, value)
    count = None if piece is None else last_size(g, piece.source)
    if piece is None or count is None or piece.stop - piece.start != 1:
        return None
    return Piece(piece.source, piece.start, count, count)


def _unviewed(g: Graph, value: str) -> str:
    """What `value` has all elements of, in the same order."""
    for _ in range(_LONGEST_CHAIN):
        node = g.producer(value)
        if node is None or not nd.is_op(node, "Reshape", "Squeeze", "Unsqueeze", "Flatten"):
            break
        value = node.input[0]
    return value


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
