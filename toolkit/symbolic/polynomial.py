"""Polynomials with integer coefficients over unknown sizes: the ring under `toolkit.symbolic`.

A `Dim` is an int or an `Expr`; an Expr is never constant. It is a sum of terms, each an integer
times a product of *atoms*. An atom is a named size, an anonymous integer, or one of

    floor(a/b)    mod(a, b) = a - b*floor(a/b)    min(a, ...)    max(a, ...)

whose arguments are Dims in canonical form. Equal polynomials compare equal: a*b + a == a*(b + 1).
"""

from __future__ import annotations

import ast
import itertools
import keyword
import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from operator import index
from typing import NamedTuple, TypeAlias, Union

Dim: TypeAlias = Union[int, "Expr"]

# Repeated squaring grows terms without bound: beyond these limits, a result is unknown.
MAX_TERMS = 512
MAX_DEGREE = 32
MAX_TEXT = 2000

SYMBOL, UNKNOWN, CALL = range(3)


class Atom(NamedTuple):
    """An indivisible factor; a tuple, for fast comparison and hashing."""

    kind: int
    key: str | int
    """The symbol's name, the unknown's number, or the call's text."""
    op: str
    """The function of a call; `nonneg` for an unknown that is known to be >= 0."""
    args: tuple[Dim, ...]


Monomial: TypeAlias = tuple[Atom, ...]  # sorted, one entry for each power; () is the constant's
Terms: TypeAlias = dict[Monomial, int]


class Expr:
    """An integer that depends on unknown sizes. Immutable; `str` is canonical and can be parsed.

    `text` is the text that it was parsed from, if any, for writing it back into a model;
    comparisons ignore it.
    """

    __slots__ = ("_canonical", "_hash", "_text", "terms")

    def __init__(self, terms: Terms, text: str = "") -> None:
        self.terms = terms
        self._text = text
        self._canonical = ""
        self._hash = 0

    def __add__(self, other: Dim) -> Dim:
        terms = _operand(other)
        return NotImplemented if terms is None else _sum(self.terms, terms)

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        terms = _operand(other)
        return NotImplemented if terms is None else _sum(self.terms, terms, -1)

    def __rsub__(self, other: int) -> Dim:
        terms = _operand(other)
        return NotImplemented if terms is None else _sum(terms, self.terms, -1)

    def __mul__(self, other: Dim) -> Dim:
        terms = _operand(other)
        return NotImplemented if terms is None else _product(self.terms, terms)

    __rmul__ = __mul__

    def __neg__(self) -> Expr:
        return Expr({monomial: -factor for monomial, factor in self.terms.items()})

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Expr) and self.terms == other.terms)

    def __hash__(self) -> int:
        if not self._hash:
            self._hash = hash(frozenset(self.terms.items()))
        return self._hash

    def __str__(self) -> str:
        if not self._canonical:
            name = self.name
            bare = name is not None and (name.isidentifier() or syntax(name) is None)
            self._canonical = name if name is not None and bare else _terms_text(self.terms)
        return self._canonical

    def __repr__(self) -> str:
        return f"Expr({self})"

    def __deepcopy__(self, memo: object) -> Expr:
        return self

    def __reduce__(self) -> tuple[Callable[[Terms, str], Expr], tuple[Terms, str]]:
        if self.anonymous:
            raise TypeError(f"{self}: an anonymous size has no meaning in another process")
        return Expr, (self.terms, self._text)

    @property
    def atom(self) -> Atom | None:
        """The only atom of the expression, or None."""
        if len(self.terms) == 1:
            [(monomial, factor)] = self.terms.items()
            if factor == 1 and len(monomial) == 1:
                return monomial[0]
        return None

    @property
    def name(self) -> str | None:
        """The name of a single symbol, or None."""
        atom = self.atom
        return str(atom.key) if atom and atom.kind == SYMBOL else None

    @property
    def text(self) -> str:
        """The text to write into a model: that which was parsed, or else the name or `str`."""
        return self._text or self.name or str(self)

    @property
    def symbols(self) -> frozenset[str]:
        """The names in the expression."""
        return frozenset(str(atom.key) for atom in _leaves(self) if atom.kind == SYMBOL)

    @property
    def anonymous(self) -> bool:
        """Whether the expression depends on an anonymous integer."""
        return any(atom.kind == UNKNOWN for atom in _leaves(self))


@lru_cache(maxsize=4096)
def symbol(name: str) -> Expr:
    """Return the size called `name`, which is >= 0."""
    return Expr({(Atom(SYMBOL, name, "", ()),): 1})


_numbers = itertools.count(1)


def unknown(nonneg: bool = False) -> Expr:
    """Return a new anonymous integer, equal only to itself; `nonneg` if it is known to be >= 0."""
    return Expr({(Atom(UNKNOWN, next(_numbers), "nonneg" if nonneg else "", ()),): 1})


def call(op: str, *args: Dim) -> Dim:
    """Return floor, mod, min or max of arguments, without simplification."""
    text = _call_text(op, args)
    return unknown() if len(text) > MAX_TEXT else Expr({(Atom(CALL, text, op, args),): 1})


def make(terms: Terms) -> Dim:
    """Return the sum of these terms."""
    if 0 in terms.values():
        terms = {monomial: factor for monomial, factor in terms.items() if factor}
    if not terms:
        return 0
    if len(terms) == 1 and () in terms:
        return terms[()]
    return Expr(terms)


def terms_of(dim: Dim) -> Terms:
    """Return the terms of a sum, the inverse of `make`."""
    if isinstance(dim, Expr):
        return dim.terms
    return {(): dim} if dim else {}


def times(a: Monomial, b: Monomial) -> Monomial:
    """Return the product of two monomials."""
    return tuple(sorted(a + b)) if a and b else a or b


def _operand(value: Dim) -> Terms | None:
    """Return the terms of an Expr or an integer, including numpy's; None for anything else."""
    if isinstance(value, Expr):
        return value.terms
    try:
        return terms_of(index(value))
    except TypeError:
        return None


def _sum(a: Terms, b: Terms, sign: int = 1) -> Dim:
    terms = a.copy()
    for monomial, factor in b.items():
        terms[monomial] = terms.get(monomial, 0) + sign * factor
    return make(terms)


def _product(a: Terms, b: Terms) -> Dim:
    if not a or not b:
        return 0
    if len(a) * len(b) > MAX_TERMS or max(map(len, a)) + max(map(len, b)) > MAX_DEGREE:
        return unknown()
    terms: Terms = {}
    for monomial, factor in a.items():
        for other, factor_of_other in b.items():
            key = times(monomial, other)
            terms[key] = terms.get(key, 0) + factor * factor_of_other
    return make(terms)


def _leaves(dim: Dim) -> set[Atom]:
    """Return the symbols and unknowns in `dim`, at any depth."""
    leaves: set[Atom] = set()
    for atom in itertools.chain.from_iterable(terms_of(dim)):
        if atom.kind == CALL:
            leaves.update(*map(_leaves, atom.args))
        else:
            leaves.add(atom)
    return leaves


# --- text: names other than identifiers are quoted inside an expression ---------------------------

_TOKENS = re.compile(
    r"""(?: [^\W\d]\w*(?!\w) | \d+(?!\w) | [-+*/%(),\ ]
          | '(?:[^'\\] | \\[\\'"nrt] | \\x[0-9a-f]{2} | \\u[0-9a-f]{4} | \\U[0-9a-f]{8})*'
          | "(?:[^"\\] | \\[\\'"nrt] | \\x[0-9a-f]{2} | \\u[0-9a-f]{4} | \\U[0-9a-f]{8})*"
        )+""",
    re.VERBOSE,
)
_HYPHENATED = re.compile(r"[^\W\d]\w*(?:-[^\W\d]\w*)+")  # seq-len is a name, not a difference


def syntax(text: str) -> ast.expr | None:
    """Return the syntax tree of text that looks like arithmetic, or None."""
    if not _TOKENS.fullmatch(text) or _HYPHENATED.fullmatch(text):
        return None
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _terms_text(terms: Terms) -> str:
    """Format terms by decreasing degree, positive ones before negative ones."""
    text = ""
    for monomial, factor in sorted(terms.items(), key=lambda t: (-len(t[0]), t[1] < 0, t[0])):
        factors = [str(abs(factor))] if abs(factor) != 1 or not monomial else []
        for atom, power in Counter(monomial).items():
            factors.append(_atom_text(atom) + (f"**{power}" if power > 1 else ""))
        text += (" - " if factor < 0 else " + ") + "*".join(factors)
    return text[3:] if text.startswith(" +") else "-" + text[3:]


def _atom_text(atom: Atom) -> str:
    if atom.kind == UNKNOWN:
        return f"?{atom.key}"
    text = str(atom.key)
    plain = text.isidentifier() and text.isascii() and not keyword.iskeyword(text)
    return text if plain or atom.kind == CALL else repr(text)


def _call_text(op: str, args: tuple[Dim, ...]) -> str:
    texts = [_terms_text(terms_of(arg)) if arg != 0 else "0" for arg in args]
    if op != "floor":
        return f"{op}({', '.join(texts)})"
    top, bottom = texts
    if len(terms_of(args[0])) > 1 or top.startswith("-"):
        top = f"({top})"
    if isinstance(args[1], Expr) and not args[1].atom:
        bottom = f"({bottom})"
    return f"floor({top}/{bottom})"
