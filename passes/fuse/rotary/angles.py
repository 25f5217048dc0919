"""Check the angles of rotary embeddings: along which axes `cos` and `sin` are constant.

With an angle per element, the two angles of a pair must be equal, by their values or by the way
they are computed. All heads must have the same angles.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.analysis.axis_flow import BROADCAST, axis_flow
from passes.analysis.view_algebra import Trace, leaves, size_of
from passes.fuse.rotary.last_axis_elements import last_size
from toolkit.ir import Array, Graph, Shape
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.symbolic import Dim, Expr, minimum, substitute

_MAX_CHAIN = 12
_FAR = 1 << 40
"""A length larger than any table."""


def heads_axis(g: Graph, cos: str, sin: str, shape: Shape) -> int:
    """Return the axis of the heads of x: the one along which all angles are equal."""
    one, other = (_same_along(g, angles, shape) for angles in (cos, sin))
    if one != other:
        raise MatchFailure("cos and sin vary along different axes")
    return one


def _same_along(g: Graph, angles: str, shape: Shape) -> int:
    own = g.shape(angles)
    if own is None or not 2 <= len(own) <= 4:
        raise MatchFailure(f"the shape of '{angles}' is not known")
    own = (1,) * (4 - len(own)) + own
    if own[3] != shape[3] or own[0] not in (1, shape[0]):
        raise MatchFailure(f"'{angles}' does not have one angle per element of a head")
    if own[1] == 1 and _is_cut_to(own[2], shape[2]):
        return 1
    if own[2] == 1 and _is_cut_to(own[1], shape[1]):
        return 2
    raise MatchFailure(f"'{angles}' does not have one row per position")


def _is_cut_to(own: Dim, length: Dim) -> bool:
    """Return whether there is one row per position in every run that does not fail.

    A table cut to `length` has min(rows, length) rows: with fewer rows, the product would fail.
    """
    if own == length or not isinstance(own, Expr) or not isinstance(length, Expr):
        return own == length
    rows = substitute(own, dict.fromkeys(length.symbols, _FAR))
    return isinstance(rows, int) and 1 < rows < _FAR and own == minimum(rows, length)


def is_doubled(g: Graph, value: str, interleaved: bool) -> bool:
    """Return whether both elements of a pair have the same angle."""
    size = last_size(g, value)
    for _ in range(_MAX_CHAIN):
        constant = g.const(value)
        if constant is not None:
            return _array_is_doubled(constant, interleaved)
        if _is_repeated(g, value, interleaved):
            return True
        node = g.producer(value)
        following = None if node is None else _angle_source(g, node)
        if following is None or last_size(g, following) != size:
            return False
        value = following
    return False


def _angle_source(g: Graph, node: NodeProto) -> str | None:
    """Return the only operand that varies along the last axis, if the result carries that axis."""
    flow = axis_flow(g, node)
    found = () if flow is None else flow.operands.items()
    varying = [(i, axes) for i, axes in found if axes.sources[-1:] not in ((), (BROADCAST,))]
    if len(varying) != 1:
        return None
    [(index, axes)] = varying
    return node.input[index] if axes.sources[-1] + 1 == g.rank(node.input[index]) else None


def _is_repeated(g: Graph, value: str, interleaved: bool) -> bool:
    """Return whether the last axis repeats one of half the size, by element or as a whole."""
    trace = Trace(g, value)
    for source in trace.sources:
        own = {factor for axis in source.axes for factor in leaves(axis)}
        last = leaves(trace.axes[-1])
        repeats = [factor for factor in last if factor not in own]
        if size_of(repeats) == 2 and len(last) > 1:
            return last[-1] in repeats if interleaved else last[0] in repeats
    return False


def _array_is_doubled(array: Array, interleaved: bool) -> bool:
    size = array.shape[-1] if array.ndim else 0
    if size < 2 or size % 2:
        return False
    if interleaved:
        return bool(np.array_equal(array[..., ::2], array[..., 1::2]))
    return bool(np.array_equal(array[..., : size // 2], array[..., size // 2 :]))
