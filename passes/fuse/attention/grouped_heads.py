"""Heads along two axes: attention of [batch, outer, inner, sequence, size].

Grouped queries are written like this, [batch, groups, queries of a group, sequence, size] with keys
of [batch, groups, 1, sequence, size], and so are windows of an image beside the heads. The operator
has one axis of heads: the two are joined for it, and taken apart behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import NodeProto

from passes.analysis.operands import int_vector, reshape, reshape_target
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import Shape, TensorType
from toolkit.rewriting.match_failure import Miss

_RANK = 5


@dataclass(frozen=True, slots=True)
class Groups:
    """How many heads there are along either axis of the query."""

    g: Graph
    outer: int
    inner: int

    @classmethod
    def of(cls, g: Graph, query: str, key: str, value: str) -> Groups | None:
        """None where there is one axis of heads at most; a Miss where two cannot be joined."""
        shapes = [g.shape(name) for name in (query, key, value)]
        known = [shape for shape in shapes if shape is not None and len(shape) == _RANK]
        if len(known) != len(shapes):
            return None
        outer, inner = known[0][1:3]
        if not isinstance(outer, int) or not isinstance(inner, int):
            raise Miss("the query has two axes of heads, of which the sizes are not known")
        # An inner axis of 1 is one key for the queries of a group, which is how the operator counts
        # them; along the outer axis alone they would be counted in another order.
        shared = (outer, inner), (outer, 1), (1, 1)
        if known[1][1:3] != known[2][1:3] or known[1][1:3] not in shared:
            raise Miss("the heads of keys and values are not those of the query, or one for each")
        return cls(g, outer, inner)

    def joined(self, name: str, at: NodeProto) -> str:
        """[batch, outer * inner, ...]"""
        shape = self.g.shape(name) or ()
        heads = 1
        for size in shape[1:3]:
            heads *= size if isinstance(size, int) else 1
        return self._reshaped(name, (3, _RANK), [heads], (*shape[:1], heads, *shape[3:]), at)

    def apart(self, name: str, at: NodeProto) -> str:
        """[batch, outer, inner, ...] of what the operator gives."""
        shape = self.g.shape(name) or ()
        heads = self.outer, self.inner
        return self._reshaped(name, (2, _RANK - 1), heads, (*shape[:1], *heads, *shape[2:]), at)

    def _reshaped(
        self, name: str, rest: tuple[int, int], heads: Sequence[int], shape: Shape, at: NodeProto
    ) -> str:
        g = self.g
        target = reshape_target(g.shape(name), shape)
        if target is not None:
            result = reshape(g, name, target, at=at)
        else:
            batch = g.op("Shape", name, at=at, start=0, end=1)
            behind = g.op("Shape", name, at=at, start=rest[0], end=rest[1])
            sizes = batch, int_vector(g, heads, "heads"), behind
            result = g.op("Reshape", name, g.op("Concat", *sizes, at=at, axis=0), at=at)
        g.learn_type(result, TensorType(g.dtype(name), shape))
        return result
