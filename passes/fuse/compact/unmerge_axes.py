"""Keep batch and heads as separate axes where a model merges them and splits them again.

    MatMul(Reshape(x, [b h, l, d]), Tile(c, [b, 1, 1]))  =  Reshape(MatMul(x, c), [b h, l, d])

`torch.bmm` takes one batch axis, so models that use it (for DeBERTa's relative positions) merge the
axes first, split them last, and repeat constants for the whole batch. Matrix products, elementwise
operators, Transposes and gathers along other axes work on separate axes as well. The rewrite starts
at the Reshape that splits the axes, and is kept if it leaves fewer nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto

from passes.analysis.affine_index import size_in_inputs
from passes.analysis.axes import positive_axes
from passes.analysis.operands import permutation, transpose
from passes.fuse.computed_sizes import size_vector
from passes.fuse.typed_op import typed_op
from toolkit.ir import Array, Graph, Shape, TensorType, node as nd
from toolkit.ir.op_traits import BROADCASTING, ELEMENTWISE
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.symbolic import Dim


def split_axes(g: Graph) -> None:
    """Rewrite all values between a merge and a split of the first axes with separate axes."""
    found = defaultdict[tuple[Dim, Dim], list[NodeProto]](list)
    for node in g.nodes:
        lead = _split(g, node)
        if lead is not None:
            found[lead].append(node)
    for lead, nodes in found.items():
        start, count = g.model.journal.position, len(g)
        known: dict[str | int, str] = {}  # layers share sizes and indices
        for node in nodes:
            known = _remove_split(g, node, lead, known)
        if len(g) >= count:
            g.model.journal.undo_to(start)


def _remove_split(
    g: Graph, node: NodeProto, lead: tuple[Dim, Dim], known: dict[str | int, str]
) -> dict[str | int, str]:
    """Remove one split, if possible; return the values known with separate axes afterwards."""
    start = g.model.journal.position
    separate = _SeparateAxes(g, node, *lead, known=dict(known))
    if not g.begin("split-axes", node):
        return known
    try:
        result = separate.full(node.input[0])
    except MatchFailure:
        g.model.journal.undo_to(start)
        return known
    name = g.replace(node.output[0], result)  # differs from `result` for an output of the graph
    g.prune(node)
    return {key: name if value == result else value for key, value in separate.known.items()}


def _split(g: Graph, node: NodeProto) -> tuple[Dim, Dim] | None:
    """Return the two sizes that a Reshape splits the first axis into, keeping the others."""
    if not nd.is_op(node, "Reshape") or g.producer(node.input[0]) is None:
        return None
    before, after = g.shape(node.input[0]), g.shape(node.output[0])
    if before is None or after is None or len(after) < 3 or before[1:] != after[2:]:
        return None
    return (after[0], after[1]) if after[0] * after[1] == before[0] else None


@dataclass(slots=True)
class _SeparateAxes:
    """Writes values of shape [batch * heads, ...] in the shape [batch, heads, ...]."""

    g: Graph
    at: NodeProto
    batch: Dim
    heads: Dim
    known: dict[str | int, str] = field(default_factory=dict[str | int, str])
    """Written values by the name of the original, and target shapes of Expand by rank."""

    def value(self, name: str) -> str:
        """Return the value with both axes, or without the batch if it is constant along it."""
        if name not in self.known:
            self.known[name] = self._value(name)
        return self.known[name]

    def full(self, name: str) -> str:
        """Return the value with both axes."""
        found = self.value(name)
        if self.g.rank(found) != (self.g.rank(name) or 0) + 1:
            raise MatchFailure(f"'{found}' would have to be expanded")
        return found

    def _value(self, name: str) -> str:
        g = self.g
        node, shape = g.producer(name), g.shape(name)
        if node is None or shape is None or len(shape) < 2 or shape[0] != self.batch * self.heads:
            raise MatchFailure(f"'{name}' does not have batch and heads as one axis")
        if node.domain not in nd.STANDARD_DOMAINS or len(node.output) != 1:
            raise MatchFailure(f"{nd.label(node)} may depend on the number of axes")
        if nd.is_op(node, "Reshape", "Tile", "Expand"):
            return self._source(node, shape)
        if nd.is_op(node, "Transpose"):
            return self._transposed(node, shape)
        if nd.is_op(node, "GatherElements"):
            axes = positive_axes([nd.attr(node, "axis", 0)], len(shape))
            if axes is None or not axes[0]:
                raise MatchFailure(f"{nd.label(node)} gathers along batch and heads")
            inputs = [self.full(value) for value in node.input]
            return self._typed(node, inputs, shape, axis=axes[0] + 1)
        if nd.is_op(node, "MatMul"):
            if any(g.rank(value) != len(shape) for value in node.input):
                raise MatchFailure(f"{nd.label(node)} is not a batched product of equal ranks")
            return self._typed(node, [self.value(value) for value in node.input], shape)
        if node.op_type in ELEMENTWISE:
            return self._typed(node, [self.full(node.input[0]), *node.input[1:]], shape)
        if node.op_type in BROADCASTING:
            return self._typed(node, [self._operand(v, len(shape)) for v in node.input], shape)
        raise MatchFailure(f"{nd.label(node)} may depend on the number of axes")

    def _source(self, node: NodeProto, shape: Shape) -> str:
        """Return the value before a merge or a repetition along the batch."""
        g, source = self.g, node.input[0]
        before = g.shape(source)
        if nd.is_op(node, "Reshape") and before == (self.batch, self.heads, *shape[1:]):
            return source
        if nd.is_op(node, "Tile") and before == (self.heads, *shape[1:]):
            return source
        if nd.is_op(node, "Expand") and before == (1, *shape[1:]):
            rank = len(shape)
            if rank not in self.known:
                self.known[rank] = self._sizes([self.batch, self.heads, *[1] * (rank - 1)])
            return self._typed(node, [source, self.known[rank]], shape)
        raise MatchFailure(f"{nd.label(node)} does not merge or repeat along batch and heads")

    def _sizes(self, sizes: Sequence[Dim]) -> str:
        """Write a vector of sizes, each a number or the size of an input's axis."""
        found = [s if isinstance(s, int) else size_in_inputs(self.g, s) for s in sizes]
        known = [size for size in found if size is not None]
        if len(known) < len(sizes):
            raise MatchFailure("no input of the model has the batch size")
        return size_vector(self.g, known, self.at)

    def _transposed(self, node: NodeProto, shape: Shape) -> str:
        g, perm = self.g, permutation(self.g, node)
        if perm is None or perm[0]:
            raise MatchFailure(f"{nd.label(node)} moves batch and heads")
        inner = self.value(node.input[0])
        if g.rank(inner) == len(shape):
            stored = g.const(inner)
            if stored is None:
                return transpose(g, inner, perm, at=self.at)
            transposed: Array = np.ascontiguousarray(np.transpose(stored, perm))
            return g.constant(transposed, inner)
        return self._typed(node, [inner], shape, perm=[0, *(axis + 1 for axis in perm)])

    def _operand(self, name: str, rank: int) -> str:
        """Return an operand for broadcasting; itself if it is constant along batch and heads."""
        shape = self.g.shape(name)
        if shape is not None and (len(shape) < rank or shape[0] == 1):
            return name
        return self.value(name)

    def _typed(self, node: NodeProto, inputs: Sequence[str], shape: Shape, **changed: Any) -> str:
        g = self.g
        if nd.is_op(node, "Expand") or len(shape) + 1 in map(g.rank, inputs):
            known = TensorType(g.dtype(node.output[0]), (self.batch, self.heads, *shape[1:]))
            attributes: dict[str, Any] = {**nd.attrs(node), **changed}
            return typed_op(g, known, node.op_type, *inputs, at=self.at, **attributes)
        raise MatchFailure(f"no operand of {nd.label(node)} has a batch")
