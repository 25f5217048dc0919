"""Write rotations of heads with the standard operator RotaryEmbedding (opset 23).

It takes every angle once, as [batch, sequence, angles], and heads as tokens
[batch, sequence, heads * size] where possible, or else as [batch, heads, sequence, size].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnx import NodeProto, TensorProto

from passes.analysis.affine_index import size_in_inputs
from passes.analysis.operands import int_vector, reshape, scalar, squeeze, unsqueeze
from passes.fuse.attention.heads import AttentionOperand, split_heads
from passes.fuse.computed_sizes import size_vector
from passes.fuse.rotary.angles import heads_axis, is_doubled
from passes.fuse.rotary.last_axis_elements import last_size
from passes.fuse.typed_op import typed_op
from toolkit.ir import Graph, TensorType
from toolkit.rewriting.rule import MatchFailure
from toolkit.symbolic import Dim

TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of heads [batch, heads, sequence, size] or [batch, sequence, heads, size]."""

    g: Graph
    cos: str
    sin: str
    interleaved: bool
    heads: int
    """The axis of the heads: 1 or 2."""
    size: int
    """The number of rotated elements of a head."""

    @classmethod
    def of(
        cls, g: Graph, x: str, cos: str, sin: str, interleaved: bool, per_pair: bool = False
    ) -> Rotation:
        """Return the rotation of all elements of x, by one angle per element or per pair."""
        size, shape = last_size(g, x), g.shape(x)
        if size is None or shape is None or len(shape) != 4 or size % 2:
            raise MatchFailure(f"'{x}' is not [batch, heads, sequence, size] with an even size")
        if per_pair:
            shape = (*shape[:-1], size // 2)
        elif not all(is_doubled(g, angles, interleaved) for angles in (cos, sin)):
            raise MatchFailure("the two elements of a pair may have different angles")
        return cls(g, cos, sin, interleaved, heads_axis(g, cos, sin, shape), size)

    def write(self, x: str, node: NodeProto) -> str:
        """Write the operator, which rotates the first elements of each head of `x`."""
        g = self.g
        shape, whole = g.shape(x), last_size(g, x)
        if shape is None or whole is None:
            raise MatchFailure(f"the shape of '{x}' is not known")
        attributes: dict[str, Any] = {
            "interleaved": 1 if self.interleaved else None,
            "rotary_embedding_dim": None if whole == self.size else self.size,
        }
        batch, dtype = shape[0], g.dtype(x)
        angles = [self._angles(name, x, batch, node) for name in (self.cos, self.sin)]
        form = AttentionOperand(g, x, sequence=-2 if self.heads == 1 else -3).tokens()
        if form is None or form.batch != batch or form.heads != shape[self.heads]:
            if self.heads != 1:
                raise MatchFailure(f"the heads of '{x}' cannot be merged")
            return g.op("RotaryEmbedding", x, *angles, at=node, **attributes)
        operands, attributes["num_heads"] = [form.write(g, node), *angles], form.heads
        known = TensorType(dtype, (batch, form.sequence, form.heads * whole))
        result = typed_op(g, known, "RotaryEmbedding", *operands, at=node, **attributes)
        if self.heads == 1:
            result = split_heads(g, result, form.heads, whole, node)
        else:
            result = reshape(g, result, (0, 0, form.heads, whole), at=node)
        if form.source.scale == 1.0:
            return result
        # A factor of the tokens comes after the rotation, where attention absorbs it.
        return g.op("Mul", result, scalar(g, form.source.scale, dtype, "scale"), at=node)

    def _angles(self, name: str, x: str, batch: Dim, node: NodeProto) -> str:
        """Write the angles as [batch, sequence, angles], each of them once."""
        g = self.g
        shape, dtype, once = g.shape(name), g.dtype(name), name
        if shape is None:
            raise MatchFailure(f"the shape of '{name}' is not known")
        if shape[-1] == self.size:
            step = 2 if self.interleaved else 1
            stop = self.size if self.interleaved else self.size // 2
            bounds = ([0], [stop], [len(shape) - 1], [step])
            limits = [int_vector(g, bound, "bound") for bound in bounds]
            shape = (*shape[:-1], self.size // 2)
            once = typed_op(g, TensorType(dtype, shape), "Slice", name, *limits, at=node)
        if len(shape) == 4 or (len(shape) == 3 and self.heads == 2):
            axis = len(shape) - 4 + self.heads
            once, shape = squeeze(g, once, [axis], at=node), shape[:axis] + shape[axis + 1 :]
            g.learn_type(once, TensorType(dtype, shape))
        if len(shape) == 2:
            once, shape = unsqueeze(g, once, [0], at=node), (1, *shape)
            g.learn_type(once, TensorType(dtype, shape))
        if shape[0] == batch:
            return once
        target = size_vector(g, [size_in_inputs(g, batch) or (x, 0), 1, 1], node)
        return g.op("Expand", once, target, at=node)
