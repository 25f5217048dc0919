"""Split a linear map if rows are selected from some parts of its result, not from the others.

    q, k, v = Split(x W + b)    =    q = x W0 + b0,  k, v = Split(x W' + b')

Query, key and value of an attention often come from one product. Where few rows of the query are
used, a product of its own lets the selection move above it. The weights are stored in two pieces,
so they must have no other user.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import int_vector
from passes.motion.sink_slices.find_slices import MOST_USERS, find_slice_behind_view
from toolkit.ir import Array, Graph, Shape, TensorType, node as nd
from toolkit.pattern import const, op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import rewrite

_product = op.MatMul(var("x"), const("weight", rank=2))
_linear = _product | op.Add(_product, const("bias", rank=1))


@rewrite(op.Split(_linear, ...), opset=13)
def part_with_selected_rows(
    g: Graph, x: str, weight: str, bias: str | None, node: NodeProto
) -> tuple[str, ...]:
    """q, k, v = Split(x W + b) as q = x W0 + b0 and k, v = Split(x W' + b')"""
    few = [part for part, name in enumerate(node.output) if _rows_are_selected(g, name)]
    rest = [part for part in range(len(node.output)) if part not in few]
    if not few or not rest:
        raise MatchFailure("rows are selected from all parts or from none")
    if any(g.use_count(name) != 1 for name in (weight, bias) if name):
        raise MatchFailure("the weights have other users and would be stored twice")
    sizes = _column_counts(g, node)
    if bias and g.shape(bias) != (sum(sizes),):
        raise MatchFailure("the bias is one number for all columns")
    linear = _SplitLinear(g, node, x, weight, bias or "", sizes)
    results = dict(pair for group in (*([one] for one in few), rest) for pair in linear.part(group))
    return tuple(results[part] for part in range(len(node.output)))


def _rows_are_selected(g: Graph, value: str) -> bool:
    """Whether all users of the value select the same few rows of it."""
    if not 0 < g.user_count(value) <= MOST_USERS or g.is_output(value) or g.is_captured(value):
        return False
    found = [find_slice_behind_view(g, user) for user in g.users(value)]
    first = found[0]
    if first is None or first.value != value or first.axis >= (g.rank(value) or 0) - 1:
        return False
    return all(one is not None and one.selects_the_same(first) for one in found)


def _column_counts(g: Graph, node: NodeProto) -> list[int]:
    """Return the number of columns of each part."""
    shapes = [g.shape(name) for name in node.output]
    axes = positive_axes([nd.attr(node, "axis", 0)], g.rank(node.input[0]))
    found = [shape[-1] for shape in shapes if shape and isinstance(shape[-1], int)]
    if len(found) != len(shapes) or axes != [len(shapes[0] or ()) - 1]:
        raise MatchFailure("it is unknown whether the Split is along the columns of the product")
    return found


@dataclass(frozen=True, slots=True)
class _SplitLinear:
    """Split(x W + b), and the number of columns of each part."""

    g: Graph
    split: NodeProto
    x: str
    weight: str
    bias: str
    sizes: list[int]

    def part(self, parts: list[int]) -> list[tuple[int, str]]:
        """Add a linear map of its own for some of the parts; return their new values."""
        g, at = self.g, self.split
        sizes = [self.sizes[part] for part in parts]
        shape = (*(g.shape(at.output[0]) or ())[:-1], sum(sizes))
        value = g.op("MatMul", self.x, self._columns(self.weight, parts), at=at)
        self._learn(value, shape)
        if self.bias:
            value = g.op("Add", value, self._columns(self.bias, parts), at=at)
            self._learn(value, shape)
        if len(parts) == 1:
            return [(parts[0], value)]
        inputs = [value, int_vector(g, sizes, "sizes")]
        split = g.add("Split", inputs, len(parts), {"axis": len(shape) - 1}, at=at)
        return list(zip(parts, split.output, strict=True))

    def _columns(self, name: str, parts: list[int]) -> str:
        stored = self.g.const(name)
        if stored is None:
            raise MatchFailure(f"'{name}' is not a constant")
        starts = [0, *itertools.accumulate(self.sizes)]
        taken: Array = np.concatenate(
            [stored[..., starts[part] : starts[part + 1]] for part in parts], axis=-1
        )
        return self.g.constant(taken, name)

    def _learn(self, value: str, shape: Shape) -> None:
        self.g.learn_type(value, TensorType(self.g.dtype(self.x), shape))
