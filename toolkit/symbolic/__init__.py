"""Symbolic integers for tensor dimensions, and their parser.

    parse("floor((h - 1)/2) + 1") == ceildiv(symbol("h"), 2)

The ring is in `toolkit.symbolic.polynomial`, division and order in `toolkit.symbolic.division`.
"""

from __future__ import annotations

import ast
from functools import lru_cache, reduce
from typing import TypeAlias

from toolkit.symbolic.division import (
    bounds,
    ceildiv,
    evaluate,
    floordiv,
    is_nonneg,
    is_positive,
    maximum,
    minimum,
    mod,
    substitute,
)
from toolkit.symbolic.polynomial import MAX_DEGREE, Dim, Expr, symbol, syntax, unknown

__all__ = [
    "Dim",
    "Expr",
    "bounds",
    "ceildiv",
    "evaluate",
    "floordiv",
    "is_nonneg",
    "is_positive",
    "maximum",
    "minimum",
    "mod",
    "parse",
    "substitute",
    "symbol",
    "unknown",
]


@lru_cache(maxsize=4096)
def parse(text: str) -> Dim:
    """Parse the result of `str`, or a dim_param: `past + 1`, `floor(h/2 - 1/2)`, `Max(1, s0)`.

    Other text is the name of a symbol as it stands: `input.1`, `seq-len`, `N/A`. Anonymous integers
    cannot be parsed: `?3` is a name. The result keeps `text`.
    """
    value = None if text.isidentifier() else _expression(text)
    if value is None:
        return symbol(text)
    if isinstance(value, Expr) and str(value) != text:
        return Expr(value.terms, text=text)
    return value


_Ratio: TypeAlias = tuple[Dim, Dim]


def _expression(text: str) -> Dim | None:
    tree = syntax(text)
    if tree is None:
        return None
    try:
        value, divisor = _read(tree)
        if isinstance(divisor, Expr):
            return None
        # A dimension is an integer: h/2 implies that 2 divides h.
        value = floordiv(value, divisor)
    except (ValueError, ZeroDivisionError, RecursionError):
        return None
    return None if isinstance(value, Expr) and value.anonymous else value


def _read(node: ast.expr) -> _Ratio:
    """Return numerator and denominator; raises ValueError for anything but arithmetic."""
    match node:
        case ast.Name(id=name) | ast.Constant(value=str(name)):
            return symbol(name), 1
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number, 1
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            a, b = _read(operand)
            return 0 - a, b
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            if not 0 < power <= MAX_DEGREE:
                raise ValueError(f"power {power}")
            base = _read(left)
            return reduce(lambda x, _: _read_binary(x, ast.Mult(), base), range(power - 1), base)
        case ast.BinOp(left=left, op=op, right=right):
            return _read_binary(_read(left), op, _read(right))
        case ast.Call(func=ast.Name(id=name), args=[arg], keywords=[]) if name in _ROUNDINGS:
            return _ROUNDINGS[name](*_read(arg)), 1
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as args, keywords=[]):
            if name not in _FUNCTIONS or (len(args) > 2 and name.lower() not in ("min", "max")):
                raise ValueError(f"function {name} of {len(args)}")
            return reduce(_FUNCTIONS[name], [_whole(_read(arg)) for arg in args]), 1
        case _:
            raise ValueError(type(node).__name__)


def _read_binary(x: _Ratio, op: ast.operator, y: _Ratio) -> _Ratio:
    (a, b), (c, d) = x, y
    match op:
        case ast.Add():
            return (a + c, b) if b == d else (a * d + c * b, b * d)
        case ast.Sub():
            return (a - c, b) if b == d else (a * d - c * b, b * d)
        case ast.Mult():
            return a * c, b * d
        case ast.Div():
            return a * d, b * c
        case ast.FloorDiv():
            return floordiv(a * d, b * c), 1
        case ast.Mod():
            return mod(_whole(x), _whole(y)), 1
        case _:
            raise ValueError(type(op).__name__)


def _whole(ratio: _Ratio) -> Dim:
    if ratio[1] != 1:
        raise ValueError("a fraction")
    return ratio[0]


# The names of functions in the output of `str`, sympy and torch.
_ROUNDINGS = {"floor": floordiv, "ceil": ceildiv, "ceiling": ceildiv}
_FUNCTIONS = {
    **dict.fromkeys(("min", "Min"), minimum),
    **dict.fromkeys(("max", "Max"), maximum),
    **dict.fromkeys(("mod", "Mod", "PythonMod"), mod),
    "FloorDiv": floordiv,
    "CeilDiv": ceildiv,
}
