"""Matchers of patterns without parts: variables, constants, numbers, omitted operands.

A compiled pattern is a Matcher. Besides its step it has `accepts`, a cheap test that rejects most
values before a choice is tried, and `heads`, the operators that can produce its value.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onnx import helper

from toolkit.pattern import dsl
from toolkit.pattern.backtracking import (
    FLOAT_ROUNDING,
    UNBOUND,
    Goals,
    Search,
    Step,
    close,
    contents,
)

_Test = Callable[[Search, str], bool]

Heads = frozenset[str] | None
"""Operators, as `node.qualified` names them; None for any value."""


class Breadth(enum.IntEnum):
    """How many values match a pattern; the narrowest operand is assigned first."""

    NUMBER = enum.auto()
    CONSTANT = enum.auto()
    OPERATOR = enum.auto()
    OPTIONAL_OPERATOR = enum.auto()
    ANYTHING = enum.auto()


@dataclass(frozen=True, slots=True)
class Matcher:
    """A compiled pattern."""

    step: Step
    accepts: _Test
    heads: Heads
    breadth: Breadth

    @property
    def is_structure(self) -> bool:
        """Whether the pattern requires operators."""
        return self.breadth in (Breadth.OPERATOR, Breadth.OPTIONAL_OPERATOR)


def variable(pattern: dsl.Var) -> Matcher:
    """Match any value, or any constant."""
    name, where = pattern.name, pattern.where
    guarded = bool(pattern.ranks or pattern.dtypes)
    is_const = isinstance(pattern, dsl.Const)

    def step(s: Search, value: str, rest: Goals) -> Goals:
        if not value or (is_const and not s.graph.is_const(value)):
            wanted = "a constant" if is_const else f"a value '{name}'"
            return s.recording and s.fail(value, f"expected {wanted}, found {s.describe(value)}")
        bound = s.bound.get(name, UNBOUND) if name else value
        if bound is UNBOUND:
            s.bind(name, value)
        elif not s.same(bound, value):
            return s.recording and s.fail(
                value, f"expected '{bound}' again as '{name}', found {s.describe(value)}"
            )
        if guarded and not _fits_type(s, pattern, value):
            return False
        if where is not None and not where(s.graph, value):
            return s.recording and s.fail(value, refusal(name, value), exact=True)
        return rest

    def accepts(s: Search, value: str) -> bool:
        if is_const:
            return bool(value) and s.graph.is_const(value)
        bound = s.bound.get(name, UNBOUND)
        return bool(value) and (bound is UNBOUND or not name or s.same(bound, value))

    return Matcher(step, accepts, None, Breadth.CONSTANT if is_const else Breadth.ANYTHING)


def _fits_type(s: Search, pattern: dsl.Var, value: str) -> bool:
    if pattern.ranks:
        rank = s.graph.rank(value)
        if rank not in pattern.ranks:
            what = "an unknown rank" if rank is None else f"rank {rank}"
            wanted = " or ".join(map(str, pattern.ranks))
            return s.recording and s.fail(value, f"'{value}' has {what}, not {wanted}", exact=True)
    if pattern.dtypes:
        dtype = s.graph.dtype(value)
        if dtype not in pattern.dtypes:
            wanted = " or ".join(map(_dtype_name, pattern.dtypes))
            return s.recording and s.fail(
                value, f"'{value}' is of type {_dtype_name(dtype)}, not {wanted}", exact=True
            )
    return True


def number(pattern: dsl.Number) -> Matcher:
    wanted = pattern.value

    def accepts(s: Search, value: str) -> bool:
        found = s.scalar(value)
        return found is not None and close(found[0], wanted, found[1])

    def is_number(s: Search, value: str) -> bool:
        return s.scalar(value) is not None

    return _literal(accepts, f"constant {wanted:.6g}", is_number)


def scalar(pattern: dsl.Scalar) -> Matcher:
    bind = scalar_binder(pattern)

    def step(s: Search, value: str, rest: Goals) -> Goals:
        found = s.scalar(value)
        if found is None:
            return s.recording and s.fail(
                value, f"expected a scalar constant, found {s.describe(value)}"
            )
        return rest if bind(s, value, *found) else False

    def accepts(s: Search, value: str) -> bool:
        return s.scalar(value) is not None

    return Matcher(step, accepts, None, Breadth.CONSTANT)


def vector(pattern: dsl.Vector) -> Matcher:
    wanted = list(pattern.values)

    def accepts(s: Search, value: str) -> bool:
        tensor = s.graph.tensor(value) if value else None
        if tensor is None or list(tensor.dims) != [len(wanted)]:
            return False
        found = contents(s.graph.model.weights.array(tensor))
        return found is not None and all(map(close_enough, found, wanted))

    return _literal(accepts, f"constant {wanted}", lambda s, value: s.graph.is_const(value))


def absent() -> Matcher:
    return _literal(lambda _, value: not value, "no input", lambda _, value: False)


def _literal(accepts: _Test, wanted: str, is_near: _Test) -> Matcher:
    """Match the values that `accepts` allows; failure is an exact reason if `is_near`."""

    def step(s: Search, value: str, rest: Goals) -> Goals:
        if accepts(s, value):
            return rest
        return s.recording and s.fail(
            value, f"expected {wanted}, found {s.describe(value)}", exact=is_near(s, value)
        )

    return Matcher(step, accepts, None, Breadth.NUMBER)


def scalar_binder(pattern: dsl.Scalar) -> Callable[[Search, str, float, float], bool]:
    """Return a function that binds a number to the pattern's name if it satisfies the pattern."""
    name, where = pattern.name, pattern.where

    def bind(s: Search, value: str, found: float, tolerance: float) -> bool:
        bound = s.bound.get(name, UNBOUND)
        if bound is UNBOUND:
            s.bind(name, found)
        elif not close(found, bound, max(tolerance, FLOAT_ROUNDING)):
            return s.recording and s.fail(
                value,
                f"expected constant {bound:.6g} again as '{name}', found {found:.6g}",
                exact=True,
            )
        if where is not None and not where(found):
            return s.recording and s.fail(
                value,
                f"constant {found:.6g} does not satisfy the condition on '{name}'",
                exact=True,
            )
        return True

    return bind


def close_enough(found: Any, wanted: Any) -> bool:
    """Return whether an attribute or an element equals the wanted one, floats up to rounding."""
    if isinstance(found, float) and isinstance(wanted, (int, float)):
        return close(found, wanted, FLOAT_ROUNDING)
    return found == wanted


def refusal(what: str, value: str) -> str:
    """Return the reason for a predicate that does not hold."""
    return f"'{value}' does not satisfy the condition {what}".rstrip()


def _dtype_name(dtype: int) -> str:
    """Return the name of an element type: `float` for TensorProto.FLOAT."""
    return helper.tensor_dtype_to_string(dtype).removeprefix("TensorProto.").lower()
