"""Attention masks with a floor, for processors that are slow with denormal numbers.

A masked score is the score plus -1e4, -3.4e38 or -inf. The runtime's exp of that is a denormal
number, and some processors take a hundred times as long to compute with those: causal attention
then costs 2.2 to 2.5 times what it must, padded batches 1.3 to 2 times. With a floor,

    max(mask, the row's largest - 50)

a masked score still weighs only exp(-50) = 2e-22 of an equal one that is not masked, and stays a
normal number. A row that is masked as a whole, whose largest is far below 0, stays as it is.

It is the same attention only where no masked score is far larger than the largest one that is not:
by 34 it would weigh 1e-7 of that. No bound on scores can be shown from the graph. So it is shown by
running it, and with room to spare: on the feeds a floor of 25 below the largest has to be as good
as none (what is written leaks exp(-25) = 1e-11 of what that does): see `mask_trials`.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import given, ints
from passes.lower.cost_query import Choice
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.op_traits import MOVEMENT, VIEWS
from toolkit.ir.tensor_type import Shape
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import Rule, rewrite
from toolkit.symbolic import Dim

DEPTH = 50.0
"""How far below the row's largest a mask ends."""

SHOWN = 25.0
"""How far it ends while it is shown to be enough."""

_LOWEST = float(np.finfo(np.float32).min)
_FAR_BELOW = -1e3
_VIEWS = (*VIEWS, "Identity")
_SCORES, _REAL_KEYS = 3, 6
"""The output of Attention that holds the scores, masked ones among them; the input that counts the
keys that are real."""


def rules(
    choice: Choice | None = None,
    depth: float | None = DEPTH,
    only: Container[str] | None = None,
) -> tuple[Rule, ...]:
    """Floors at `depth` where they pay by the costs of `choice`, for the attentions in `only`.

    Without a depth, what lies below the floor is not masked at all: to see whether anything does.
    """

    @rewrite(op.Attention(var("q"), var("k"), var("v"), ...), opset=23)
    def mask_floor(g: Graph, node: NodeProto) -> str:
        """Attention(q, k, v, max(mask, the row's largest - 50)), one floor for all its readers."""
        site = Site.of(g, node)
        if choice is not None:
            require_gain(choice, g, node)
        if only is not None and node.output[0] not in only:
            raise MatchFailure("it is not shown that a floor leaves the answers as they are")
        if site.is_causal:
            g.set_inputs(node, [*node.input[:3], _triangle(g, node, depth or 0.0)])
            g.del_attr(node, "is_causal")
        else:
            maker = g.producer(site.mask)
            g.set_input(node, 3, _floored(g, site.mask, node, depth))
            if maker is not None:
                g.prune(maker)
        return node.output[0]

    return (mask_floor,)


def require_gain(choice: Choice, g: Graph, node: NodeProto) -> None:
    """Raise MatchFailure unless a floor is faster, for queries in rows or by heads."""
    query = g.shape(node.input[0])
    heads: Shape = () if query is None else (query[1], query[-1]) if len(query) == 4 else query[-1:]
    widths = [size for size in heads if isinstance(size, int)]
    width = math.prod(widths) if heads and len(widths) == len(heads) else None
    length = None if query is None else query[-2]
    tokens = length if isinstance(length, int) else None
    choice.require_at("masked-attention", "finite", tokens, width)


@dataclass(frozen=True, slots=True)
class Site:
    """An attention that masks scores: by a mask, or (`mask` is blank) those of what is to come."""

    mask: str
    is_known: bool
    """Whether every run masks the same, and something."""

    @property
    def is_causal(self) -> bool:
        return not self.mask

    @classmethod
    def of(cls, g: Graph, node: NodeProto) -> Site:
        """Raises MatchFailure where there is nothing to do, or it would not be the same."""
        mask, is_causal = given(node, 3), nd.attr(node, "is_causal", 0)
        if not mask and not is_causal:
            raise MatchFailure("nothing is masked")
        if any(g.dtype(value) != TensorProto.FLOAT for value in node.input[:3]):
            raise MatchFailure("its costs are known for 32-bit floats alone")
        if nd.attr(node, "softcap", 0.0):
            raise MatchFailure("the cap of the scores is for masked ones too")
        if len(node.output) > _SCORES and node.output[_SCORES]:
            raise MatchFailure("its scores are read")
        if given(node, _REAL_KEYS):
            raise MatchFailure("keys are left out beside those that are masked")
        if not is_causal:
            return cls(mask, _known_mask(g, mask))
        if mask or any(node.input[4:]):
            raise MatchFailure("what is to come is masked beside a mask, or behind a cache")
        length = _own_length(g, node)
        return cls("", g.parent is None and isinstance(length, int) and length > 1)


def _known_mask(g: Graph, mask: str) -> bool:
    """Whether a mask is the same at every run; raises MatchFailure where it is to stay."""
    chain = _chain(g, mask)
    part = chain[-1]
    if _has_floor(g, part) or _is_bias(g, part):
        raise MatchFailure("nothing is far below the others of its row")
    shape, stored = g.shape(part), g.const(part)
    if g.dtype(part) not in (TensorProto.FLOAT, TensorProto.BOOL):
        raise MatchFailure("the mask is known to be neither booleans nor 32-bit floats")
    if not shape:
        raise MatchFailure("the rank of the mask is not known")
    by_heads = len(shape) == 4 and shape[1] != 1
    if by_heads and stored is None and all(g.use_count(value) == 1 for value in chain):
        raise MatchFailure("a floor of its own, for all heads, would take as long as it saves")
    return stored is not None and g.parent is None


def _chain(g: Graph, mask: str) -> list[str]:
    """A mask, what it is made of, and so on to the part that masks, biases aside, unspread."""
    carried = _carried(g, mask)
    return [mask] if carried is None else [mask, *_chain(g, carried[1][carried[2]])]


def _carried(g: Graph, mask: str) -> tuple[NodeProto, list[str], int] | None:
    """What makes a mask, its operands, and which of them has the rows that are masked.

    Views keep rows as they are. Next to what is masked a bias makes no difference that counts, and
    no more does a limit far below.
    """
    maker = g.producer(mask)
    if maker is None:
        return None
    operands = list(maker.input)
    if nd.is_op(maker, "Expand") or (nd.is_op(maker, *_VIEWS) and _has_same_rows(g, maker)):
        return maker, operands, 0
    if len(operands) == 2 and nd.is_op(maker, "Add"):
        aside = [_is_bias(g, operand) for operand in operands]
    elif len(operands) == 2 and nd.is_op(maker, "Max"):
        aside = [_is_limit(g, operand) for operand in operands]
    else:
        return None
    return (maker, operands, aside.index(False)) if sum(aside) == 1 else None


def _has_same_rows(g: Graph, view: NodeProto) -> bool:
    before, after = g.shape(view.input[0]), g.shape(view.output[0])
    return bool(before) and bool(after) and before[-1:] == after[-1:]


def _is_bias(g: Graph, value: str) -> bool:
    """Whether all of a value lies close together, at every run."""
    stored, maker = g.const(value), g.producer(value)
    if stored is not None:
        return stored.dtype.kind == "f" and (not stored.size or bool(np.ptp(stored) <= SHOWN))
    return nd.is_op(maker, *MOVEMENT) and maker is not None and _is_bias(g, maker.input[0])


def _is_limit(g: Graph, value: str) -> bool:
    stored = g.const(value)
    return stored is not None and stored.size == 1 and bool(stored.item() <= _FAR_BELOW)


def _own_length(g: Graph, node: NodeProto) -> Dim:
    """How many queries there are, and keys."""
    query, key = (g.shape(value) for value in node.input[:2])
    if query is None or key is None or query[-2] != key[-2]:
        raise MatchFailure("as many keys as queries are not known")
    return query[-2]


# -- writing


def _floored(g: Graph, mask: str, node: NodeProto, depth: float | None) -> str:
    """The mask with its floor: what an attention before this one reads, or written here.

    It is the part that masks which gets it. That of a stored one is computed by the runtime when it
    loads the model, which then need not store it.
    """
    carried = _carried(g, mask)
    if carried is not None:
        maker, operands, which = carried
        part = _floored(g, operands.pop(which), node, depth)
        return _once(g, node, maker.op_type, part, *operands, **nd.attrs(maker))
    if g.dtype(mask) == TensorProto.BOOL:
        mask = _once(g, node, "Where", mask, _number(0.0), _number(_LOWEST))
    largest = _once(g, node, "ReduceMax", mask, np.array([-1]))
    lower = _once(g, node, "Sub", largest, _number(DEPTH if depth is None else depth))
    whole = _once(g, node, "Less", largest, _number(_FAR_BELOW))
    floor = _once(g, node, "Where", whole, _number(-np.inf), lower)
    if depth is None:
        return g.op("Where", g.op("Less", mask, floor, at=node), largest, mask, at=node)
    return _once(g, node, "Max", mask, floor)


def _once(
    g: Graph, node: NodeProto, op_type: str, first: str, *others: str | Array, **attributes: int
) -> str:
    """The value of an operation that is there already, or is written here: arrays are constants."""
    for user in g.users(first):
        if nd.is_op(user, op_type) and user.input[0] == first and nd.attrs(user) == attributes:
            rest = list(user.input)[1:]
            if len(rest) == len(others) and all(map(partial(_is_same, g), rest, others)):
                return user.output[0]
    written = [o if isinstance(o, str) else g.constant(o, op_type.lower()) for o in others]
    return g.add(op_type, [first, *written], 1, attributes, at=node).output[0]


def _is_same(g: Graph, value: str, wanted: str | Array) -> bool:
    if isinstance(wanted, str):
        return value == wanted
    stored = g.const(value)
    return stored is not None and stored.dtype == wanted.dtype and np.array_equal(stored, wanted)


def _triangle(g: Graph, node: NodeProto, depth: float) -> str:
    """A mask of what is to come: -depth above the diagonal, 0 elsewhere."""
    value, axis = _as_long_as(g, node, _own_length(g, node))
    size = _once(g, node, "Shape", value, start=axis, end=axis + 1)
    both = _once(g, node, "Concat", size, size, axis=0)
    zeros = _once(g, node, "ConstantOfShape", both)
    filled = _once(g, node, "Sub", zeros, _number(depth))
    return _once(g, node, "Trilu", filled, np.array(1), upper=1)


def _as_long_as(g: Graph, node: NodeProto, length: Dim) -> tuple[str, int]:
    """A value with an axis of this length: an input, the same for all layers, or the queries."""
    for value in g.inputs:
        shape = g.shape(value) or ()
        if length in shape:
            return value, shape.index(length)
    rank = g.rank(node.input[0])
    assert rank is not None  # its length is known
    return node.input[0], rank - 2


def _number(value: float) -> Array:
    return np.array(value, dtype=np.float32)


def _has_floor(g: Graph, mask: str) -> bool:
    """Whether no value of a part that masks is far below the largest of its row, at any run."""
    stored, maker = g.const(mask), g.producer(mask)
    if stored is not None:
        return _is_shallow(stored)
    if maker is None:
        return False
    if nd.is_op(maker, "Add") and all(_is_bias(g, operand) for operand in maker.input):
        return True
    if nd.is_op(maker, "Trilu"):
        return _is_below(g, maker.input[0], "ConstantOfShape")
    if not nd.is_op(maker, "Max") or len(maker.input) != 2:
        return False
    floor = g.producer(maker.input[1])
    return (
        nd.is_op(floor, "Where") and floor is not None and _is_below(g, floor.input[2], "ReduceMax")
    )


def _is_shallow(mask: Array) -> bool:
    if mask.dtype == np.bool_ or not mask.size or not mask.ndim:
        return not mask.size or bool(mask.all())
    largest = mask.max(axis=-1, keepdims=True)
    return not bool(np.any(mask < largest - np.float32(DEPTH)))


def _is_below(g: Graph, lower: str, op_type: str) -> bool:
    """Whether a value is one of these, the largest of a row or zeros, less a depth."""
    difference = g.producer(lower)
    if difference is None or not nd.is_op(difference, "Sub"):
        return False
    depth, above = g.const(difference.input[1]), g.producer(difference.input[0])
    if depth is None or depth.size != 1 or not 0 <= depth.item() <= DEPTH or above is None:
        return False
    axes = [-1] if len(above.input) == 1 else ints(g, above.input[1])
    return nd.is_op(above, op_type) and not above.attribute and axes == [-1]
