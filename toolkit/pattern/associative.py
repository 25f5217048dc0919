"""Match products and sums with operands in any order and association.

A *cut* through the tree of Mul, Div, Reciprocal and Neg (or Add, Sub, Sum and Neg) that computes a
value consists of the operands below it, and the combined scalar constants above it. Only values
with one use lie above a cut. Cuts are tried from the deepest up, if they have as many operands as
the pattern.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from onnx import NodeProto, TensorProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import FLOATS
from toolkit.pattern import dsl
from toolkit.pattern.associative_dsl import combine
from toolkit.pattern.backtracking import Search, close
from toolkit.pattern.leaf_matchers import scalar_binder

_PRODUCT = frozenset(("Mul", "Div", "Reciprocal", "Neg"))
_TOTAL = frozenset(("Add", "Sub", "Sum", "Neg"))
_DIVIDING = ("Div", "Reciprocal")
_MOST_LEVELS = 12
"""The most operators above a cut: enough for any formula, and a bound on the work."""


_MOST_HEADS = 32
"""The largest number of nodes that `heads_above` looks through."""


def heads_above(graph: Graph, node: NodeProto) -> set[str] | None:
    """Return the operators that produce the operands of `node`, or of its product or sum.

    None beyond the limit.
    """
    flat = frozenset[str]().union(*(ops for ops in (_PRODUCT, _TOTAL) if node.op_type in ops))
    heads: set[str] = set()
    pending, budget = list(node.input), _MOST_HEADS
    while pending:
        value = pending.pop()
        producer = graph.producer(value)
        if producer is None:
            continue
        found = nd.qualified(producer)
        heads.add(found)
        if found in flat and graph.user_count(value) == 1:
            budget -= 1
            if not budget:
                return None
            pending.extend(producer.input)
    return heads


@dataclass(frozen=True, slots=True)
class FlatSpec:
    """The cuts that match a product or sum; `absorbs`: scalars join the constant."""

    is_product: bool
    direct: int
    inverse: int
    constant: float
    bind: Callable[[Search, str, float, float], bool] | None
    absorbs: bool
    operators: frozenset[str]
    may_be_bare: bool
    """Whether any value matches, as one operand times 1 or plus 0."""

    @classmethod
    def of(cls, pattern: dsl.Flat) -> FlatSpec:
        """Return the specification of a pattern."""
        neutral = 1.0 if pattern.is_product else 0.0
        stated = pattern.scalar is not None or pattern.constant != neutral
        asks = any(_asks_for_constant(part) for part in (*pattern.direct, *pattern.inverse))
        lone = len(pattern.direct) == 1 and not pattern.inverse
        return cls(
            is_product=pattern.is_product,
            direct=len(pattern.direct),
            inverse=len(pattern.inverse),
            constant=pattern.constant,
            bind=scalar_binder(pattern.scalar) if pattern.scalar is not None else None,
            absorbs=stated or not asks,
            operators=_PRODUCT if pattern.is_product else _TOTAL,
            may_be_bare=lone and (pattern.scalar is not None or not stated),
        )

    @property
    def neutral(self) -> float:
        """The neutral element."""
        return 1.0 if self.is_product else 0.0

    @property
    def text(self) -> str:
        """A description for near misses."""
        count = self.direct + self.inverse
        what = "product" if self.is_product else "sum"
        return f"a {what} of {count} operand{'s' * (count > 1)}, constants aside"


@dataclass(slots=True)
class Cut:
    """Operands, the constant and its tolerance, and the nodes above the cut."""

    direct: tuple[str, ...]
    inverse: tuple[str, ...]
    constant: float
    slack: float
    nodes: tuple[NodeProto, ...]


_Operand = tuple[str, bool]
"""A value, and whether it is inverted (a divisor or subtrahend)."""


@dataclass(slots=True)
class _Level:
    """One node of a product or sum: its operands, and its combined scalar constants."""

    node: NodeProto
    operands: tuple[_Operand, ...]
    constant: float
    slack: float


def cuts(s: Search, value: str, spec: FlatSpec) -> Iterator[Cut]:
    """Yield the cuts below `value` with the right number of operands."""
    top = _open(s, value, spec, top=True)
    if top is not None:
        start = _through(Cut((), (), spec.neutral, 0.0, ()), top, spec, inverted=False)
        yield from _cut(s, spec, top.operands, start)
    if spec.may_be_bare:
        yield Cut((value,), (), spec.neutral, 0.0, ())


def enter(s: Search, value: str, cut: Cut, shared: bool) -> bool:
    """Record the nodes above a cut as matched; return False if one must not be."""
    if cut.nodes and not shared and not s.is_inner(value):
        return False
    for index, node in enumerate(cut.nodes):
        s.found(node, shared and not index, counted=not index)
    return True


def constant_fits(s: Search, value: str, spec: FlatSpec, cut: Cut) -> bool:
    """Compare the constant of a cut with that of the pattern, or bind it."""
    if spec.bind is not None:
        return spec.bind(s, value, cut.constant, cut.slack)
    if spec.is_product:
        agrees = close(cut.constant, spec.constant, cut.slack)
    else:
        agrees = abs(cut.constant - spec.constant) <= cut.slack
    return agrees or (
        s.recording
        and s.fail(
            value, f"expected constant {spec.constant:.6g}, found {cut.constant:.6g}", exact=True
        )
    )


def _cut(s: Search, spec: FlatSpec, undecided: tuple[_Operand, ...], cut: Cut) -> Iterator[Cut]:
    """Yield the cuts with the first of `undecided` above them, then those with it below."""
    s.steps -= 1
    if s.steps < 0:
        return
    if len(cut.direct) > spec.direct or len(cut.inverse) > spec.inverse:
        return
    if len(cut.direct) + len(cut.inverse) + len(undecided) > spec.direct + spec.inverse:
        return
    if not undecided:
        if len(cut.direct) == spec.direct and len(cut.inverse) == spec.inverse:
            yield cut
        return
    (value, inverted), rest = undecided[0], undecided[1:]
    level = _open(s, value, spec) if len(cut.nodes) < _MOST_LEVELS else None
    if level is not None:
        below = tuple((one, flipped != inverted) for one, flipped in level.operands)
        yield from _cut(s, spec, (*below, *rest), _through(cut, level, spec, inverted))
    direct = cut.direct if inverted else (*cut.direct, value)
    inverse = (*cut.inverse, value) if inverted else cut.inverse
    yield from _cut(s, spec, rest, Cut(direct, inverse, cut.constant, cut.slack, cut.nodes))


def _through(cut: Cut, level: _Level, spec: FlatSpec, inverted: bool) -> Cut:
    """Return the cut with one more node above it."""
    constant = combine(spec.is_product, cut.constant, level.constant, inverted)
    nodes = (*cut.nodes, level.node)
    return Cut(cut.direct, cut.inverse, constant, cut.slack + level.slack, nodes)


def _open(s: Search, value: str, spec: FlatSpec, top: bool = False) -> _Level | None:
    """Return the producer of `value` as a level, if it may lie above a cut."""
    node = s.producer(value)
    if node is None or node.op_type not in spec.operators:
        return None
    if node.domain not in nd.STANDARD_DOMAINS or not (top or s.graph.is_used_once(value)):
        return None
    if node.op_type in _DIVIDING and _is_integer(s, (value, *node.input)):
        return None
    operands: list[_Operand] = []
    constant, slack = spec.neutral, 0.0
    if spec.is_product and node.op_type == "Neg":
        constant = -1.0
    for one, inverted in _operands(node, spec.is_product):
        found = _absorbable(s, one, node, spec) if spec.absorbs else None
        if found is None:
            operands.append((one, inverted))
            continue
        number, tolerance = found
        constant = combine(spec.is_product, constant, number, inverted)
        slack += tolerance if spec.is_product else tolerance * abs(number)
    return _Level(node, tuple(operands), constant, slack)


def _operands(node: NodeProto, is_product: bool) -> tuple[_Operand, ...]:
    match node.op_type:
        case "Div" | "Sub":
            return (node.input[0], False), (node.input[1], True)
        case "Reciprocal":
            return ((node.input[0], True),)
        case "Neg":
            return ((node.input[0], not is_product),)
        case _:
            return tuple((one, False) for one in node.input)


def _absorbable(
    s: Search, value: str, node: NodeProto, spec: FlatSpec
) -> tuple[float, float] | None:
    """Return a scalar constant and its tolerance if it is finite, invertible and keeps the rank."""
    found = s.scalar(value)
    if found is None or not math.isfinite(found[0]) or (spec.is_product and not found[0]):
        return None
    return found if s.keeps_rank(value, list(node.input)) else None


def _is_integer(s: Search, values: tuple[str, ...]) -> bool:
    """Return whether these values, all of one type, are integers; unknown types count as floats."""
    dtype = next((d for d in map(s.graph.dtype, values) if d), TensorProto.FLOAT)
    return dtype not in FLOATS


def _asks_for_constant(pattern: dsl.Pattern) -> bool:
    """Return whether an operand matches constants, which the product must not absorb."""
    if isinstance(pattern, (dsl.Const, dsl.Vector)):
        return True
    if isinstance(pattern, dsl.Either):
        return any(map(_asks_for_constant, pattern.options))
    return isinstance(pattern, (dsl.When, dsl.Named)) and _asks_for_constant(pattern.inner)
