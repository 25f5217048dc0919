"""What goes into the softmax of an attention, whatever its spelling.

    scores = scale * (query . key^T) + bias_1 + bias_2 + ...

Scales may stand before, between or behind the biases, masks may be added or selected by Where, and
a cap may limit the products (`cap * tanh(x / cap)`). Reading goes from the softmax towards the
product of the two matrices, and keeps what it passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from onnx import NodeProto, TensorProto, helper

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import FLOATS, Shape
from toolkit.rewriting.match_failure import Miss

_LONGEST_CHAIN = 16
_VIEWS = ("Reshape", "Squeeze", "Unsqueeze")

_ABSORBING: dict[int, float] = {TensorProto.FLOAT16: -6e4}
_ABSORBING_ELSE = -1e9
"""From here on, adding a mask value to any reasonable score gives the mask value itself."""


@dataclass(frozen=True, slots=True)
class Bias:
    """A term `factor * value`, or `masked` (a number) where the condition `value` says so."""

    value: str
    rank: int
    """How many axes the scores have that it is added to."""
    factor: float = 1.0
    masked: float | None = None
    where_true: bool = False
    """Whether it is a true condition that masks, or a false one."""
    replaces: bool = False
    """Whether `masked` takes the place of the scores and of all terms behind this one."""
    matrices: Shape = ()
    """The sizes of these scores before the last two axes."""


@dataclass(slots=True)
class Scores:
    """Two matrices to be multiplied, and what happens to the product before the softmax."""

    query: str = ""
    key: str = ""
    """Transposed: [..., head size, sequence]."""
    scale: float = 1.0
    cap: float = 0.0
    head_scale: str = ""
    """A further scale for each head: [heads, 1, 1]."""
    biases: list[Bias] = field(default_factory=list[Bias])
    least: float = -np.inf
    """What the biases are limited to: a sum of two masks is no less than either."""


def read_scores(g: Graph, value: str) -> Scores:
    """The scores that `value` is; raises Miss with the reason when it is none."""
    found = Scores()
    for _ in range(_LONGEST_CHAIN):
        node = g.producer(value)
        if node is None or node.domain not in nd.STANDARD_DOMAINS:
            raise Miss(f"the scores '{value}' are no product of query and key")
        if node.op_type == "MatMul":
            found.query, found.key = node.input
            _added_to(found, g.shape(value) or g.shape(found.query))
            return found
        value = _step(g, node, value, found)
    raise Miss(f"more than {_LONGEST_CHAIN} operators between query . key and the softmax")


def _step(g: Graph, node: NodeProto, value: str, found: Scores) -> str:
    """Pass one operator; the value that leads on towards the product."""
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
            raise Miss(f"{nd.label(node)} is no cap of the scores")
        found.cap, found.scale = found.scale, 1.0
        return node.input[0]
    if op == "Cast" and g.dtype(node.input[0]) in FLOATS and g.dtype(value) in FLOATS:
        return node.input[0]
    grouped_before = _before_views(g, value) if op in _VIEWS else None
    if grouped_before is not None:
        if found.head_scale:
            raise Miss(f"{nd.label(node)} regroups the heads before they are scaled")
        _added_to(found, g.shape(value))
        return grouped_before
    raise Miss(f"{nd.label(node)} stands between query . key and the softmax")


def _added_to(found: Scores, scores: Shape | None) -> None:
    """Note for the terms that were passed since the last view that these are the scores."""
    if scores is not None:
        found.biases = [
            bias if bias.matrices else replace(bias, matrices=scores[:-2]) for bias in found.biases
        ]


def keeps_matrices(g: Graph, value: str) -> bool:
    """Whether a value is no view, or one that regroups the batch: its last axes are as before."""
    return not nd.is_op(g.producer(value), *_VIEWS) or _before_views(g, value) is not None


def _before_views(g: Graph, value: str) -> str | None:
    """What a chain of views makes `value` of, as soon as the last two axes are those of `value`."""
    after, name = g.shape(value), value
    for _ in range(_LONGEST_CHAIN):
        node = g.producer(name)
        if after is None or len(after) < 2 or node is None or not nd.is_op(node, *_VIEWS):
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
        raise Miss(f"{nd.label(node)} subtracts the scores")
    if not sides:
        raise Miss(f"{nd.label(node)} adds no product of query and key")
    # Of two products (relative positions have one of their own) the plainer one is the scores'.
    sides.sort(key=lambda name: not _leads_to_product(g, name, views=()))
    if found.cap or found.head_scale:
        raise Miss(f"{nd.label(node)} is added before the scores are capped, or scaled by head")
    other = node.input[1 - list(node.input).index(sides[0])]
    factor = found.scale if node.op_type == "Add" else -found.scale
    found.biases.append(_bias(g, other, _rank(g, sides[0]), factor))
    return sides[0]


def _bias(g: Graph, value: str, rank: int, factor: float) -> Bias:
    """A term of the scores; one that is 0 where a condition says so is that condition."""
    node = g.producer(value)
    if node is not None and nd.is_op(node, "Where"):
        chosen, other = (_number(g, name) for name in node.input[1:])
        for masked, rest, where_true in ((other, chosen, False), (chosen, other, True)):
            if rest == 0 and masked is not None:
                low = _rounded(masked * factor, g.dtype(value))
                return Bias(node.input[0], rank, masked=low, where_true=where_true)
    return Bias(value, rank, factor)


def _rounded(number: float, dtype: int) -> float:
    """A mask value as the model's own element type has it: the lowest number, doubled, is -inf."""
    with np.errstate(over="ignore"):
        return float(np.array(number).astype(helper.tensor_dtype_to_np_dtype(dtype)))


def _number(g: Graph, value: str) -> float | None:
    """The scalar constant that `value` is."""
    found = g.const(value)
    if found is None or found.size != 1 or found.dtype.kind != "f":
        return None
    return float(found.reshape(-1)[0])


def _rank(g: Graph, value: str) -> int:
    rank = g.rank(value)
    if rank is None:
        raise Miss(f"the number of axes of '{value}' is not known")
    return rank


def _pass_scale(g: Graph, node: NodeProto, found: Scores) -> str:
    for index in (0, 1) if node.op_type == "Mul" else (0,):
        factor = _number(g, node.input[1 - index])
        if factor is not None:
            if not factor or not np.isfinite(factor):
                raise Miss(f"{nd.label(node)} scales by {factor}")
            found.scale *= factor if node.op_type == "Mul" else 1 / factor
            return node.input[index]
    return _pass_scale_of_heads(g, node, found)


def _pass_scale_of_heads(g: Graph, node: NodeProto, found: Scores) -> str:
    """Scales that differ from head to head: those of the query, as the product is linear in it."""
    for scores, scale in (node.input, reversed(node.input)) if node.op_type == "Mul" else ():
        shape, rank = g.shape(scale), g.rank(scores)
        fits = shape is not None and rank is not None and 2 < len(shape) <= rank
        if fits and shape is not None and shape[-2:] == (1, 1) and _leads_to_product(g, scores):
            if found.head_scale or found.scale != 1.0 or found.cap:
                raise Miss(f"{nd.label(node)} scales heads that are scaled already")
            found.head_scale = scale
            return scores
    raise Miss(f"{nd.label(node)} scales by something that is no constant")


def _pass_limit(g: Graph, node: NodeProto, found: Scores) -> str:
    """max(scores, lowest): it keeps two masks, added to each other, from being minus infinity."""
    scores, numbers = node.input[0], [_number(g, name) for name in node.input]
    if numbers[0] is not None and node.op_type == "Max":
        scores, numbers = node.input[-1], numbers[::-1]
    least = numbers[1] if len(numbers) == 2 else None
    dtype = g.dtype(scores)
    lowest = float(np.finfo(helper.tensor_dtype_to_np_dtype(dtype)).min) if dtype in FLOATS else 0
    if least is None or not least <= 0.99 * lowest < 0 or found.cap or found.scale != 1.0:
        raise Miss(f"{nd.label(node)} limits the scores")
    if found.biases:
        raise Miss(f"{nd.label(node)} limits the scores before all is added")
    found.least = max(found.least, least)
    return scores


def _pass_mask(g: Graph, node: NodeProto, found: Scores) -> str:
    """Where(keep, scores, low): adding Where(keep, 0, low) is the same if `low` absorbs scores."""
    condition, chosen, other = node.input
    for scores, low, where_true in ((chosen, other, False), (other, chosen, True)):
        masked = _number(g, low)
        if masked is None or not _leads_to_product(g, scores):
            continue
        if found.cap or found.head_scale:
            raise Miss(f"{nd.label(node)} masks before the scores are capped, or scaled by head")
        absorbing = _ABSORBING.get(g.dtype(low), _ABSORBING_ELSE)
        if not masked <= absorbing and not _leaves_some(g, condition, where_true, masked):
            raise Miss(
                f"{nd.label(node)} masks with {masked:g}: a row that is masked as a whole would "
                "change"
            )
        rank = _rank(g, scores)
        masked = _rounded(masked * found.scale, g.dtype(low))
        found.biases.append(Bias(condition, rank, 1.0, masked, where_true, True))
        return scores
    raise Miss(f"{nd.label(node)} does not select between scores and a constant")


def _leaves_some(g: Graph, condition: str, where_true: bool, masked: float) -> bool:
    """Whether a constant condition masks no row as a whole, and by more than scores can be."""
    keep = g.const(condition)
    if keep is None or keep.ndim < 2 or masked > -1000:
        return False
    kept = ~keep.astype(bool) if where_true else keep.astype(bool)
    return bool(kept.any(axis=-1).all())


def _leads_to_product(g: Graph, value: str, views: tuple[str, ...] = _VIEWS) -> bool:
    """Whether `value` is a product of two matrices that both vary, but for scales and masks."""
    pending, seen = [value], 0
    while pending and seen < 2 * _LONGEST_CHAIN:
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
