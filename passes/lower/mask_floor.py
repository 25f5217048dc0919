"""Give attention masks a floor, for processors that are slow with denormal numbers.

A masked score is the score plus -1e4, -3.4e38 or -inf. The runtime's exp of that is denormal, and
on some processors arithmetic with denormals takes a hundred times as long: causal attention is then
2.2 to 2.5 times as slow, attention to padded batches 1.3 to 2 times. With a floor,

    max(mask, max(row of mask) - 50)

the weight of a masked score is a normal number, but only exp(-50) = 2e-22 of that of an equal
unmasked score. A fully masked row, whose maximum is far below 0, does not change.

The result is the same unless a masked score is far above the largest unmasked one: at 34 above, its
weight is 1e-7. The graph does not bound the scores; trial runs with a margin decide (see
`mask_trials`).
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import given, ints
from passes.lower.cost_query import CostQuery, require_float
from toolkit.ir import Array, Graph, Shape, node as nd
from toolkit.ir.op_traits import MOVEMENT, VIEWS, has_trait
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import Rule, rewrite
from toolkit.symbolic import Dim

DEPTH = 50.0
"""The floor, as a distance from the maximum of the row."""

TRIAL_DEPTH = 25.0
"""The floor in trial runs, where the margin is the difference to `DEPTH`."""

_LOWEST = float(np.finfo(np.float32).min)
_FAR_BELOW = -1e3
"""A mask value up to this one masks its score."""
_VIEWS = (*VIEWS, "Identity")
_SCORES, _REAL_KEYS = 3, 6
"""The output of Attention with the scores, and the input with the lengths of keys."""


def rules(
    costs: CostQuery | None = None,
    depth: float | None = DEPTH,
    only: Container[str] | None = None,
) -> tuple[Rule, ...]:
    """Return the rule that adds floors at `depth` where they are faster according to `costs`.

    `only` restricts it to the attentions with these outputs. Without a depth, the rule unmasks all
    scores below the floor: a test for such scores.
    """

    @rewrite(op.Attention(var("q"), var("k"), var("v"), ...), opset=23)
    def mask_floor(g: Graph, node: NodeProto) -> str:
        """Attention(q, k, v, max(mask, max(row of mask) - 50)), one floor per mask"""
        found = AttentionMask.of(g, node)
        if costs is not None:
            require_gain(costs, g, node)
        if only is not None and node.output[0] not in only:
            raise MatchFailure("trial runs did not confirm that a floor keeps the outputs")
        if found.is_causal:
            g.set_inputs(node, [*node.input[:3], _triangle(g, node, depth or 0.0)])
            g.del_attr(node, "is_causal")
        else:
            producer = g.producer(found.mask)
            g.set_input(node, 3, _floored(g, found.mask, node, depth))
            if producer is not None:
                g.prune(producer)
        return node.output[0]

    return (mask_floor,)


def require_gain(costs: CostQuery, g: Graph, node: NodeProto) -> None:
    """Raise MatchFailure unless a floor is faster."""
    query = g.shape(node.input[0])
    heads: Shape = () if query is None else (query[1], query[-1]) if len(query) == 4 else query[-1:]
    widths = [size for size in heads if isinstance(size, int)]
    width = math.prod(widths) if heads and len(widths) == len(heads) else None
    length = None if query is None else query[-2]
    tokens = length if isinstance(length, int) else None
    costs.require_at("masked-attention", "finite", tokens, width)


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The mask of an attention; blank if it is causal."""

    mask: str
    is_constant: bool
    """Whether every run masks the same scores, at least one of them."""

    @property
    def is_causal(self) -> bool:
        return not self.mask

    @classmethod
    def of(cls, g: Graph, node: NodeProto) -> AttentionMask:
        """Return the mask; raise MatchFailure if a floor is useless or changes the result."""
        mask, is_causal = given(node, 3), nd.attr(node, "is_causal", 0)
        if not mask and not is_causal:
            raise MatchFailure("no scores are masked")
        for value in node.input[:3]:
            require_float(g, value)
        if nd.attr(node, "softcap", 0.0):
            raise MatchFailure("softcap limits masked scores as well")
        if len(node.output) > _SCORES and node.output[_SCORES]:
            raise MatchFailure("its scores are an output")
        if given(node, _REAL_KEYS):
            raise MatchFailure("it also has the lengths of keys")
        if not is_causal:
            return cls(mask, _is_constant(g, mask))
        if mask or any(node.input[4:]):
            raise MatchFailure("it is causal and has a mask or a cache as well")
        length = _own_length(g, node)
        return cls("", g.parent is None and isinstance(length, int) and length > 1)


def _is_constant(g: Graph, mask: str) -> bool:
    """Whether a mask is the same in all runs; raise MatchFailure if a floor does not help."""
    chain = _mask_chain(g, mask)
    part = chain[-1]
    if _has_floor(g, part) or _is_bias(g, part):
        raise MatchFailure("no element is far below the maximum of its row")
    shape, stored = g.shape(part), g.const(part)
    if g.dtype(part) not in (TensorProto.FLOAT, TensorProto.BOOL):
        raise MatchFailure("the mask is not known to be boolean or float32")
    if not shape:
        raise MatchFailure("the rank of the mask is unknown")
    by_heads = len(shape) == 4 and shape[1] != 1
    if by_heads and stored is None and all(g.use_count(value) == 1 for value in chain):
        raise MatchFailure("a mask with heads and one user: the floor costs what it saves")
    return stored is not None and g.parent is None


def _mask_chain(g: Graph, mask: str) -> list[str]:
    """Return a mask and its ancestors up to the one that masks, without views and biases."""
    step = _mask_operand(g, mask)
    return [mask] if step is None else [mask, *_mask_chain(g, step[0].input[step[1]])]


def _mask_operand(g: Graph, mask: str) -> tuple[NodeProto, int] | None:
    """Return the producer of a mask, and the operand that has the masked rows.

    The producer is a view that keeps rows, or adds a bias or a lower limit, which do not affect
    masked scores.
    """
    producer = g.producer(mask)
    if producer is None:
        return None
    if nd.is_op(producer, "Expand") or (
        nd.is_op(producer, *_VIEWS) and _has_same_rows(g, producer)
    ):
        return producer, 0
    is_other = {"Add": _is_bias, "Max": _is_limit}.get(nd.qualified(producer))
    if is_other is None or len(producer.input) != 2:
        return None
    others = [is_other(g, operand) for operand in producer.input]
    return (producer, others.index(False)) if sum(others) == 1 else None


def _has_same_rows(g: Graph, view: NodeProto) -> bool:
    before, after = g.shape(view.input[0]), g.shape(view.output[0])
    return bool(before) and bool(after) and before[-1:] == after[-1:]


def _is_bias(g: Graph, value: str) -> bool:
    """Whether all elements of a value are close to each other in all runs."""
    stored, producer = g.const(value), g.producer(value)
    if stored is not None:
        return stored.dtype.kind == "f" and (not stored.size or bool(np.ptp(stored) <= TRIAL_DEPTH))
    return has_trait(producer, MOVEMENT) and producer is not None and _is_bias(g, producer.input[0])


def _is_limit(g: Graph, value: str) -> bool:
    stored = g.const(value)
    return stored is not None and stored.size == 1 and bool(stored.item() <= _FAR_BELOW)


def _own_length(g: Graph, node: NodeProto) -> Dim:
    """Return the number of queries, which equals that of keys."""
    query, key = (g.shape(value) for value in node.input[:2])
    if query is None or key is None or query[-2] != key[-2]:
        raise MatchFailure("it may have more keys than queries")
    return query[-2]


# -- writing


def _floored(g: Graph, mask: str, node: NodeProto, depth: float | None) -> str:
    """Return the mask with a floor, shared with other attentions.

    The value that masks gets the floor. If it is a constant, the runtime folds the floor at load
    time: the file need not store it.
    """
    step = _mask_operand(g, mask)
    if step is not None:
        producer, slot = step
        operands = list(producer.input)
        part = _floored(g, operands.pop(slot), node, depth)
        return _shared(g, node, producer.op_type, part, *operands, **nd.attrs(producer))
    if g.dtype(mask) == TensorProto.BOOL:
        mask = _shared(g, node, "Where", mask, _number(0.0), _number(_LOWEST))
    largest = _shared(g, node, "ReduceMax", mask, np.array([-1]))
    lower = _shared(g, node, "Sub", largest, _number(DEPTH if depth is None else depth))
    whole = _shared(g, node, "Less", largest, _number(_FAR_BELOW))
    floor = _shared(g, node, "Where", whole, _number(-np.inf), lower)
    if depth is None:
        return g.op("Where", g.op("Less", mask, floor, at=node), largest, mask, at=node)
    return _shared(g, node, "Max", mask, floor)


def _shared(
    g: Graph, node: NodeProto, op_type: str, first: str, *others: str | Array, **attributes: int
) -> str:
    """Return the value of an equal node, or add one; operands given as arrays are constants."""
    for user in g.users(first):
        if nd.is_op(user, op_type) and user.input[0] == first and nd.attrs(user) == attributes:
            rest = list(user.input)[1:]
            if len(rest) == len(others) and all(map(partial(_is_same, g), rest, others)):
                return user.output[0]
    operands = [o if isinstance(o, str) else g.constant(o, op_type.lower()) for o in others]
    return g.add(op_type, [first, *operands], 1, attributes, at=node).output[0]


def _is_same(g: Graph, value: str, wanted: str | Array) -> bool:
    if isinstance(wanted, str):
        return value == wanted
    stored = g.const(value)
    return stored is not None and stored.dtype == wanted.dtype and np.array_equal(stored, wanted)


def _triangle(g: Graph, node: NodeProto, depth: float) -> str:
    """Return a causal mask: -depth above the diagonal, 0 elsewhere."""
    value, axis = _axis_of_length(g, node, _own_length(g, node))
    size = _shared(g, node, "Shape", value, start=axis, end=axis + 1)
    both = _shared(g, node, "Concat", size, size, axis=0)
    zeros = _shared(g, node, "ConstantOfShape", both)
    filled = _shared(g, node, "Sub", zeros, _number(depth))
    return _shared(g, node, "Trilu", filled, np.array(1), upper=1)


def _axis_of_length(g: Graph, node: NodeProto, length: Dim) -> tuple[str, int]:
    """Return a value with an axis of this length: an input, shared by all layers, or the query."""
    for value in g.inputs:
        shape = g.shape(value) or ()
        if length in shape:
            return value, shape.index(length)
    rank = g.rank(node.input[0])
    assert rank is not None  # since its length is known
    return node.input[0], rank - 2


def _number(value: float) -> Array:
    return np.array(value, dtype=np.float32)


def _has_floor(g: Graph, mask: str) -> bool:
    """Whether the elements of a mask are close to the maximum of their row in all runs."""
    stored, producer = g.const(mask), g.producer(mask)
    if stored is not None:
        return _is_shallow(stored)
    if producer is None:
        return False
    if nd.is_op(producer, "Add") and all(_is_bias(g, operand) for operand in producer.input):
        return True
    if nd.is_op(producer, "Trilu"):
        return _is_below(g, producer.input[0], "ConstantOfShape")
    if not nd.is_op(producer, "Max") or len(producer.input) != 2:
        return False
    floor = g.producer(producer.input[1])
    return (
        nd.is_op(floor, "Where") and floor is not None and _is_below(g, floor.input[2], "ReduceMax")
    )


def _is_shallow(mask: Array) -> bool:
    if mask.dtype == np.bool_ or not mask.size or not mask.ndim:
        return not mask.size or bool(mask.all())
    largest = mask.max(axis=-1, keepdims=True)
    return not bool(np.any(mask < largest - np.float32(DEPTH)))


def _is_below(g: Graph, lower: str, op_type: str) -> bool:
    """Whether `lower` is the result of an `op_type` (row maximum, or zeros) minus a depth."""
    difference = g.producer(lower)
    if difference is None or not nd.is_op(difference, "Sub"):
        return False
    depth, above = g.const(difference.input[1]), g.producer(difference.input[0])
    if depth is None or depth.size != 1 or not 0 <= depth.item() <= DEPTH or above is None:
        return False
    axes = [-1] if len(above.input) == 1 else ints(g, above.input[1])
    return nd.is_op(above, op_type) and not above.attribute and axes == [-1]
