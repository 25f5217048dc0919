"""A linear map whose parts are read apart: some by rows, the others as a whole.

    q, k, v = Split(x W + b)    =    q = x W0 + b0,  k, v = Split(x W' + b')

The query of an attention often comes with key and value, of one product. Where few of its rows are
read, it is to be a product of its own, which the selection can then be moved through. The weights
are stored in two pieces, so nothing else may read them as a whole.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import int_vector
from passes.motion.sink_slices.find_slices import MOST_USERS, read_behind
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import Shape, TensorType
from toolkit.pattern import const, op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import rewrite

_product = op.MatMul(var("x"), const("weight", rank=2))
_linear = _product | op.Add(_product, const("bias", rank=1))


@rewrite(op.Split(_linear, ...), opset=13)
def part_read_by_rows(
    g: Graph, x: str, weight: str, bias: str | None, node: NodeProto
) -> tuple[str, ...]:
    """q, k, v = Split(x W + b) as q = x W0 + b0 and k, v = Split(x W' + b')"""
    few = [place for place, name in enumerate(node.output) if _is_read_by_rows(g, name)]
    rest = [place for place in range(len(node.output)) if place not in few]
    if not few or not rest:
        raise MatchFailure("no part is read by rows while others are read as a whole")
    if any(g.use_count(name) != 1 for name in (weight, bias) if name):
        raise MatchFailure("the weights are read elsewhere too, and would be stored twice")
    sizes = _sizes(g, node)
    if bias and g.shape(bias) != (sum(sizes),):
        raise MatchFailure("the bias is one number for all columns")
    whole = _Whole(g, node, x, weight, bias or "", sizes)
    results = dict(pair for group in (*([one] for one in few), rest) for pair in whole.part(group))
    return tuple(results[place] for place in range(len(node.output)))


def _is_read_by_rows(g: Graph, value: str) -> bool:
    """Whether all that reads the value selects the same few rows of it."""
    if not 0 < g.reader_count(value) <= MOST_USERS or g.is_output(value) or g.is_captured(value):
        return False
    ends = [read_behind(g, user) for user in g.users(value)]
    first, last = ends[0], (g.rank(value) or 0) - 1
    if first is None or first.value != value or first.axis >= last:
        return False
    wanted = first.selection, first.value, first.axis
    return all(
        end is not None and (end.selection, end.value, end.axis) == wanted for end in ends[1:]
    )


def _sizes(g: Graph, node: NodeProto) -> list[int]:
    """How many columns each part has."""
    shapes = [g.shape(name) for name in node.output]
    axes = positive_axes([nd.attr(node, "axis", 0)], g.rank(node.input[0]))
    sizes = [shape[-1] for shape in shapes if shape]
    found = [size for size in sizes if isinstance(size, int)]
    if len(found) != len(shapes) or axes != [len(shapes[0] or ()) - 1]:
        raise MatchFailure("it is not known to part the columns of the product")
    return found


@dataclass(frozen=True, slots=True)
class _Whole:
    """The map as it is: x W + b, and how many columns each part of it has."""

    g: Graph
    split: NodeProto
    x: str
    weight: str
    bias: str
    sizes: list[int]

    def part(self, places: list[int]) -> list[tuple[int, str]]:
        """A map of its own for some of the parts, and what they are then."""
        g, at = self.g, self.split
        sizes = [self.sizes[place] for place in places]
        shape = (*(g.shape(at.output[0]) or ())[:-1], sum(sizes))
        value = g.op("MatMul", self.x, self._columns(self.weight, places), at=at)
        self._learn(value, shape)
        if self.bias:
            value = g.op("Add", value, self._columns(self.bias, places), at=at)
            self._learn(value, shape)
        if len(places) == 1:
            return [(places[0], value)]
        inputs = [value, int_vector(g, sizes, "sizes")]
        parts = g.add("Split", inputs, len(places), {"axis": len(shape) - 1}, at=at)
        return list(zip(places, parts.output, strict=True))

    def _columns(self, name: str, places: list[int]) -> str:
        stored = self.g.const(name)
        if stored is None:
            raise MatchFailure(f"'{name}' is not stored")
        starts = [0, *itertools.accumulate(self.sizes)]
        taken: Array = np.concatenate(
            [stored[..., starts[place] : starts[place + 1]] for place in places], axis=-1
        )
        return self.g.constant(taken, name)

    def _learn(self, value: str, shape: Shape) -> None:
        self.g.learn_type(value, TensorType(self.g.dtype(self.x), shape))
