"""Matchers of operators: type, attributes, and operands, in any order if they commute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from onnx import NodeProto

from toolkit.ir import node as nd
from toolkit.ir.op_schema import schema_of
from toolkit.ir.op_traits import COMMUTATIVE, COMMUTATIVE_VARIADIC
from toolkit.pattern import dsl
from toolkit.pattern.backtracking import UNBOUND, Goals, Search
from toolkit.pattern.leaf_matchers import Breadth, Matcher, close_enough

_ANY_ORDER = COMMUTATIVE | COMMUTATIVE_VARIADIC
"""Operators whose operands are matched in any order, up to rounding."""


head = nd.qualified
"""The operator of a node, as the index key of rules."""


def keys(ops: dsl.OpType) -> list[str]:
    """Return the index keys of operator types."""
    return [f"{ops.domain}::{name}" if ops.domain else name for name in ops.names]


def operator(
    pattern: dsl.Node, output: int, inputs: list[Matcher], shared: bool, reused: bool
) -> Matcher:
    """Match a result of a node. A `reused` pattern object matches the same node everywhere."""
    types, more = pattern.op_types, pattern.more
    domains = (pattern.domain,) if pattern.domain else nd.STANDARD_DOMAINS
    attributes_fit = _attributes(pattern)
    arrange = _arrangement(pattern, inputs)
    expected = " or ".join(types)

    def step(s: Search, value: str, rest: Goals) -> Goals:
        node = s.producer(value)
        if node is None or node.op_type not in types or node.domain not in domains:
            return s.recording and s.fail(value, f"expected {expected}, found {s.describe(value)}")
        if output >= len(node.output) or node.output[output] != value:
            return s.recording and s.fail(
                value, f"'{value}' is not output {output} of {nd.label(node)}"
            )
        if reused:
            seen = s.bound.get(pattern)
            if seen is node:
                return rest
            if seen is not None:
                return s.recording and s.fail(
                    value, f"expected {nd.label(seen)} again, found {nd.label(node)}", exact=True
                )
            s.bind(pattern, node)
        s.found(node, shared)
        if not shared and not s.is_inner(value):
            return False
        if attributes_fit is not None and not attributes_fit(s, value, node):
            return False
        values = nd.without_blanks(node.input)
        if len(values) < len(inputs):
            values.extend([""] * (len(inputs) - len(values)))
        elif len(values) > len(inputs) and not more:
            return s.recording and s.fail(value, f"{nd.label(node)} has more inputs than expected")
        return arrange(s, value, values, rest)

    def accepts(s: Search, value: str) -> bool:
        node = s.producer(value)
        return node is not None and node.op_type in types and node.domain in domains

    heads = frozenset(keys(dsl.OpType(types, pattern.domain)))
    return Matcher(step, accepts, heads, Breadth.OPERATOR)


# Inputs ------------------------------------------------------------------------------------------


def _arrangement(
    pattern: dsl.Node, inputs: list[Matcher]
) -> Callable[[Search, str, list[str], Goals], Goals]:
    """Return a function that matches the operands of a node, in order or in any order."""
    has_numbers = any(isinstance(part, (dsl.Number, dsl.Scalar)) for part in pattern.inputs)
    rank_matters = has_numbers and len(inputs) > 1
    commutes = not pattern.domain and _ANY_ORDER.issuperset(pattern.op_types)
    operands = UnorderedOperands(inputs)
    last_first = [(i, part.step) for i, part in reversed(list(enumerate(inputs)))]
    # While near misses are recorded, operators come first: see UnorderedOperands.
    recorded = sorted(last_first, key=lambda item: inputs[item[0]].is_structure)

    def in_order(s: Search, value: str, values: list[str], rest: Goals) -> Goals:
        if rank_matters and not _keeps_rank(s, value, values):
            return False
        for index, step in recorded if s.recording else last_first:
            rest = (step, values[index], rest)
        return rest

    def in_any_order(s: Search, value: str, values: list[str], rest: Goals) -> Goals:
        if rank_matters and not _keeps_rank(s, value, values):
            return False
        return assign(s, operands.ordered(s), tuple(values), rest)

    return in_any_order if commutes and (len(inputs) > 1 or pattern.more) else in_order


def _keeps_rank(s: Search, value: str, values: list[str]) -> bool:
    for one in values:
        if s.scalar(one) is not None and not s.keeps_rank(one, values):
            return s.recording and s.fail(
                value, f"constant '{one}' raises the rank of the result", exact=True
            )
    return True


class UnorderedOperands:
    """Patterns of operands in any order, sorted for speed or for near misses.

    The narrowest pattern fails soonest. While near misses are recorded, operators come first: the
    report of a wrong constant then has all the operators that matched.
    """

    __slots__ = ("_fast", "_recorded")

    def __init__(self, patterns: Sequence[Matcher]) -> None:
        self._fast = tuple(sorted(patterns, key=lambda part: part.breadth))
        self._recorded = tuple(sorted(self._fast, key=lambda part: not part.is_structure))

    def ordered(self, s: Search) -> tuple[Matcher, ...]:
        """Return the patterns in the order to assign them."""
        return self._recorded if s.recording else self._fast


def assign(s: Search, patterns: Sequence[Matcher], values: tuple[str, ...], rest: Goals) -> Goals:
    """Assign each pattern a different value, in every possible way; some may be left over."""
    if not patterns:
        return rest
    first, others = patterns[0], patterns[1:]
    places: dict[str, int] = {}
    for i, one in enumerate(values):
        places.setdefault(one, i)
    distinct = list(places.values())
    choices = distinct if s.recording else _plausible(s, patterns, values, distinct)
    for index in choices:
        left = (*values[:index], *values[index + 1 :])
        goals: Goals = (first.step, values[index], assign_goal(others, left, rest))
        if index == choices[-1]:
            return goals
        mark = len(s.trail)
        if s.solve(goals):
            return None
        s.undo(mark)
    return False


def assign_goal(patterns: Sequence[Matcher], values: tuple[str, ...], rest: Goals) -> Goals:
    """Return `assign` as a goal, or its only alternative."""
    if not patterns:
        return rest
    if len(values) == 1:
        return (patterns[0].step, values[0], rest)
    return (lambda s, _, rest: assign(s, patterns, values, rest), "", rest)


def _plausible(
    s: Search, patterns: Sequence[Matcher], values: tuple[str, ...], choices: list[int]
) -> list[int]:
    """Return the values that the first pattern accepts; of two, the other must fit the second."""
    choices = [i for i in choices if patterns[0].accepts(s, values[i])]
    if len(patterns) == len(values) == 2:
        choices = [i for i in choices if patterns[1].accepts(s, values[1 - i])]
    return choices


# Attributes --------------------------------------------------------------------------------------


def _attributes(pattern: dsl.Node) -> Callable[[Search, str, NodeProto], bool] | None:
    if not pattern.attrs:
        return None

    def fit(s: Search, value: str, node: NodeProto) -> bool:
        for name, wanted in pattern.attrs:
            found = nd.attr(node, name, UNBOUND)
            if found is UNBOUND:
                found = _default(node.op_type, pattern.domain, s.graph.opset(pattern.domain), name)
            if not _attribute_fits(s, wanted, found):
                text = "as required" if callable(wanted) else repr(wanted)
                return s.recording and s.fail(
                    value, f"{nd.label(node)} has {name}={found!r}, not {text}", exact=True
                )
        return True

    return fit


def _attribute_fits(s: Search, wanted: Any, found: Any) -> bool:
    if isinstance(wanted, dsl.Var):
        if not wanted.name:
            return True
        if wanted.name not in s.bound:
            s.bind(wanted.name, found)
        return s.bound[wanted.name] == found
    if callable(wanted):
        return bool(wanted(found))
    if isinstance(wanted, (list, tuple)) and isinstance(found, list):
        several: list[Any] = list(wanted)  # pyright: ignore[reportUnknownArgumentType]
        return len(several) == len(found) and all(map(close_enough, found, several))  # pyright: ignore[reportUnknownArgumentType]
    return close_enough(found, wanted)


@lru_cache(maxsize=4096)
def _default(op_type: str, domain: str, opset: int, name: str) -> Any:
    """Return the default of an attribute in the operator's schema, or None."""
    schema = schema_of(op_type, max(opset, 1), domain)
    attribute = schema.attributes.get(name) if schema is not None else None
    if attribute is None or not attribute.default_value.name:
        return None
    holder = NodeProto()
    holder.attribute.append(attribute.default_value)
    return nd.attr(holder, attribute.default_value.name)
