"""Casts that are no-ops, and chains of Casts that one Cast replaces."""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from toolkit.ir import Graph, node as nd
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
"""Number of bits of the largest value of each integer type."""

_SIGNED = frozenset((TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64))

_FLOATS: dict[int, tuple[int, int]] = {
    TensorProto.FLOAT16: (11, 5),
    TensorProto.BFLOAT16: (8, 8),
    TensorProto.FLOAT: (24, 8),
    TensorProto.DOUBLE: (53, 11),
}
"""Bits of the significand and of the exponent of each float type; the 8-bit types saturate and are
not listed."""


@rewrite(op.Cast(x), op.CastLike(x, var("like")))
def cast_to_same_type(g: Graph, x: str, like: str | None, node: NodeProto) -> str | None:
    """Remove a Cast or CastLike to the type that the value has."""
    target = _target(node) if like is None else g.dtype(like)
    return x if target and target == g.dtype(x) else None


@rewrite(op.Cast(op.Cast(x).shared().named("inner")))
def cast_of_cast(g: Graph, x: str, inner: NodeProto, node: NodeProto) -> str | None:
    """Skip a Cast to a type that represents every value of the source type."""
    first, middle, last = g.dtype(x), _target(inner), _target(node)
    if not holds(first, middle):
        return None
    if last == first:
        return x
    if not _same_result(first, middle, last):
        return None
    return g.op("Cast", x, at=node, to=last)


def holds(narrow: int, wide: int) -> bool:
    """Return whether every value of the type `narrow` is a value of the type `wide`."""
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


def _same_result(first: int, middle: int, last: int) -> bool:
    """Return whether a Cast to `last` is the same from `first` and from an equal `middle` value.

    Out of range of an integer type, integers wrap and floats are undefined. So `first` and `middle`
    must be of one kind, or all values in range.
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
