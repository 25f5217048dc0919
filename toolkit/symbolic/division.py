"""Arithmetic on `Dim`s beyond the ring: division, order, substitution.

Named sizes are assumed to be >= 0, and divisors nonzero: a graph that divides by 0 does not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from math import gcd
from typing import TypeAlias, cast

from toolkit.symbolic.polynomial import (
    CALL,
    SYMBOL,
    Atom,
    Dim,
    Expr,
    Monomial,
    Terms,
    call,
    make,
    terms_of,
    times,
)

# --- division ----------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def floordiv(a: Dim, b: Dim) -> Dim:
    """Return floor(a/b), simplified: (a*b + a)//a == b + 1. Raises ZeroDivisionError for b == 0."""
    if isinstance(b, Expr):
        a, b, _ = _cancel(a, b)
    if isinstance(b, Expr):
        return _floor_by_expr(a, b)
    return _floor_by_number(a, b) if isinstance(a, Expr) else a // b


def ceildiv(a: Dim, b: Dim) -> Dim:
    """Return ceil(a/b)."""
    exact = _exact_quotient(a, b) if isinstance(b, Expr) else None
    if exact is not None:
        return exact
    # The first form, that of exporters, is correct for positive divisors only.
    return floordiv(a + b - 1, b) if is_nonneg(b) else 0 - floordiv(0 - a, b)


@lru_cache(maxsize=4096)
def mod(a: Dim, b: Dim) -> Dim:
    """Return a - b*floor(a/b), with the sign of b. Raises ZeroDivisionError for b == 0."""
    if isinstance(b, Expr):
        a, b, factor = _cancel(a, b)
        return factor * (_mod_by_expr(a, b) if isinstance(b, Expr) else mod(a, b))
    return _mod_by_number(a, b) if isinstance(a, Expr) else a % b


def _floor_by_number(a: Expr, number: int) -> Dim:
    if number < 0:
        return floordiv(-a, -number)
    whole = _each(a, lambda factor: factor // number)
    rest = _each(a, lambda factor: factor % number)
    if not isinstance(rest, Expr):
        return whole
    shared = _shared_factor(rest, number)
    if shared > 1:  # floor((2*a + 1)/4) = floor(a/2)
        return whole + floordiv(_each(rest, lambda factor: factor // shared), number // shared)
    floors = [
        monomial
        for monomial, factor in rest.terms.items()
        if factor == 1 and len(monomial) == 1 and monomial[0].op == "floor"
        if isinstance(monomial[0].args[1], int)
    ]
    if len(floors) == 1:  # floor((floor(a/2) + b)/3) = floor((a + 2*b)/6)
        inner, divisor = floors[0][0].args
        others = rest - Expr({floors[0]: 1})
        return whole + floordiv(inner + others * divisor, number * divisor)
    constant = _constant_floor(rest, number)
    return whole + (call("floor", rest, number) if constant is None else constant)


def _mod_by_number(a: Expr, number: int) -> Dim:
    if number < 0:
        return 0 - mod(-a, -number)
    rest: Dim = 0
    for monomial, factor in a.terms.items():
        base: Dim = make({monomial: 1})
        if len(monomial) == 1 and monomial[0].op == "mod":
            inner, divisor = monomial[0].args
            if isinstance(divisor, int) and divisor % number == 0:
                base = inner  # mod(mod(a, 6) + b, 3) = mod(a + b, 3)
        rest = rest + factor * base
    rest = _each(rest, lambda factor: factor % number)
    if not isinstance(rest, Expr):
        return rest
    shared = _shared_factor(rest, number)
    if shared > 1:  # mod(2*a + 1, 4) = 2*mod(a, 2) + 1
        reduced = mod(_each(rest, lambda factor: factor // shared), number // shared)
        return shared * reduced + rest.terms.get((), 0) % shared
    constant = _constant_floor(rest, number)
    return call("mod", rest, number) if constant is None else rest - constant * number


def _floor_by_expr(a: Dim, b: Expr) -> Dim:
    exact = _exact_quotient(a, b)
    if exact is not None:
        return exact
    whole, rest = _split(a, b)
    if whole != 0:
        return whole + floordiv(rest, b)
    constant = _constant_floor(a, b)
    return call("floor", a, b) if constant is None else constant


def _mod_by_expr(a: Dim, b: Expr) -> Dim:
    if _exact_quotient(a, b) is not None:
        return 0
    whole, rest = _split(a, b)
    if whole != 0:
        return mod(rest, b)
    constant = _constant_floor(a, b)
    return call("mod", a, b) if constant is None else a - b * constant


def _each(dim: Dim, change: Callable[[int], int]) -> Dim:
    """Apply a function to every coefficient."""
    return make({monomial: change(factor) for monomial, factor in terms_of(dim).items()})


def _shared_factor(a: Expr, number: int) -> int:
    """Return the greatest common divisor of `number` and the coefficients of sizes in `a`."""
    return gcd(number, *(factor for monomial, factor in a.terms.items() if monomial))


def _constant_floor(a: Dim, b: Dim) -> int | None:
    """Return floor(a/b) if the bounds allow only one value."""
    low, high = bounds(a)
    if low is None or high is None or not is_nonneg(b):
        return None
    if isinstance(b, int):
        return low // b if low // b == high // b else None
    least = max(1, bounds(b)[0] or 0)
    if low >= 0 and high < least:
        return 0
    return -1 if -least <= low and high < 0 else None


def _lead(terms: Terms) -> Monomial:
    """Return the leading monomial in a graded order, under which long division terminates."""
    return min(terms, key=lambda monomial: (-len(monomial), monomial))


def _without(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    """Return the quotient of two monomials, or None."""
    rest = list(monomial)
    for atom in divisor:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _cancel(a: Dim, b: Expr) -> tuple[Dim, Dim, Dim]:
    """Return a and b without their common factor, and the factor; b's leading term is positive."""
    shared = reduce(lambda x, y: x & y, map(Counter, (*terms_of(a), *b.terms)))
    monomial = tuple(sorted(shared.elements()))
    number = gcd(*terms_of(a).values(), *b.terms.values())
    if b.terms[_lead(b.terms)] < 0:
        number = -number

    def divided(terms: Terms) -> Dim:
        rest = {_without(other, monomial): factor // number for other, factor in terms.items()}
        return make(cast(Terms, rest))

    return divided(terms_of(a)), divided(b.terms), make({monomial: number})


def _exact_quotient(a: Dim, b: Expr) -> Dim | None:
    """Return the polynomial q with q*b == a, by long division, or None."""
    lead = _lead(b.terms)
    rest, quotient = dict(terms_of(a)), Terms()
    while rest:
        monomial = _lead(rest)
        missing = _without(monomial, lead)
        number, remainder = divmod(rest[monomial], b.terms[lead])
        if missing is None or remainder:
            return None
        quotient[missing] = number
        for other, factor in b.terms.items():
            key = times(missing, other)
            rest[key] = rest.get(key, 0) - number * factor
            if not rest[key]:
                del rest[key]
    return make(quotient)


def _split(a: Dim, b: Expr) -> tuple[Dim, Dim]:
    """Return (q, r) with a == q*b + r; q is 0 if b has several terms."""
    if len(b.terms) > 1:
        return 0, a
    [(divisor, number)] = b.terms.items()
    quotient, rest = Terms(), Terms()
    for monomial, factor in terms_of(a).items():
        missing = _without(monomial, divisor)
        if missing is None:
            rest[monomial] = factor
        else:
            quotient[missing], rest[monomial] = divmod(factor, number)
    return make(quotient), make(rest)


# --- order -------------------------------------------------------------------------------------


def minimum(a: Dim, b: Dim) -> Dim:
    """Return the smaller of two sizes."""
    return _extreme("min", a, b)


def maximum(a: Dim, b: Dim) -> Dim:
    """Return the larger of two sizes."""
    return _extreme("max", a, b)


@lru_cache(maxsize=4096)
def _extreme(op: str, a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b) if op == "min" else max(a, b)

    def settles(x: Dim, y: Dim) -> bool:
        """Return whether x makes y redundant."""
        return is_nonneg(y - x if op == "min" else x - y)

    args: list[Dim] = []
    for dim in (a, b):
        atom = dim.atom if isinstance(dim, Expr) else None
        args.extend(atom.args if atom and atom.op == op else [dim])
    kept: list[Dim] = []
    for arg in args:
        if not any(settles(other, arg) for other in kept):
            kept = [*(other for other in kept if not settles(arg, other)), arg]
    return kept[0] if len(kept) == 1 else call(op, *sorted(kept, key=str))


Interval: TypeAlias = tuple[int | None, int | None]


def bounds(dim: Dim) -> Interval:
    """Return an interval that contains `dim`; None for an unbounded end."""
    low: int | None = 0
    high: int | None = 0
    for monomial, factor in terms_of(dim).items():
        least, most = reduce(_interval_product, map(_atom_bounds, monomial), (1, 1))
        if factor < 0:
            least, most = most, least
        low = None if low is None or least is None else low + factor * least
        high = None if high is None or most is None else high + factor * most
    return low, high


def is_nonneg(dim: Dim) -> bool:
    """Return whether `dim` is provably >= 0."""
    low, _ = bounds(dim)
    return low is not None and low >= 0


def is_positive(dim: Dim) -> bool:
    """Return whether `dim` is provably > 0."""
    low, _ = bounds(dim)
    return low is not None and low > 0


def _interval_product(x: Interval, y: Interval) -> Interval:
    if x == (1, 1):
        return y
    (a, b), (c, d) = x, y
    if a is None or c is None or a < 0 or c < 0:
        return None, None
    return a * c, (None if b is None or d is None else b * d)


def _atom_bounds(atom: Atom) -> Interval:
    if atom.kind != CALL:
        return (0 if atom.kind == SYMBOL or atom.op else None), None
    lows, highs = zip(*map(bounds, atom.args), strict=True)
    if atom.op == "min":
        known = [high for high in highs if high is not None]
        return (None if None in lows else min(lows)), min(known, default=None)
    if atom.op == "max":
        known = [low for low in lows if low is not None]
        return max(known, default=None), (None if None in highs else max(highs))
    divisor = atom.args[1]
    if not is_nonneg(divisor):
        return None, None
    if atom.op == "mod":
        return 0, (None if highs[1] is None else highs[1] - 1)
    low, high = lows[0], highs[0]
    if isinstance(divisor, int):
        return (None if low is None else low // divisor), (
            None if high is None else high // divisor
        )
    return (0, high) if is_nonneg(atom.args[0]) else (None, None)


# --- values ------------------------------------------------------------------------------------

_OPS = {"floor": floordiv, "mod": mod, "min": minimum, "max": maximum}


def substitute(dim: Dim, sizes: Mapping[str, Dim]) -> Dim:
    """Replace named sizes in `dim` simultaneously."""
    if not isinstance(dim, Expr):
        return dim
    total: Dim = 0
    for monomial, factor in dim.terms.items():
        term: Dim = factor
        for atom in monomial:
            value: Dim | None = None
            if atom.kind == SYMBOL:
                value = sizes.get(str(atom.key))
            elif atom.kind == CALL:
                value = reduce(_OPS[atom.op], [substitute(arg, sizes) for arg in atom.args])
            term = term * (Expr({(atom,): 1}) if value is None else value)
        total = total + term
    return total


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    """Return the value of `dim` at these sizes; raises KeyError if one is missing."""
    value = substitute(dim, sizes)
    if isinstance(value, Expr):
        raise KeyError(f"{dim}: no size is given for {', '.join(sorted(value.symbols)) or value}")
    return value
