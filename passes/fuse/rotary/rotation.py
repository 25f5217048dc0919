"""How heads are turned, and the standard's operator for it: RotaryEmbedding (opset 23).

It takes every angle once, as [batch, sequence, angles], and heads as they lie in tokens,
[batch, sequence, heads * size], where these can be reached, or else [batch, heads, sequence, size].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.affine_index import size_in_inputs
from passes.analysis.operands import int_vector, reshape, squeeze, unsqueeze
from passes.fuse.attention.heads import Operand, heads_apart
from passes.fuse.rotary.angles import heads_axis, is_doubled
from passes.fuse.rotary.last_axis_elements import last_size
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import TensorType
from toolkit.rewriting.match_failure import Miss
from toolkit.symbolic import Dim

TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)


@dataclass(frozen=True, slots=True)
class Turn:
    """How a value [batch, heads, sequence, size], or with heads and sequence changed, is turned."""

    g: Graph
    cos: str
    sin: str
    interleaved: bool
    heads: int
    """Which axis has the heads: 1 or 2."""
    size: int
    """How many elements of a head are turned."""

    @classmethod
    def of(cls, g: Graph, x: str, cos: str, sin: str, interleaved: bool) -> Turn:
        """All elements of x, by angles of which there is one for each element."""
        size, shape = last_size(g, x), g.shape(x)
        if size is None or shape is None or size % 2:
            raise Miss(f"the heads of '{x}' have no even size")
        for angles in (cos, sin):
            if not is_doubled(g, angles, interleaved):
                raise Miss(f"'{angles}' may have more than one angle for a pair")
        return cls(g, cos, sin, interleaved, heads_axis(g, cos, sin, shape), size)

    @classmethod
    def of_pairs(cls, g: Graph, x: str, cos: str, sin: str, interleaved: bool) -> Turn:
        """All elements of x, by angles of which there is one for each pair."""
        size, shape = last_size(g, x), g.shape(x)
        if size is None or shape is None or len(shape) != 4 or g.dtype(x) not in TYPES:
            raise Miss(f"'{x}' is not [batch, heads, sequence, size]")
        halved = (*shape[:-1], size // 2)
        return cls(g, cos, sin, interleaved, heads_axis(g, cos, sin, halved), size)

    def write(self, x: str, node: NodeProto) -> str:
        """The operator on `x`, of which the first elements of each head are turned."""
        g = self.g
        shape, whole = g.shape(x), last_size(g, x)
        if shape is None or whole is None:
            raise Miss(f"the shape of '{x}' is not known")
        attributes: dict[str, Any] = {}
        if self.interleaved:
            attributes["interleaved"] = 1
        if whole != self.size:
            attributes["rotary_embedding_dim"] = self.size
        batch = shape[0]
        angles = [self._angles(name, x, batch, node) for name in (self.cos, self.sin)]
        operand = Operand(g, x, sequence=-2 if self.heads == 1 else -3)
        form = operand.tokens()
        if form is None or form.batch != batch or form.heads != shape[self.heads]:
            if self.heads != 1:
                raise Miss(f"the heads of '{x}' cannot be joined")
            return g.op("RotaryEmbedding", x, *angles, at=node, **attributes)
        tokens = operand.write(form, node)
        result = g.op(
            "RotaryEmbedding", tokens, *angles, at=node, num_heads=form.heads, **attributes
        )
        dtype = g.dtype(x)
        g.learn_type(result, TensorType(dtype, (batch, form.sequence, form.heads * whole)))
        if self.heads == 1:
            result = heads_apart(g, result, form.heads, whole, node)
        else:
            result = reshape(g, result, (0, 0, form.heads, whole), at=node)
        return self._rescaled(result, x, form.source.scale, node)

    def _rescaled(self, result: str, x: str, scale: float, node: NodeProto) -> str:
        """A factor of the tokens, behind the turn: there attention takes it into its scale."""
        g = self.g
        if scale == 1.0:
            return result
        kind = helper.tensor_dtype_to_np_dtype(g.dtype(x))
        g.learn_type(result, TensorType(g.dtype(x), g.shape(x)))
        return g.op("Mul", result, g.constant(np.array(scale, kind), "scale"), at=node)

    def _angles(self, name: str, x: str, batch: Dim, node: NodeProto) -> str:
        """The angles, each of them once, as [batch, sequence, angles]."""
        g = self.g
        shape, dtype, once = g.shape(name), g.dtype(name), name
        if shape is None:
            raise Miss(f"the shape of '{name}' is not known")
        if shape[-1] == self.size:
            step = 2 if self.interleaved else 1
            stop = self.size if self.interleaved else self.size // 2
            bounds = ([0], [stop], [len(shape) - 1], [step])
            once = g.op("Slice", name, *(int_vector(g, one, "bound") for one in bounds), at=node)
            shape = (*shape[:-1], self.size // 2)
            g.learn_type(once, TensorType(dtype, shape))
        if len(shape) == 4 or (len(shape) == 3 and self.heads == 2):
            axis = len(shape) - 4 + self.heads
            once, shape = squeeze(g, once, [axis], at=node), shape[:axis] + shape[axis + 1 :]
            g.learn_type(once, TensorType(dtype, shape))
        if len(shape) == 2:
            once, shape = unsqueeze(g, once, [0], at=node), (1, *shape)
            g.learn_type(once, TensorType(dtype, shape))
        if shape[0] == batch:
            return once
        source, axis = size_in_inputs(g, batch) or (x, 0)
        rows = g.op("Shape", source, at=node, start=axis, end=axis + 1)
        target = g.op("Concat", rows, int_vector(g, [1, 1]), at=node, axis=0)
        return g.op("Expand", once, target, at=node)
