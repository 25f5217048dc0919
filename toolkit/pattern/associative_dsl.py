"""The pattern functions `product(...)` and `total(...)`.

Numbers are combined into one constant, `1 / p` and `-p` become inverse operands, and nested
products are flattened, also in alternatives: `product(a | product(b, c), d)` is
`product(a, d) | product(b, c, d)`.
"""

from __future__ import annotations

import math
from typing import TypeGuard

from toolkit.pattern.dsl import Either, Flat, Node, Number, Pattern, Scalar, lift


def product(*factors: Pattern | float) -> Pattern:
    """Match the product of `factors`, in any order and association."""
    return _collect(True, [lift(factor) for factor in factors])


def total(*terms: Pattern | float) -> Pattern:
    """Match the sum of `terms`, in any order and association."""
    return _collect(False, [lift(term) for term in terms])


def combine(is_product: bool, constant: float, number: float, inverted: bool) -> float:
    """Multiply (or add) a constant and a number, or divide (subtract) if it is inverted."""
    if is_product:
        return constant / number if inverted else constant * number
    return constant - number if inverted else constant + number


def _collect(is_product: bool, operands: list[Pattern]) -> Pattern:
    for index, operand in enumerate(operands):
        if isinstance(operand, Either) and any(_is_flat(o, is_product) for o in operand.options):
            before, after = operands[:index], operands[index + 1 :]
            options = (_collect(is_product, [*before, o, *after]) for o in operand.options)
            return Either(tuple(options))
    collected = _Collection(is_product)
    for operand in operands:
        collected.add(operand, inverted=False)
    return collected.pattern()


class _Collection:
    """Collects direct operands, inverse operands and the constant."""

    def __init__(self, is_product: bool) -> None:
        self.is_product = is_product
        self.direct: list[Pattern] = []
        self.inverse: list[Pattern] = []
        self.constant = 1.0 if is_product else 0.0
        self.scalar: Scalar | None = None

    def add(self, operand: Pattern, inverted: bool) -> None:
        if isinstance(operand, Number):
            self._combine(operand.value, inverted)
        elif isinstance(operand, Scalar):
            self._bind(operand, inverted)
        elif _is_flat(operand, self.is_product):
            self._flatten(operand, inverted)
        elif _is_plain(operand, "Neg") and self.is_product:
            self.constant = -self.constant
            self.add(operand.inputs[0], inverted)
        elif _is_plain(operand, "Neg"):
            self.add(operand.inputs[0], not inverted)
        elif (
            self.is_product and _is_plain(operand, "Div") and isinstance(operand.inputs[0], Number)
        ):
            self.add(operand.inputs[0], inverted)
            self.add(operand.inputs[1], not inverted)
        else:
            (self.inverse if inverted else self.direct).append(operand)

    def pattern(self) -> Flat:
        what = "product" if self.is_product else "total"
        neutral = 1.0 if self.is_product else 0.0
        if not self.direct and not self.inverse:
            raise ValueError(f"a {what} needs an operand that is not a number")
        if not math.isfinite(self.constant) or (self.is_product and not self.constant):
            raise ValueError(
                f"the constant of a {what} is {self.constant}: it must be finite and nonzero"
            )
        if self.scalar is not None and self.constant != neutral:
            raise ValueError(f"a {what} either binds its constants by number() or contains numbers")
        direct, inverse = tuple(self.direct), tuple(self.inverse)
        return Flat(self.is_product, direct, inverse, self.constant, self.scalar)

    def _combine(self, value: float, inverted: bool) -> None:
        self.constant = combine(self.is_product, self.constant, value, inverted)

    def _bind(self, scalar: Scalar, inverted: bool) -> None:
        if self.scalar is not None or inverted:
            other = self.scalar.name if self.scalar is not None else "1"
            raise ValueError(
                f"all constants are combined: '{other}' and '{scalar.name}' cannot be distinguished"
            )
        self.scalar = scalar

    def _flatten(self, operand: Flat, inverted: bool) -> None:
        self._combine(operand.constant, inverted)
        if operand.scalar is not None:
            self._bind(operand.scalar, inverted)
        for part in operand.direct:
            self.add(part, inverted)
        for part in operand.inverse:
            self.add(part, not inverted)


def _is_flat(pattern: Pattern, is_product: bool) -> TypeGuard[Flat]:
    return isinstance(pattern, Flat) and pattern.is_product == is_product


def _is_plain(pattern: Pattern, op_type: str) -> TypeGuard[Node]:
    return isinstance(pattern, Node) and pattern.op_types == (op_type,) and not pattern.domain
