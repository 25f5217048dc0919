"""Merge two axes of heads into one for Attention: [batch, outer, inner, sequence, size].

Grouped queries have this layout, [batch, groups, queries per group, sequence, size] with keys
[batch, groups, 1, sequence, size], and so do windows of an image next to the heads. The operator
has one axis of heads: the two are merged before it and split after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from onnx import NodeProto

from passes.fuse.computed_sizes import reshape_to
from toolkit.ir.graph import Graph
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
        # An inner axis of size 1 is one key per group of consecutive queries, as the operator
        # expects. If only the outer axis has size 1, the queries of a key are not consecutive.
        shared = (outer, inner), (outer, 1), (1, 1)
        if known[1][1:3] != known[2][1:3] or known[1][1:3] not in shared:
            raise MatchFailure("keys and values have neither the query's heads nor one per group")
        return cls(g, outer, inner)

    def merged(self, name: str, at: NodeProto) -> str:
        """Write a value as [batch, outer * inner, ...]."""
        shape = self.g.shape(name) or ()
        heads = prod(size for size in shape[1:3] if isinstance(size, int))
        return reshape_to(self.g, name, (*shape[:1], heads, *shape[3:]), at)

    def split(self, name: str, at: NodeProto) -> str:
        """Write the result of the operator as [batch, outer, inner, ...]."""
        shape = self.g.shape(name) or ()
        return reshape_to(self.g, name, (*shape[:1], self.outer, self.inner, *shape[2:]), at)
