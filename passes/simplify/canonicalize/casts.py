"""Casts that change nothing, and chains of Casts of which one is enough."""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.pattern import op, var
from toolkit.rewriting.rule import rewrite

x = var("x")

_BITS: dict[int, int] = {
    TensorProto.INT8: 7,
    TensorProto.INT16: 15,
    TensorProto.INT32: 31,
    TensorProto.INT64: 63,
    TensorProto.UINT8: 8,
    TensorProto.UINT16: 16,
    TensorProto.UINT32: 32,
    TensorProto.UINT64: 64,
}
"""Integers: how many bits the largest value has."""

_SIGNED = frozenset((TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64))

_FLOATS: dict[int, tuple[int, int]] = {
    TensorProto.FLOAT16: (11, 5),
    TensorProto.BFLOAT16: (8, 8),
    TensorProto.FLOAT: (24, 8),
    TensorProto.DOUBLE: (53, 11),
}
"""Floats: bits of the significand and of the exponent. The 8-bit formats saturate: left alone."""


@rewrite(op.Cast(x), op.CastLike(x, var("like")))
def cast_to_same_type(g: Graph, x: str, like: str | None, node: NodeProto) -> str | None:
    """Remove a Cast or CastLike to the type that the value has."""
    target = _target(node) if like is None else g.dtype(like)
    return x if target and target == g.dtype(x) else None


@rewrite(op.Cast(op.Cast(x).shared().named("inner")))
def cast_of_cast(g: Graph, x: str, inner: NodeProto, node: NodeProto) -> str | None:
    """The detour over a type that holds every value of the first one leaves no trace."""
    first, middle, last = g.dtype(x), _target(inner), _target(node)
    if not holds(first, middle):
        return None
    if last == first:
        return x
    if not _same_on_the_way(first, middle, last):
        return None
    return g.op("Cast", x, at=node, to=last)


def holds(narrow: int, wide: int) -> bool:
    """Whether every value of the one element type is a value of the other."""
    if narrow == wide:
        return narrow != 0
    if narrow == TensorProto.BOOL:
        return wide in _BITS or wide in _FLOATS
    if narrow in _BITS and wide in _BITS:
        if narrow in _SIGNED and wide not in _SIGNED:
            return False
        return _BITS[narrow] <= _BITS[wide]
    if narrow in _BITS and wide in _FLOATS:
        # A bfloat16 reaches far enough for any integer, a float16 only to 65504.
        significand, exponent = _FLOATS[wide]
        return _BITS[narrow] <= significand and _BITS[narrow] < 2 ** (exponent - 1)
    if narrow in _FLOATS and wide in _FLOATS:
        return all(a <= b for a, b in zip(_FLOATS[narrow], _FLOATS[wide], strict=True))
    return False


def _same_on_the_way(first: int, middle: int, last: int) -> bool:
    """Whether `last` comes out alike from `first` and from an equal value of `middle`.

    A number that does not fit into an integer type wraps when it is an integer and is undefined
    when it is a float, so the kind must be the same, or the number must fit.
    """
    if last == TensorProto.BOOL:
        return first in _BITS or first in _FLOATS
    if last not in _BITS and last not in _FLOATS:
        return False
    if last in _FLOATS or holds(first, last):
        return True
    return (first in _BITS) == (middle in _BITS)


def _target(node: NodeProto) -> int:
    return nd.attr(node, "to", 0)


RULES = (cast_to_same_type, cast_of_cast)
