"""Merge two axes of heads into one for Attention: [batch, outer, inner, sequence, size].

Grouped queries have this layout, [batch, groups, queries per group, sequence, size] with keys
[batch, groups, 1, sequence, size], and so have windows of an image next to the heads. The operator
has one axis of heads: the two are merged before it and split after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from onnx import NodeProto

from passes.analysis.operands import int_vector, reshape, reshape_target
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import Shape, TensorType
from toolkit.rewriting.rule import MatchFailure

_RANK = 5


@dataclass(frozen=True, slots=True)
class HeadAxes:
    """The sizes of the two axes of heads of a query."""

    g: Graph
    outer: int
    inner: int

    @classmethod
    def of(cls, g: Graph, query: str, key: str, value: str) -> HeadAxes | None:
        """Return None for a single axis of heads; raise MatchFailure if two cannot be merged."""
        shapes = [g.shape(name) for name in (query, key, value)]
        known = [shape for shape in shapes if shape is not None and len(shape) == _RANK]
        if len(known) != len(shapes):
            return None
        outer, inner = known[0][1:3]
        if not isinstance(outer, int) or not isinstance(inner, int):
            raise MatchFailure("the query has two axes of heads of unknown size")
        # An inner axis of size 1 is one key per group of queries, as the operator counts them. An
        # outer axis of size 1 alone would need another order.
        shared = (outer, inner), (outer, 1), (1, 1)
        if known[1][1:3] != known[2][1:3] or known[1][1:3] not in shared:
            raise MatchFailure("keys and values do not have the heads of the query, or one each")
        return cls(g, outer, inner)

    def merged(self, name: str, at: NodeProto) -> str:
        """Write a value as [batch, outer * inner, ...]."""
        shape = self.g.shape(name) or ()
        heads = prod(size for size in shape[1:3] if isinstance(size, int))
        return self._reshaped(name, (3, _RANK), [heads], (*shape[:1], heads, *shape[3:]), at)

    def split(self, name: str, at: NodeProto) -> str:
        """Write the result of the operator as [batch, outer, inner, ...]."""
        shape = self.g.shape(name) or ()
        heads = self.outer, self.inner
        return self._reshaped(name, (2, _RANK - 1), heads, (*shape[:1], *heads, *shape[2:]), at)

    def _reshaped(
        self, name: str, rest: tuple[int, int], heads: Sequence[int], shape: Shape, at: NodeProto
    ) -> str:
        g = self.g
        target = reshape_target(g.shape(name), shape)
        if target is not None:
            return reshape(g, name, target, at=at, shape=shape)
        batch = g.op("Shape", name, at=at, start=0, end=1)
        last = g.op("Shape", name, at=at, start=rest[0], end=rest[1])
        sizes = g.op("Concat", batch, int_vector(g, heads, "heads"), last, at=at, axis=0)
        result = g.op("Reshape", name, sizes, at=at)
        g.learn_type(result, TensorType(g.dtype(name), shape))
        return result
