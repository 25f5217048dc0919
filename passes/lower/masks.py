"""Attention masks with a floor, for processors that are slow with denormal numbers.

A masked score is the score plus -1e4, -3.4e38 or -inf. The runtime's exp of that is a denormal
number, and some processors take a hundred times as long to compute with those: causal attention
then costs 2.2 to 2.5 times what it must, padded batches 1.3 to 2 times. With a floor,

    max(mask, the row's largest - 50)

a masked score still weighs only exp(-50) = 2e-22 of an equal one that is not masked, and stays a
normal number. A row that is masked as a whole has no key above its floor, and stays as it is.

It is the same attention only where no masked score is far larger than the largest one that is not:
by 34 it would weigh 1e-7 of that. No bound on scores can be shown from the graph. So it is shown by
running it, and with room to spare: on the feeds a floor of 25 below the largest has to be as good
as none (what is written leaks exp(-25) = 1e-11 of what that does), while a floor of 0, which masks
nothing, must not, since there the feeds would have nothing masked to show. Without runs that can
show it, masks stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import NodeProto, TensorProto

from passes.lower.choice import Choice
from passes.operands import given
from toolkit import nodes as nd
from toolkit.graph import Array, Graph
from toolkit.misses import Miss
from toolkit.model import Model
from toolkit.pattern import op, var
from toolkit.rules import Rule, apply_rules, rewrite
from toolkit.symbolic import Dim

DEPTH = 50.0
"""How far below the row's largest a mask ends."""

SHOWN = 25.0
"""How far it ends while it is shown to be enough."""

_MOST_TRIALS = 12
_LOWEST = float(np.finfo(np.float32).min)
_SCORES = 3
"""The output of Attention that holds the scores, the masked ones among them."""


def rules(
    choice: Choice | None = None, depth: float = DEPTH, only: Container[str] | None = None
) -> tuple[Rule, ...]:
    """Floors at `depth` where they pay by the costs of `choice`, for the attentions in `only`."""

    @rewrite(op.Attention(var("q"), var("k"), var("v"), ...), opset=23)
    def mask_floor(g: Graph, q: str, k: str, node: NodeProto) -> str:
        """Attention(q, k, v, max(mask, the row's largest - 50)), one floor for all its readers."""
        if only is not None and node.output[0] not in only:
            raise Miss("it is not shown that a floor leaves the answers as they are")
        site = Site.of(g, node)
        if choice is not None:
            choice.require("masked-attention", "finite", g, q)
        if site.is_causal:
            g.set_inputs(node, [*node.input[:3], _triangle(g, node, site.length, depth)])
            g.del_attr(node, "is_causal")
        else:
            maker = g.producer(site.mask)
            g.set_input(node, 3, _floored(g, site.mask, node, depth))
            if maker is not None:
                g.prune(maker)
        return node.output[0]

    return (mask_floor,)


@dataclass(frozen=True, slots=True)
class Site:
    """An attention that masks scores: by a mask, or (`mask` is blank) all that is to come."""

    mask: str
    length: Dim = 0

    @property
    def is_causal(self) -> bool:
        return not self.mask

    @classmethod
    def of(cls, g: Graph, node: NodeProto) -> Site:
        """Raises Miss where there is nothing to do, or it would not be the same."""
        mask, is_causal = given(node, 3), nd.attr(node, "is_causal", 0)
        if any(g.dtype(value) != TensorProto.FLOAT for value in node.input[:3]):
            raise Miss("its costs are known for 32-bit floats alone")
        if nd.attr(node, "softcap", 0.0):
            raise Miss("the cap of the scores is for masked ones too")
        if len(node.output) > _SCORES and node.output[_SCORES]:
            raise Miss("its scores are read")
        if is_causal and (mask or any(node.input[4:])):
            raise Miss("what is to come is masked beside a mask, or behind a cache")
        if is_causal:
            return cls("", _own_length(g, node))
        if not mask:
            raise Miss("nothing is masked")
        if g.dtype(mask) not in (TensorProto.FLOAT, TensorProto.BOOL):
            raise Miss("a mask of 16 bits")
        if not g.rank(mask):
            raise Miss("the rank of the mask is not known")
        if _has_floor(g, mask):
            raise Miss("the mask has a floor already")
        return cls(mask)


def _own_length(g: Graph, node: NodeProto) -> Dim:
    """How many queries there are, and keys."""
    query, key = (g.shape(value) for value in node.input[:2])
    if query is None or key is None or query[-2] != key[-2]:
        raise Miss("as many keys as queries are not known")
    return query[-2]


# -- writing


def _floored(g: Graph, mask: str, node: NodeProto, depth: float) -> str:
    """The mask with its floor: what an attention before this one reads, or written here.

    Of a mask that is spread over queries (Expand) it is the part that all of them share.
    """
    stored, maker = g.const(mask), g.producer(mask)
    if stored is not None:
        return g.constant(_with_floor(_as_floats(stored), depth), "mask")
    if nd.is_op(maker, "Expand") and maker is not None and g.rank(maker.input[0]):
        part = _floored(g, maker.input[0], node, depth)
        return _once(g, node, "Expand", part, maker.input[1])
    if g.dtype(mask) == TensorProto.BOOL:
        mask = _once(g, node, "Where", mask, _number(0.0), _number(_LOWEST))
    largest = _once(g, node, "ReduceMax", mask, np.array([-1]))
    floor = _once(g, node, "Sub", largest, _number(depth))
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
    return stored is not None and np.array_equal(stored, wanted)


def _triangle(g: Graph, node: NodeProto, length: Dim, depth: float) -> str:
    """A mask of what is to come: -depth above the diagonal, 0 elsewhere."""
    value, axis = _as_long_as(g, node, length)
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


def _as_floats(mask: Array) -> Array:
    if mask.dtype != np.bool_:
        return mask
    floats: Array = np.where(mask, _number(0.0), _number(_LOWEST))
    return floats


def _with_floor(mask: Array, depth: float) -> Array:
    floor: Array = mask.max(axis=-1, keepdims=True, initial=-np.inf) - np.float32(depth)
    return np.maximum(mask, floor)


def _has_floor(g: Graph, mask: str) -> bool:
    """Whether no value of a mask is far below the largest of its row, at any run."""
    stored, maker = g.const(mask), g.producer(mask)
    if stored is not None:
        floats = _as_floats(stored)
        return np.array_equal(floats, _with_floor(floats, DEPTH))
    if maker is None:
        return False
    if nd.is_op(maker, "Expand"):
        return _has_floor(g, maker.input[0])
    if nd.is_op(maker, "Trilu"):
        filled = g.producer(maker.input[0])
        return nd.is_op(filled, "Sub") and filled is not None and _is_shallow(g, filled.input[1])
    if not nd.is_op(maker, "Max") or len(maker.input) != 2:
        return False
    lower = g.producer(maker.input[1])
    if lower is None or not nd.is_op(lower, "Sub") or not _is_shallow(g, lower.input[1]):
        return False
    largest = g.producer(lower.input[0])
    return (
        nd.is_op(largest, "ReduceMax")
        and largest is not None
        and largest.input[0] == maker.input[0]
    )


def _is_shallow(g: Graph, depth: str) -> bool:
    stored = g.const(depth)
    return stored is not None and stored.size == 1 and abs(stored.item()) <= DEPTH


# -- showing


@dataclass(frozen=True, slots=True)
class Masked:
    """Attentions that have one mask, by the names of their outputs; `varies` from run to run."""

    sites: tuple[str, ...]
    varies: bool


def candidates(model: Model, choice: Choice) -> list[Masked]:
    """The attentions that may get a floor, where it pays."""
    found: dict[tuple[str, bool], list[str]] = {}
    for g, node in model.places():
        if not nd.is_op(node, "Attention"):
            continue
        try:
            site = Site.of(g, node)
            choice.require("masked-attention", "finite", g, node.input[0])
        except Miss:
            continue
        varies = not site.is_causal and g.const(site.mask) is None
        found.setdefault((site.mask, varies), []).append(node.output[0])
    return [Masked(tuple(sites), varies) for (_, varies), sites in found.items()]


@dataclass(slots=True)
class Showing:
    """Which attentions are shown, by runs, to give the same with a floor; `holds` runs a model."""

    model: Model
    choice: Choice
    holds: Callable[[Model], bool]
    unmasked: bool = False
    """Whether there are masks that none of the feeds makes use of."""
    _left: int = _MOST_TRIALS

    def shown(self) -> list[str]:
        masked: list[str] = []
        for one in candidates(self.model, self.choice):
            if one.varies and self._holds_with(0.0, one.sites):
                self.unmasked = True
            else:
                masked += one.sites
        return self._enough(masked)

    def _enough(self, sites: list[str]) -> list[str]:
        """Those that may have a floor, alone and together."""
        kept: list[str] = []
        parts = [sites] if sites else []
        while parts and self._left:
            part = parts.pop()
            if self._holds_with(SHOWN, [*kept, *part]):
                kept += part
            elif len(part) > 1:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
        return kept

    def _holds_with(self, depth: float, sites: Sequence[str]) -> bool:
        """A model that is not run any more, after many others, has shown nothing."""
        if not self._left:
            return True
        self._left -= 1
        start = self.model.journal.position
        apply_rules(self.model, rules(self.choice, depth, sites))
        holds = self.holds(self.model)
        self.model.journal.undo_to(start)
        return holds
