"""Row selections, and how to select the same rows of another value.

    Entries       Gather(x, index)             the same entries of an axis for all
    Window        Slice(x, starts, ends)       neighbours along one axis
    RowPerEntry   GatherND(x, (0..b, index))   per entry of the first axis, one of another

In all methods, `axis` is an axis of the value, and `result_axis` the same axis of the selected
result, which may have more leading axes. Every value that a selection moves to has as many rows as
the original one, so an index is out of range after the move exactly if it was before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.operands import reshape
from toolkit.ir import Array, Graph, Shape, TensorType
from toolkit.symbolic import Dim


@dataclass(frozen=True, slots=True)
class SelectionWriter:
    """Adds nodes next to `at`; operands that several selections share are added once."""

    g: Graph
    at: NodeProto
    made: dict[object, str] = field(default_factory=dict[object, str])

    def once(self, key: object, make: Callable[[], str]) -> str:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def integers(self, values: tuple[int, ...], dtype: int = TensorProto.INT64) -> str:
        array: Array = np.array(values, helper.tensor_dtype_to_np_dtype(dtype))
        return self.once((values, dtype), lambda: self.g.constant(array, "index"))


@dataclass(frozen=True, slots=True)
class UniformRows:
    """`count` rows of an axis, the same for all entries of the other axes."""

    count: Dim

    def applies(self, g: Graph, value: str, axis: int, result_axis: int) -> bool:
        """Whether the rows can be selected from `value`."""
        return True

    def passes_producer(self, g: Graph, value: str, axis: int, result_axis: int) -> bool:
        """Whether the selection can move above the producer of `value`."""
        return True

    def is_last(self, size: Dim) -> bool:
        """Whether it selects the last of `size` rows alone."""
        return False

    def shape(self, shape: Shape, axis: int, result_axis: int) -> Shape:
        """Return the shape of the rows of a value of this shape."""
        return (*shape[:axis], self.count, *shape[axis + 1 :])


@dataclass(frozen=True, slots=True)
class Entries(UniformRows):
    """The entries `numbers` of an axis, or the single entry given by the value `index`."""

    numbers: tuple[int, ...]
    index: str = ""

    def is_last(self, size: Dim) -> bool:
        return self.numbers in ((-1,), (size - 1,))

    def take(self, write: SelectionWriter, value: str, axis: int, result_axis: int) -> str:
        if self.index:
            index = write.once("index", lambda: reshape(write.g, self.index, [1], at=write.at))
        else:
            index = write.integers(self.numbers)
        return write.g.op("Gather", value, index, at=write.at, axis=axis)


@dataclass(frozen=True, slots=True)
class Window(UniformRows):
    """Neighbours along an axis."""

    bounds: tuple[str, ...]
    """Starts, ends and, if given, steps: operands of the Slice."""
    last: bool
    """Whether it selects the last row alone."""

    def is_last(self, size: Dim) -> bool:
        return self.last

    def take(self, write: SelectionWriter, value: str, axis: int, result_axis: int) -> str:
        starts, ends, *steps = self.bounds
        axes = write.integers((axis,), write.g.dtype(starts))
        return write.g.op("Slice", value, starts, ends, axes, *steps, at=write.at)


@dataclass(frozen=True, slots=True)
class RowPerEntry:
    """For each entry of the first axis (the batch), one row of another axis.

    The index has one element per batch entry. A value without a batch axis gets one: a row per
    entry.
    """

    index: str
    batch: Dim
    count: Dim = 1

    def is_last(self, size: Dim) -> bool:
        return False

    def applies(self, g: Graph, value: str, axis: int, result_axis: int) -> bool:
        """Allow only axes of size 1 between batch and rows, such as the heads of a mask."""
        front = (g.shape(value) or ())[:axis]
        rest = front[1:] if self._has_batch(g, value, axis, result_axis) else front
        return result_axis > 0 and all(size == 1 for size in rest)

    def passes_producer(self, g: Graph, value: str, axis: int, result_axis: int) -> bool:
        """Stop at values without a batch axis, which are computed once for all entries."""
        return self._has_batch(g, value, axis, result_axis)

    def shape(self, shape: Shape, axis: int, result_axis: int) -> Shape:
        return (self.batch, *[1] * result_axis, *shape[axis + 1 :])

    def take(self, write: SelectionWriter, value: str, axis: int, result_axis: int) -> str:
        g, each = write.g, self._has_batch(write.g, value, axis, result_axis)
        # (0, ..., 0, index) addresses a row, and entry 0 of the axes in front of `axis`.
        front = axis - each
        places = write.once((result_axis, 0), lambda: self._places(write, result_axis))
        if front:
            name = write.integers((*[0] * front, 1))
            key = (result_axis, front)
            places = write.once(key, lambda: g.op("Mul", places, name, at=write.at))
        return g.op("GatherND", value, places, at=write.at, batch_dims=int(each))

    def _has_batch(self, g: Graph, value: str, axis: int, result_axis: int) -> bool:
        return axis == result_axis and (g.shape(value) or ())[:1] == (self.batch,)

    def _places(self, write: SelectionWriter, result_axis: int) -> str:
        """Return the index as [batch, 1, ..., 1], with `result_axis` + 2 axes."""
        g, places, shape = write.g, self.index, (self.batch, *[1] * (result_axis + 1))
        if g.shape(places) != shape:
            places = reshape(g, places, [-1, *[1] * (result_axis + 1)], at=write.at)
        if g.dtype(self.index) != TensorProto.INT64:
            places = g.op("Cast", places, at=write.at, to=TensorProto.INT64)
        g.learn_type(places, TensorType(TensorProto.INT64, shape))
        return places


RowSelection: TypeAlias = Entries | Window | RowPerEntry
AnyRows: TypeAlias = UniformRows | RowPerEntry
"""A row selection, or `UniformRows` if it does not matter how the rows are selected."""


@dataclass(frozen=True, slots=True, eq=False)
class SelectedRows:
    """A selection of rows along `axis` of `value`, made by `node`."""

    selection: RowSelection
    value: str
    axis: int
    node: NodeProto
    drops_axis: bool

    def selects_the_same(self, other: SelectedRows) -> bool:
        mine, theirs = ((x.selection, x.value, x.axis) for x in (self, other))
        return mine == theirs
