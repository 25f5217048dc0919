"""Rotary position embeddings: pairs of elements turned by an angle that grows with the position.

    y = x * cos + rotate(x) * sin

`rotate` pairs the first half of a head with the second (llama, neox: concat(-x2, x1)), or each
element with its neighbour (gptj: interleaved). `cos` and `sin` hold every angle twice then. Only
the first elements of a head may be turned (partial embeddings).

Or the two elements of each pair are turned on their own, with every angle once, and then joined:

    y1 = x1 * cos - x2 * sin        y2 = x2 * cos + x1 * sin
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onnx import NodeProto

from passes.analysis.operands import reshape
from passes.fuse.attention.head_norms import norm_before_move
from passes.fuse.attention.packed_qkv import packed_heads
from passes.fuse.rotary.last_axis_elements import (
    Piece,
    column_of,
    is_last_axis,
    last_size,
    piece_of,
    piece_within,
)
from passes.fuse.rotary.rotation import TYPES, Turn
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import Shape, TensorType
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import Miss
from toolkit.rewriting.rule import apply_rules, rewrite
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

x = var("x", rank=4, dtype=TYPES)
_turned = op.Add(op.Mul(x, var("cos")), op.Mul(var("rotated"), var("sin")))


def turns_pairs(g: Graph, x: str, rotated: str) -> bool:
    """Whether `rotated` is x with the elements of each pair changed, and one of them negated."""
    return _is_interleaved(g, x, rotated) is not None


@rewrite(_turned, opset=23, when=turns_pairs)
def rotary(g: Graph, x: str, cos: str, rotated: str, sin: str, node: NodeProto) -> str:
    """x * cos + rotate(x) * sin"""
    turn = Turn.of(g, x, cos, sin, bool(_is_interleaved(g, x, rotated)))
    piece = piece_of(g, x)
    if piece is not None and any(nd.is_op(u, "Concat") for u in g.users(node.output[0])):
        raise Miss(f"only a piece of '{piece.source}' is turned: as a whole it is `partial-rotary`")
    return turn.write(x, node)


@rewrite(op.Concat(_turned, var("rest")), opset=23, when=turns_pairs)
def partial_rotary(
    g: Graph, x: str, cos: str, rotated: str, sin: str, rest: str, node: NodeProto
) -> str:
    """concat(x[:r] * cos + rotate(x[:r]) * sin, x[r:])"""
    if not is_last_axis(g, node, 0):
        raise Miss(f"{nd.label(node)} does not join along the last axis")
    first, second = piece_of(g, x), piece_of(g, rest)
    if first is None or second is None or first.source != second.source:
        raise Miss("what is turned and what is not are no pieces of one value")
    if (first.start, first.step, second.step) != (0, 1, 1) or first.stop != second.start:
        raise Miss(f"the pieces of '{first.source}' do not follow each other")
    if second.stop != last_size(g, first.source):
        raise Miss(f"a part of '{first.source}' is left out")
    return Turn.of(g, x, cos, sin, bool(_is_interleaved(g, x, rotated))).write(first.source, node)


_first, _second, _cos, _sin = var("first"), var("second"), var("cos"), var("sin")
_turned_first = op.Sub(op.Mul(_first, _cos), op.Mul(_second, _sin))
_turned_second = op.Add(op.Mul(_second, _cos), op.Mul(_first, _sin))


@rewrite(op.Concat(_turned_first, _turned_second), opset=23)
def rotary_by_halves(g: Graph, first: str, second: str, cos: str, sin: str, node: NodeProto) -> str:
    """concat(x1 * cos - x2 * sin, x2 * cos + x1 * sin), the halves x1 and x2 of each head"""
    pieces, size = (piece_of(g, first), piece_of(g, second)), last_size(g, node.output[0])
    if size is None or not is_last_axis(g, node, 0):
        raise Miss(f"{nd.label(node)} does not join along the last axis")
    source = pieces[0].source if pieces[0] is not None else ""
    if pieces != (Piece(source, 0, size // 2), Piece(source, size // 2, size)):
        raise Miss("what is turned are not the halves of each head")
    if last_size(g, source) != size:
        raise Miss(f"a part of '{source}' is left out")
    return Turn.of_pairs(g, source, cos, sin, interleaved=False).write(source, node)


_column = op.any("Unsqueeze", "Reshape")


@rewrite(op.Concat(_column(_turned_first, ...), _column(_turned_second, ...)), opset=23)
def rotary_by_neighbours(
    g: Graph, first: str, second: str, cos: str, sin: str, node: NodeProto
) -> str:
    """stack(x1 * cos - x2 * sin, x2 * cos + x1 * sin), x1 and x2 next to each other"""
    half, count = g.shape(first), last_size(g, first)
    if half is None or count is None or g.shape(node.output[0]) != (*half, 2):
        raise Miss(f"{nd.label(node)} does not join neighbours")
    whole = _joined_columns(g, first, second, (*half[:-1], 2 * count), node)
    result = Turn.of_pairs(g, whole, cos, sin, interleaved=True).write(whole, node)
    return reshape(g, result, (*(0,) * (len(half) - 1), count, 2), at=node)


def _joined_columns(g: Graph, first: str, second: str, shape: Shape, node: NodeProto) -> str:
    """What x[..., ::2] and x[..., 1::2] are made of, in this shape."""
    size = 2 * (last_size(g, first) or 0)
    cut = piece_of(g, first)
    if cut is not None and g.shape(cut.source) == shape:
        ends = Piece(cut.source, 0, size, 2), Piece(cut.source, 1, size, 2)
        if (cut, piece_of(g, second)) == ends:
            return cut.source
    column = column_of(g, first)
    source = column.source if column is not None else ""
    if (column, column_of(g, second)) != (Piece(source, 0, 2, 2), Piece(source, 1, 2, 2)):
        raise Miss("what is turned are not neighbours")
    whole = reshape(g, source, (*(0,) * (len(shape) - 1), size), at=node)
    g.learn_type(whole, TensorType(g.dtype(source), shape))
    return whole


# -- rotate(x)


def _is_interleaved(g: Graph, x: str, rotated: str) -> bool | None:
    """How the elements are paired; None when `rotated` is not x with its pairs turned."""
    node, size = g.producer(rotated), last_size(g, x)
    if node is None or size is None:
        return None
    if nd.is_op(node, "Concat"):
        half = size // 2
        return False if _is_pair(g, node, x, (half, size, 1), (0, half, 1)) else None
    inner = g.producer(node.input[0]) if nd.is_op(node, "Reshape") else None
    if inner is None or not nd.is_op(inner, "Concat") or last_size(g, node.input[0]) != 2:
        return None
    if g.shape(rotated) != g.shape(x):
        return None
    return True if _is_pair(g, inner, x, (1, size, 2), (0, size, 2)) else None


def _is_pair(
    g: Graph, node: NodeProto, x: str, first: tuple[int, ...], second: tuple[int, ...]
) -> bool:
    """Whether a Concat along the last axis joins minus one piece of x and another."""
    if len(node.input) != 2 or not is_last_axis(g, node, 0):
        return False
    found: list[tuple[bool, tuple[int, ...]]] = []
    for value in node.input:
        negated, piece = _signed_piece(g, value, x)
        if piece is None:
            return False
        found.append((negated, (piece.start, piece.stop, piece.step)))
    return found == [(True, first), (False, second)]


def _signed_piece(g: Graph, value: str, x: str) -> tuple[bool, Piece | None]:
    """A piece of x, perhaps negated, perhaps with an axis of size 1 behind."""
    negated = False
    for _ in range(3):
        piece = piece_within(g, value, x)
        node = g.producer(value)
        if piece is not None or node is None:
            return negated, piece
        if nd.is_op(node, "Neg"):
            negated = not negated
        elif not (nd.is_op(node, "Unsqueeze", "Reshape") and last_size(g, value) == 1):
            return negated, None
        value = node.input[0]
    return negated, None


RULES = (
    packed_heads,  # this and the next let it read tokens
    norm_before_move,
    rotary,
    partial_rotary,
    rotary_by_halves,
    rotary_by_neighbours,
)


@dataclass(frozen=True, slots=True)
class FuseRotary:
    """Find rotary position embeddings, and write each as one operator."""

    name: ClassVar[str] = "fuse-rotary"
    tolerance: ClassVar[Tolerance] = FLOAT

    def run(self, model: Model, ctx: Context) -> None:
        apply_rules(model, RULES, ctx)
