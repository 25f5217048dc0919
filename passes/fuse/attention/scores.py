"""Analyze the scores of an attention, the input of its softmax.

    scores = scale * (query . key^T) + bias_1 + bias_2 + ...

Scales may come before, between or after the biases, masks may be added or selected by Where, and
the products may be capped (`cap * tanh(x / cap)`). The analysis walks from the softmax back to the
product of query and key, and records the operators on its way.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.operands import scalar_value
from toolkit.ir import FLOATS, Graph, Shape, node as nd
from toolkit.ir.op_traits import VIEWS
from toolkit.rewriting.match_failure import MatchFailure

_MAX_CHAIN = 16
"""Largest number of nodes between the softmax and the product."""

_ABSORBING: dict[int, float] = {TensorProto.FLOAT16: -6e4}
_ABSORBING_ELSE = -1e9
"""The sum of any reasonable score and a mask value below this is the mask value."""


@dataclass(frozen=True, slots=True)
class Bias:
    """A term `factor * value`, or the number `masked` where the condition `value` selects it."""

    value: str
    rank: int
    """The rank of the scores that it is added to."""
    factor: float = 1.0
    masked: float | None = None
    where_true: bool = False
    """Whether elements are masked where the condition is true, rather than false."""
    replaces: bool = False
    """Whether `masked` replaces the scores and all terms added before."""
    matrices: Shape = ()
    """The shape of these scores without the last two axes."""


@dataclass(slots=True)
class Scores:
    """Query and key, and the operations on their product before the softmax."""

    query: str = ""
    key: str = ""
    """Transposed: [..., head size, sequence]."""
    scale: float = 1.0
    cap: float = 0.0
    head_scale: str = ""
    """An additional scale per head, [heads, 1, 1]."""
    biases: list[Bias] = field(default_factory=list[Bias])
    least: float = -np.inf
    """The lower bound of the biases: keeps a sum of two masks finite."""


def read_scores(g: Graph, value: str) -> Scores:
    """Return the analysis of the scores `value`; raise MatchFailure for other values."""
    found = Scores()
    for _ in range(_MAX_CHAIN):
        node = g.producer(value)
        if node is None or node.domain not in nd.STANDARD_DOMAINS:
            raise MatchFailure(f"the scores '{value}' are not a product of query and key")
        if node.op_type == "MatMul":
            found.query, found.key = node.input
            _added_to(found, g.shape(value) or g.shape(found.query))
            return found
        value = _step(g, node, value, found)
    raise MatchFailure(f"more than {_MAX_CHAIN} operators between query . key and the softmax")


def _step(g: Graph, node: NodeProto, value: str, found: Scores) -> str:
    """Record one operator; return its operand on the path to the product."""
    op = node.op_type
    if op in ("Add", "Sub"):
        return _pass_bias(g, node, found)
    if op in ("Mul", "Div"):
        return _pass_scale(g, node, found)
    if op == "Where":
        return _pass_mask(g, node, found)
    if op in ("Max", "Clip"):
        return _pass_limit(g, node, found)
    if op == "Tanh":
        if found.cap or found.scale <= 0:
            raise MatchFailure(f"{nd.label(node)} does not cap the scores")
        found.cap, found.scale = found.scale, 1.0
        return node.input[0]
    if op == "Cast" and g.dtype(node.input[0]) in FLOATS and g.dtype(value) in FLOATS:
        return node.input[0]
    grouped_before = _before_views(g, value) if op in VIEWS else None
    if grouped_before is not None:
        if found.head_scale:
            raise MatchFailure(f"{nd.label(node)} reshapes the heads before they are scaled")
        _added_to(found, g.shape(value))
        return grouped_before
    raise MatchFailure(f"{nd.label(node)} is between query . key and the softmax")


def _added_to(found: Scores, scores: Shape | None) -> None:
    """Set the shape of the scores for the terms recorded since the last view."""
    if scores is not None:
        found.biases = [
            bias if bias.matrices else replace(bias, matrices=scores[:-2]) for bias in found.biases
        ]


def keeps_matrices(g: Graph, value: str) -> bool:
    """Return whether `value` is not a view, or a view that keeps the last two axes."""
    return not nd.is_op(g.producer(value), *VIEWS) or _before_views(g, value) is not None


def _before_views(g: Graph, value: str) -> str | None:
    """Return the nearest source of a chain of views with the last two axes of `value`."""
    after, name = g.shape(value), value
    for _ in range(_MAX_CHAIN):
        node = g.producer(name)
        if after is None or len(after) < 2 or node is None or not nd.is_op(node, *VIEWS):
            return None
        name = node.input[0]
        before = g.shape(name)
        if before is not None and len(before) >= 2 and before[-2:] == after[-2:]:
            return name
    return None


def _pass_bias(g: Graph, node: NodeProto, found: Scores) -> str:
    sides = [name for name in node.input if _leads_to_product(g, name)]
    if node.op_type == "Sub":
        sides = sides[:1] if sides and sides[0] == node.input[0] else []
    if node.op_type == "Sub" and not sides:
        raise MatchFailure(f"{nd.label(node)} subtracts the scores")
    if not sides:
        raise MatchFailure(f"{nd.label(node)} does not add to a product of query and key")
    # Relative positions are a product, too: prefer the operand without views.
    sides.sort(key=lambda name: not _leads_to_product(g, name, views=()))
    if found.cap or found.head_scale:
        raise MatchFailure(f"{nd.label(node)} precedes the soft cap or the per-head scale")
    other = node.input[1 - list(node.input).index(sides[0])]
    factor = found.scale if node.op_type == "Add" else -found.scale
    found.biases.append(_bias(g, other, _rank(g, sides[0]), factor))
    return sides[0]


def _bias(g: Graph, value: str, rank: int, factor: float) -> Bias:
    """Return a term of the scores; Where(condition, number, 0) is a mask."""
    node = g.producer(value)
    if node is not None and nd.is_op(node, "Where"):
        chosen, other = (scalar_value(g, name) for name in node.input[1:])
        for masked, rest, where_true in ((other, chosen, False), (chosen, other, True)):
            if rest == 0 and masked is not None:
                low = _rounded(masked * factor, g.dtype(value))
                return Bias(node.input[0], rank, masked=low, where_true=where_true)
    return Bias(value, rank, factor)


def _rounded(number: float, dtype: int) -> float:
    """Return a mask value rounded to an element type: twice the lowest number is -inf."""
    with np.errstate(over="ignore"):
        return float(np.array(number).astype(helper.tensor_dtype_to_np_dtype(dtype)))


def _rank(g: Graph, value: str) -> int:
    rank = g.rank(value)
    if rank is None:
        raise MatchFailure(f"the rank of '{value}' is not known")
    return rank


def _pass_scale(g: Graph, node: NodeProto, found: Scores) -> str:
    for index in (0, 1) if node.op_type == "Mul" else (0,):
        factor = scalar_value(g, node.input[1 - index])
        if factor is not None:
            if not factor or not np.isfinite(factor):
                raise MatchFailure(f"{nd.label(node)} scales by {factor}")
            found.scale *= factor if node.op_type == "Mul" else 1 / factor
            return node.input[index]
    return _pass_scale_of_heads(g, node, found)


def _pass_scale_of_heads(g: Graph, node: NodeProto, found: Scores) -> str:
    """Record a scale per head, which is applied to the query: the product is linear in it."""
    for scores, scale in (node.input, reversed(node.input)) if node.op_type == "Mul" else ():
        shape, rank = g.shape(scale), g.rank(scores)
        fits = shape is not None and rank is not None and 2 < len(shape) <= rank
        if fits and shape is not None and shape[-2:] == (1, 1) and _leads_to_product(g, scores):
            if found.head_scale or found.scale != 1.0 or found.cap:
                raise MatchFailure(
                    f"{nd.label(node)} is a second scale per head, or follows another scale"
                )
            found.head_scale = scale
            return scores
    raise MatchFailure(f"{nd.label(node)} does not scale by a constant")


def _pass_limit(g: Graph, node: NodeProto, found: Scores) -> str:
    """Record max(scores, lowest), which keeps the sum of two masks from becoming -inf."""
    scores, numbers = node.input[0], [scalar_value(g, name) for name in node.input]
    if numbers[0] is not None and node.op_type == "Max":
        scores, numbers = node.input[-1], numbers[::-1]
    least = numbers[1] if len(numbers) == 2 else None
    dtype = g.dtype(scores)
    lowest = float(np.finfo(helper.tensor_dtype_to_np_dtype(dtype)).min) if dtype in FLOATS else 0
    if least is None or not least <= 0.99 * lowest < 0 or found.cap or found.scale != 1.0:
        raise MatchFailure(f"{nd.label(node)} limits the scores")
    if found.biases:
        raise MatchFailure(f"{nd.label(node)} limits the scores before the last bias")
    found.least = max(found.least, least)
    return scores


def _pass_mask(g: Graph, node: NodeProto, found: Scores) -> str:
    """Where(keep, scores, low): adding Where(keep, 0, low) is the same if `low` absorbs scores."""
    condition, chosen, other = node.input
    for scores, low, where_true in ((chosen, other, False), (other, chosen, True)):
        masked = scalar_value(g, low)
        if masked is None or not _leads_to_product(g, scores):
            continue
        if found.cap or found.head_scale:
            raise MatchFailure(f"{nd.label(node)} precedes the soft cap or the per-head scale")
        absorbing = _ABSORBING.get(g.dtype(low), _ABSORBING_ELSE)
        if not masked <= absorbing and not _keeps_some_of_each_row(
            g, condition, where_true, masked
        ):
            raise MatchFailure(
                f"{nd.label(node)} masks with {masked:g}: fully masked rows would change"
            )
        rank = _rank(g, scores)
        masked = _rounded(masked * found.scale, g.dtype(low))
        found.biases.append(Bias(condition, rank, 1.0, masked, where_true, True))
        return scores
    raise MatchFailure(f"{nd.label(node)} does not select between scores and a constant")


def _keeps_some_of_each_row(g: Graph, condition: str, where_true: bool, masked: float) -> bool:
    """Return whether a constant condition keeps an element per row, and `masked` is very low."""
    keep = g.const(condition)
    if keep is None or keep.ndim < 2 or masked > -1000:
        return False
    kept = ~keep.astype(bool) if where_true else keep.astype(bool)
    return bool(kept.any(axis=-1).all())


def _leads_to_product(g: Graph, value: str, views: tuple[str, ...] = VIEWS) -> bool:
    """Return whether `value` is a product of two variables, apart from scales, biases and masks."""
    pending, seen = [value], 0
    while pending and seen < 2 * _MAX_CHAIN:
        seen += 1
        node = g.producer(pending.pop())
        if node is None or node.domain not in nd.STANDARD_DOMAINS:
            continue
        if node.op_type == "MatMul":
            if not any(map(g.is_const, node.input)):
                return True
        elif node.op_type in ("Add", "Sub", "Mul", "Div", "Max"):
            pending.extend(node.input)
        elif node.op_type == "Where":
            pending.extend(node.input[1:])
        elif node.op_type in ("Cast", "Clip", "Tanh", *views):
            pending.append(node.input[0])
    return False
