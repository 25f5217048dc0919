"""Fuse rotary position embeddings: pairs of elements rotated by an angle per position.

    y = x * cos + rotate(x) * sin

`rotate` pairs the first half of a head with the second (Llama, NeoX: concat(-x2, x1)), or each
element with its neighbour (GPT-J: interleaved). `cos` and `sin` then hold every angle twice.
Partial embeddings only rotate the first elements of a head.

Or the elements of each pair are computed separately, with each angle once, and concatenated:

    y1 = x1 * cos - x2 * sin        y2 = x2 * cos + x1 * sin
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import reshape
from passes.fuse.attention.head_norms import norm_before_move
from passes.fuse.attention.packed_qkv import packed_heads
from passes.fuse.rotary.last_axis_elements import elements_of, last_size, source_of
from passes.fuse.rotary.rotation import TYPES, Rotation
from toolkit.ir import Graph, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.rule import MatchFailure, RulePass, rewrite

x = var("x", rank=4, dtype=TYPES)
_rotation = op.Add(op.Mul(x, var("cos")), op.Mul(var("rotated"), var("sin")))


def rotates_pairs(g: Graph, x: str, rotated: str) -> bool:
    """Return whether `rotated` is x with each pair (a, b) of elements replaced by (-b, a)."""
    return _is_interleaved(g, x, rotated) is not None


def _is_interleaved(g: Graph, x: str, rotated: str) -> bool | None:
    """Return whether neighbours are paired, or else halves; None for other values."""
    size, found = last_size(g, x) or 0, elements_of(g, rotated, x)
    half = size // 2
    if found == [*range(-half - 1, -size - 1, -1), *range(1, half + 1)]:
        return False
    return True if found == [n for k in range(1, size, 2) for n in (-k - 1, k)] else None


@rewrite(_rotation, opset=23, when=rotates_pairs)
def rotary(g: Graph, x: str, cos: str, rotated: str, sin: str, node: NodeProto) -> str:
    """x * cos + rotate(x) * sin"""
    producer = g.producer(x)
    if nd.is_op(producer, "Slice", "Split") and producer is not None:
        is_part = elements_of(g, x, producer.input[0]) is not None
        if is_part and any(nd.is_op(user, "Concat") for user in g.users(node.output[0])):
            raise MatchFailure(f"only a part of '{producer.input[0]}' is rotated: `partial-rotary`")
    interleaved = bool(_is_interleaved(g, x, rotated))
    return Rotation.of(g, x, cos, sin, interleaved).write(x, node)


@rewrite(op.Concat(_rotation, var("rest")), opset=23, when=rotates_pairs)
def partial_rotary(
    g: Graph, x: str, cos: str, rotated: str, sin: str, rest: str, node: NodeProto
) -> str:
    """concat(x[:r] * cos + rotate(x[:r]) * sin, x[r:])"""
    _require_last_axis(g, node)
    count, size = last_size(g, x) or 0, last_size(g, node.output[0]) or 0
    parts = {x: list(range(1, count + 1)), rest: list(range(count + 1, size + 1))}
    source = source_of(g, parts)
    if source is None or g.rank(source) != 4:
        raise MatchFailure("the two parts are not the first and last elements of one value")
    interleaved = bool(_is_interleaved(g, x, rotated))
    return Rotation.of(g, x, cos, sin, interleaved).write(source, node)


_first, _second, _cos, _sin = var("first"), var("second"), var("cos"), var("sin")
_rotated_first = op.Sub(op.Mul(_first, _cos), op.Mul(_second, _sin))
_rotated_second = op.Add(op.Mul(_second, _cos), op.Mul(_first, _sin))


@rewrite(op.Concat(_rotated_first, _rotated_second), opset=23)
def rotary_by_halves(g: Graph, first: str, second: str, cos: str, sin: str, node: NodeProto) -> str:
    """concat(x1 * cos - x2 * sin, x2 * cos + x1 * sin) for the halves x1 and x2 of each head"""
    _require_last_axis(g, node)
    half = last_size(g, first) or 0
    parts = {first: list(range(1, half + 1)), second: list(range(half + 1, 2 * half + 1))}
    return _rotated(g, parts, cos, sin, False, node)


_column = op.any("Unsqueeze", "Reshape")


@rewrite(op.Concat(_column(_rotated_first, ...), _column(_rotated_second, ...)), opset=23)
def rotary_by_neighbours(
    g: Graph, first: str, second: str, cos: str, sin: str, node: NodeProto
) -> str:
    """stack(x1 * cos - x2 * sin, x2 * cos + x1 * sin) for neighbours x1 and x2"""
    half, count = g.shape(first), last_size(g, first)
    if half is None or count is None or g.shape(node.output[0]) != (*half, 2):
        raise MatchFailure(f"{nd.label(node)} does not join neighbours")
    parts = {first: list(range(1, 2 * count, 2)), second: list(range(2, 2 * count + 1, 2))}
    result = _rotated(g, parts, cos, sin, True, node)
    return reshape(g, result, (*(0,) * (len(half) - 1), count, 2), at=node)


def _rotated(
    g: Graph, parts: dict[str, list[int]], cos: str, sin: str, interleaved: bool, node: NodeProto
) -> str:
    """Write the rotation of the value that `parts` are taken from."""
    source = source_of(g, parts) if len(parts) == 2 else None
    if source is None:
        raise MatchFailure("the rotated values are not the pairs of each head")
    if g.dtype(source) not in TYPES:
        raise MatchFailure("RotaryEmbedding has no kernel for this element type")
    if g.rank(source) != 4:
        source = reshape(g, source, (0, 0, 0, sum(map(len, parts.values()))), at=node)
    return Rotation.of(g, source, cos, sin, interleaved, per_pair=True).write(source, node)


def _require_last_axis(g: Graph, node: NodeProto) -> None:
    rank = g.rank(node.output[0])
    if rank is None or positive_axes([nd.attr(node, "axis", 0)], rank) != [rank - 1]:
        raise MatchFailure(f"{nd.label(node)} does not join along the last axis")


RULES = (
    packed_heads,  # this rule and the next let RotaryEmbedding use tokens
    norm_before_move,
    rotary,
    partial_rotary,
    rotary_by_halves,
    rotary_by_neighbours,
)


class FuseRotary(RulePass):
    """Fuse rotary position embeddings into RotaryEmbedding."""

    name = "fuse-rotary"
    rules = RULES
