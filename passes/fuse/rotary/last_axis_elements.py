"""Follow the elements of heads [a, b, c, n] through slices, concatenations, negations and views.

The chain from x to a value is evaluated on the numbers 1 to n in place of the elements of the last
axis; a negated element is a negative number. So x[..., i::k] is the same in all its forms, such as
a column of the view x.reshape(a, b, c, n / k, k).
"""

from __future__ import annotations

from math import prod

import numpy as np
from onnx import NodeProto

from passes.analysis.axis_flow import carried_from
from passes.analysis.const_eval import evaluate
from passes.analysis.operands import whole
from toolkit.ir import Array, Graph, node as nd
from toolkit.ir.op_traits import VIEWS

_MAX_CHAIN = 8
_LEADING = 3
"""Number of axes before the elements."""
_SELECTING = ("Slice", "Split", "Gather")


def last_size(g: Graph, value: str) -> int | None:
    """Return the size of the last axis, or None."""
    shape = g.shape(value)
    return shape[-1] if shape and isinstance(shape[-1], int) else None


def elements_of(g: Graph, value: str, source: str) -> list[int] | None:
    """Return the elements of `source`, numbered from 1, in `value`; negative if negated."""
    found = _followed(g, value, source, _MAX_CHAIN)
    return None if found is None else found.reshape(-1).tolist()


def source_of(g: Graph, parts: dict[str, list[int]]) -> str | None:
    """Return the nearest value that consists of `parts`, given the elements of each part.

    It is [a, b, c, n] or a view of that with more axes.
    """
    value, size = next(iter(parts)), sum(map(len, parts.values()))
    for _ in range(_MAX_CHAIN):
        node = g.producer(value)
        if node is None or not nd.is_op(node, *_SELECTING, *VIEWS):
            return None
        value = node.input[0]
        if prod(_trailing(g, value) or [0]) == size and all(
            elements_of(g, part, value) == elements for part, elements in parts.items()
        ):
            return value
    return None


def _trailing(g: Graph, value: str) -> list[int] | None:
    shape = g.shape(value)
    return None if shape is None else whole(shape[_LEADING:])


def _followed(g: Graph, value: str, source: str, depth: int) -> Array | None:
    shape, own = g.shape(value), g.shape(source)
    sizes, node = _trailing(g, value), g.producer(value)
    if not depth or shape is None or own is None or sizes is None:
        return None
    if shape[:_LEADING] != own[:_LEADING]:
        return None
    count = prod(_trailing(g, source) or [0])
    if prod(sizes) == count and _unviewed(g, value) == _unviewed(g, source):
        return np.arange(1, count + 1).reshape(1, 1, 1, *sizes)
    if node is None or not (nd.is_op(node, "Neg", *VIEWS) or _is_along_elements(g, node)):
        return None
    count = len(node.input) if nd.is_op(node, "Concat") else 1
    found = (_followed(g, name, source, depth - 1) for name in node.input[:count])
    arrays = [array for array in found if array is not None]
    if len(arrays) < count:
        return None
    if nd.is_op(node, *VIEWS):
        return arrays[0].reshape(1, 1, 1, *sizes)
    constants = [g.const(name) if name else None for name in node.input[count:]]
    results = evaluate(node, [*arrays, *constants], g.opset())
    return None if results is None else results[list(node.output).index(value)]


def _is_along_elements(g: Graph, node: NodeProto) -> bool:
    """Return whether a Slice, Split, Gather or Concat leaves the first three axes as they are."""
    if not nd.is_op(node, *_SELECTING, "Concat"):
        return False
    sources = carried_from(g, node)
    return sources is not None and sources[:_LEADING] == tuple(range(_LEADING))


def _unviewed(g: Graph, value: str) -> str:
    """Return the value before a chain of views: it has the same elements in the same order."""
    for _ in range(_MAX_CHAIN):
        node = g.producer(value)
        if node is None or not nd.is_op(node, *VIEWS):
            break
        value = node.input[0]
    return value
