"""Nodes that pack the real rows of a batch, and unpack the results.

    pack(x)      GatherND(x, places)     [batch, length, ...] to [1, count, ...]
    unpack(x)    GatherND(x, back)       the inverse; rows of padding become copies of another row

Packed values have as many axes as before, so operators that compute each row independently stay as
they are. A text that begins with padding, or that is nothing but padding, is kept as a whole: users
may select its first row, and each row that is kept has a key to attend to. The same holds for a
text whose mask has a number that is neither 0 nor in `REAL`: users may take it for either.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import int_vector, unsqueeze
from passes.motion.remove_padding.masked_values import REAL
from passes.motion.sink_slices.row_selection import UniformRows
from toolkit.ir import Graph, Shape, TensorType
from toolkit.symbolic import Dim, unknown


@dataclass(frozen=True, slots=True)
class RealRows(UniformRows):
    """The rows of a batch that are kept, along its second axis."""

    count: Dim = field(default_factory=lambda: unknown(nonneg=True))

    def shape(self, shape: Shape, axis: int, result_axis: int) -> Shape:
        return (1, self.count, *shape[2:])


class Packing:
    """Adds the nodes that pack and unpack by one mask."""

    def __init__(self, g: Graph, mask: str, rows: RealRows, at: NodeProto) -> None:
        self._g, self._rows, self._at = g, rows, at
        self._sizes = g.shape(mask) or ()
        kept = self._kept(mask)
        self._places, self._back = self._places_of(kept), self._back_of(kept)

    def pack(self, value: str, at: NodeProto) -> str:
        known = self._g.shape(value) or ()
        return self._gather(value, self._places, self._rows.shape(known, 1, 1), at)

    def unpack(self, packed: str, at: NodeProto) -> str:
        known = self._g.shape(packed) or ()
        return self._gather(packed, self._back, (*self._sizes, *known[2:]), at)

    def _kept(self, mask: str) -> str:
        """Return [batch, length]: whether a row is real, or its text is kept as a whole."""
        g, at = self._g, self._at
        if g.dtype(mask) == TensorProto.BOOL:
            return g.op("Or", mask, self._begins_padded(mask), at=at)
        some = g.op("Cast", mask, at=at, to=TensorProto.BOOL)
        number = g.op("Cast", mask, at=at, to=TensorProto.FLOAT)
        ends = (g.constant(np.array(end, np.float32), "real") for end in REAL)
        real = g.op("Equal", number, g.op("Clip", number, *ends, at=at), at=at)
        unclear = g.op("Cast", g.op("Xor", some, real, at=at), at=at, to=TensorProto.INT64)
        count = g.op("ReduceSum", unclear, int_vector(g, [1]), at=at)
        any_unclear = g.op("Cast", count, at=at, to=TensorProto.BOOL)
        whole = g.op("Or", self._begins_padded(real), any_unclear, at=at)
        return g.op("Or", some, whole, at=at)

    def _begins_padded(self, real: str) -> str:
        """Return [batch, 1]: whether the first row is padding."""
        g, at = self._g, self._at
        bounds = (int_vector(g, [number], "first") for number in (0, 1, 1))
        return g.op("Not", g.op("Slice", real, *bounds, at=at), at=at)

    def _places_of(self, kept: str) -> str:
        """Return [1, count, 2]: the text and the row of each row that is kept."""
        g, at = self._g, self._at
        places = g.op("Transpose", g.op("NonZero", kept, at=at), at=at, perm=[1, 0])
        return unsqueeze(g, places, [0], at=at)

    def _back_of(self, kept: str) -> str:
        """Return [batch, length, 2]: 0, and the index of each row among those that are kept.

        A row that is not kept gets the index of the last one before it; there is one, since its
        text does not begin with padding.
        """
        g, at = self._g, self._at
        counted = g.op("Cast", kept, at=at, to=TensorProto.INT64)
        flat = g.op("Reshape", counted, int_vector(g, [-1], "shape"), at=at)
        order = g.op("CumSum", flat, g.constant(np.array(0, np.int64), "axis"), at=at)
        numbers = g.op("Sub", order, g.constant(np.array(1, np.int64), "one"), at=at)
        square = g.op("Reshape", numbers, g.op("Shape", kept, at=at), at=at, allowzero=1)
        return g.op("Mul", unsqueeze(g, square, [2], at=at), int_vector(g, [0, 1], "row"), at=at)

    def _gather(self, value: str, places: str, shape: Shape, at: NodeProto) -> str:
        result = self._g.op("GatherND", value, places, at=at)
        self._g.learn_type(result, TensorType(self._g.dtype(value), shape))
        return result
