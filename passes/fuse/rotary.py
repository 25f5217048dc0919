"""Rotary position embeddings: pairs of elements turned by an angle that grows with the position.

    y = x * cos + rotate(x) * sin

`rotate` pairs the first half of a head with the second (llama, neox: concat(-x2, x1)), or each
element with its neighbour (gptj: interleaved). Then `cos` and `sin` hold every angle twice, which
is shown before they are cut down to the form that the standard's RotaryEmbedding (opset 23) takes:
[batch, sequence, angles]. Only the first elements of a head may be turned (partial embeddings).

Or the two elements of each pair are turned on their own, with every angle once, and then joined:

    y1 = x1 * cos - x2 * sin        y2 = x2 * cos + x1 * sin
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.fuse.factors import Trace, leaves, size_of
from passes.fuse.head_norms import norm_before_move
from passes.fuse.heads import Operand, heads_apart
from passes.fuse.packed import packed_heads
from passes.fuse.pieces import (
    Piece,
    column_of,
    is_last_axis,
    last_size,
    piece_of,
    piece_within,
)
from passes.indices import size_in_inputs
from passes.operands import given, int_vector, reshape, squeeze, unsqueeze
from toolkit import nodes as nd
from toolkit.graph import Array, Graph
from toolkit.misses import Miss
from toolkit.model import Model
from toolkit.pattern import op, var
from toolkit.rules import apply_rules, rewrite
from toolkit.symbolic import Dim, Expr, minimum, substitute
from toolkit.tolerance import FLOAT, Tolerance
from toolkit.types import Shape, TensorType

if TYPE_CHECKING:
    from toolkit.context import Context

_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
_LONGEST_CHAIN = 12
_FAR = 1 << 40

x = var("x", rank=4, dtype=_TYPES)
_turned = op.Add(op.Mul(x, var("cos")), op.Mul(var("rotated"), var("sin")))


def turns_pairs(g: Graph, x: str, rotated: str) -> bool:
    """Whether `rotated` is x with the elements of each pair changed, and one of them negated."""
    return _is_interleaved(g, x, rotated) is not None


@rewrite(_turned, opset=23, when=turns_pairs)
def rotary(g: Graph, x: str, cos: str, rotated: str, sin: str, node: NodeProto) -> str:
    """x * cos + rotate(x) * sin"""
    turn = Turn.of(g, x, cos, rotated, sin)
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
    return Turn.of(g, x, cos, rotated, sin).write(first.source, node)


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


@dataclass(frozen=True, slots=True)
class Turn:
    """How a value [batch, heads, sequence, size], or with heads and sequence changed, is turned."""

    g: Graph
    cos: str
    sin: str
    interleaved: bool
    heads: int
    """Which axis has the heads: 1 or 2."""
    size: int
    """How many elements of a head are turned."""

    @classmethod
    def of(cls, g: Graph, x: str, cos: str, rotated: str, sin: str) -> Turn:
        size, shape = last_size(g, x), g.shape(x)
        if size is None or shape is None or size % 2:
            raise Miss(f"the heads of '{x}' have no even size")
        interleaved = bool(_is_interleaved(g, x, rotated))
        for angles in (cos, sin):
            if not _is_doubled(g, angles, interleaved):
                raise Miss(f"'{angles}' may have more than one angle for a pair")
        return cls(g, cos, sin, interleaved, _heads_axis(g, cos, sin, shape), size)

    @classmethod
    def of_pairs(cls, g: Graph, x: str, cos: str, sin: str, interleaved: bool) -> Turn:
        """All elements of x, by angles of which there is one for each pair."""
        size, shape = last_size(g, x), g.shape(x)
        if size is None or shape is None or len(shape) != 4 or g.dtype(x) not in _TYPES:
            raise Miss(f"'{x}' is not [batch, heads, sequence, size]")
        halved = (*shape[:-1], size // 2)
        return cls(g, cos, sin, interleaved, _heads_axis(g, cos, sin, halved), size)

    def write(self, x: str, node: NodeProto) -> str:
        """The operator on `x`, of which the first elements of each head are turned."""
        g = self.g
        shape, whole = g.shape(x), last_size(g, x)
        if shape is None or whole is None:
            raise Miss(f"the shape of '{x}' is not known")
        attributes: dict[str, Any] = {}
        if self.interleaved:
            attributes["interleaved"] = 1
        if whole != self.size:
            attributes["rotary_embedding_dim"] = self.size
        batch = shape[0]
        angles = [self._angles(name, x, batch, node) for name in (self.cos, self.sin)]
        operand = Operand(g, x, sequence=-2 if self.heads == 1 else -3)
        form = operand.tokens()
        if form is None or form.batch != batch or form.heads != shape[self.heads]:
            if self.heads != 1:
                raise Miss(f"the heads of '{x}' cannot be joined")
            return g.op("RotaryEmbedding", x, *angles, at=node, **attributes)
        tokens = operand.write(form, node)
        result = g.op(
            "RotaryEmbedding", tokens, *angles, at=node, num_heads=form.heads, **attributes
        )
        dtype = g.dtype(x)
        g.learn_type(result, TensorType(dtype, (batch, form.sequence, form.heads * whole)))
        if self.heads == 1:
            result = heads_apart(g, result, form.heads, whole, node)
        else:
            result = reshape(g, result, (0, 0, form.heads, whole), at=node)
        return self._rescaled(result, x, form.source.scale, node)

    def _rescaled(self, result: str, x: str, scale: float, node: NodeProto) -> str:
        """A factor of the tokens, behind the turn: there attention takes it into its scale."""
        g = self.g
        if scale == 1.0:
            return result
        kind = helper.tensor_dtype_to_np_dtype(g.dtype(x))
        g.learn_type(result, TensorType(g.dtype(x), g.shape(x)))
        return g.op("Mul", result, g.constant(np.array(scale, kind), "scale"), at=node)

    def _angles(self, name: str, x: str, batch: Dim, node: NodeProto) -> str:
        """The angles, each of them once, as [batch, sequence, angles]."""
        g = self.g
        shape, dtype, once = g.shape(name), g.dtype(name), name
        if shape is None:
            raise Miss(f"the shape of '{name}' is not known")
        if shape[-1] == self.size:
            step = 2 if self.interleaved else 1
            stop = self.size if self.interleaved else self.size // 2
            bounds = ([0], [stop], [len(shape) - 1], [step])
            once = g.op("Slice", name, *(int_vector(g, one, "bound") for one in bounds), at=node)
            shape = (*shape[:-1], self.size // 2)
            g.learn_type(once, TensorType(dtype, shape))
        if len(shape) == 4 or (len(shape) == 3 and self.heads == 2):
            axis = len(shape) - 4 + self.heads
            once, shape = squeeze(g, once, [axis], at=node), shape[:axis] + shape[axis + 1 :]
            g.learn_type(once, TensorType(dtype, shape))
        if len(shape) == 2:
            once, shape = unsqueeze(g, once, [0], at=node), (1, *shape)
            g.learn_type(once, TensorType(dtype, shape))
        if shape[0] == batch:
            return once
        source, axis = size_in_inputs(g, batch) or (x, 0)
        rows = g.op("Shape", source, at=node, start=axis, end=axis + 1)
        target = g.op("Concat", rows, int_vector(g, [1, 1]), at=node, axis=0)
        return g.op("Expand", once, target, at=node)


def _heads_axis(g: Graph, cos: str, sin: str, shape: Shape) -> int:
    """Which axis of x has the heads: the one along which all angles are the same."""
    one, other = (_same_along(g, angles, shape) for angles in (cos, sin))
    if one != other:
        raise Miss("cos and sin are for different axes")
    return one


def _same_along(g: Graph, angles: str, shape: Shape) -> int:
    own = g.shape(angles)
    if own is None or not 2 <= len(own) <= 4:
        raise Miss(f"the shape of '{angles}' is not known")
    own = (1,) * (4 - len(own)) + own
    if own[3] != shape[3] or own[0] not in (1, shape[0]):
        raise Miss(f"'{angles}' has not one angle for each element of a head")
    if own[1] == 1 and _is_cut_to(own[2], shape[2]):
        return 1
    if own[2] == 1 and _is_cut_to(own[1], shape[1]):
        return 2
    raise Miss(f"'{angles}' has not one row for each position")


def _is_cut_to(own: Dim, length: Dim) -> bool:
    """Whether there are as many rows as positions, or the model does not run.

    The first rows of a table are min(rows, length): with fewer than `length` there is no product.
    """
    if own == length or not isinstance(own, Expr) or not isinstance(length, Expr):
        return own == length
    rows = substitute(own, dict.fromkeys(length.symbols, _FAR))
    return isinstance(rows, int) and 1 < rows < _FAR and own == minimum(rows, length)


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


# -- cos and sin

_ELEMENTWISE = ("Cos", "Sin", "Neg", "Cast", "Identity")


def _is_doubled(g: Graph, value: str, interleaved: bool) -> bool:
    """Whether both elements of a pair have the same angle."""
    size = last_size(g, value)
    for _ in range(_LONGEST_CHAIN):
        constant = g.const(value)
        if constant is not None:
            return _array_is_doubled(constant, interleaved)
        if _is_repeated(g, value, interleaved):
            return True
        node = g.producer(value)
        if node is None or node.domain not in nd.STANDARD_DOMAINS:
            return False
        following = _angle_source(g, node)
        if following is None or last_size(g, following) != size:
            return False
        value = following
    return False


def _angle_source(g: Graph, node: NodeProto) -> str | None:
    """The value whose last axis decides; None for operators that may mix it."""
    if node.op_type in _ELEMENTWISE:
        return node.input[0]
    if node.op_type in ("Mul", "Div", "Add", "Sub"):
        numbers = [g.const(name) for name in node.input]
        for index, number in enumerate(numbers):
            if number is not None and number.size == 1:
                return node.input[1 - index]
        return None
    if node.op_type == "Gather":
        rank = g.rank(node.input[0])
        axis = nd.attr(node, "axis", 0)
        return None if rank is None or axis % rank == rank - 1 else node.input[0]
    if node.op_type in ("Squeeze", "Unsqueeze", "Reshape", "Slice", "Expand"):
        # The last axis keeps its size (see above), and so the groups of elements behind it.
        return node.input[0] if given(node, 1) or node.op_type == "Squeeze" else None
    return None


def _is_repeated(g: Graph, value: str, interleaved: bool) -> bool:
    """Whether the last axis is one of half the size, repeated element by element or as a whole."""
    trace = Trace(g, value)
    for source in trace.sources:
        own = {factor for axis in source.axes for factor in leaves(axis)}
        last = leaves(trace.axes[-1])
        repeats = [factor for factor in last if factor not in own]
        if size_of(repeats) == 2 and len(last) > 1:
            return last[-1] in repeats if interleaved else last[0] in repeats
    return False


def _array_is_doubled(array: Array, interleaved: bool) -> bool:
    size = array.shape[-1] if array.ndim else 0
    if size < 2 or size % 2:
        return False
    if interleaved:
        return bool(np.array_equal(array[..., ::2], array[..., 1::2]))
    return bool(np.array_equal(array[..., : size // 2], array[..., size // 2 :]))


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
