"""Selections of rows, and how the same rows are selected of another value.

    Entries    Gather(x, index)             the same entries of an axis for all
    Window     Slice(x, starts, ends)       neighbours along one axis
    OneEach    GatherND(x, (0..b, index))   for each entry of the first axis, one of another

`axis` is an axis of the value, `of` the same axis of what the rows are needed for, which may have
more axes in front. All that a selection is moved to has as many rows as the value that it was taken
of, so an index is out of range there exactly when it was before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.operands import reshape
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import Shape, TensorType
from toolkit.symbolic import Dim


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes near a node; what several selections read is written once."""

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
class ForAll:
    """As many rows of an axis, the same ones wherever they are taken."""

    count: Dim

    def applies(self, g: Graph, value: str, axis: int, of: int) -> bool:
        return True

    def goes_on(self, g: Graph, value: str, axis: int, of: int) -> bool:
        """Whether it can be moved through what makes the value."""
        return True

    def is_last(self, size: Dim) -> bool:
        """Whether it is the last of `size` rows alone."""
        return False

    def shape(self, shape: Shape, axis: int, of: int) -> Shape:
        return (*shape[:axis], self.count, *shape[axis + 1 :])


@dataclass(frozen=True, slots=True)
class Entries(ForAll):
    """Entries of an axis: these, or the one that `index` names."""

    numbers: tuple[int, ...]
    index: str = ""

    def is_last(self, size: Dim) -> bool:
        return self.numbers in ((-1,), (size - 1,))

    def take(self, write: Writer, value: str, axis: int, of: int) -> str:
        if self.index:
            index = write.once("index", lambda: reshape(write.g, self.index, [1], at=write.at))
        else:
            index = write.integers(self.numbers)
        return write.g.op("Gather", value, index, at=write.at, axis=axis)


@dataclass(frozen=True, slots=True)
class Window(ForAll):
    """Neighbours along an axis."""

    bounds: tuple[str, ...]
    """The names of starts and ends, and of steps where there are any."""
    last: bool
    """Whether it is the last row alone."""

    def is_last(self, size: Dim) -> bool:
        return self.last

    def take(self, write: Writer, value: str, axis: int, of: int) -> str:
        starts, ends, *steps = self.bounds
        axes = write.integers((axis,), write.g.dtype(starts))
        return write.g.op("Slice", value, starts, ends, axes, *steps, at=write.at)


@dataclass(frozen=True, slots=True)
class OneEach:
    """For each entry of the first axis one of another axis, by an index with as many elements.

    A value that is the same for all of the batch has one row for each entry afterwards.
    """

    index: str
    batch: Dim
    count: Dim = 1

    def is_last(self, size: Dim) -> bool:
        return False

    def applies(self, g: Graph, value: str, axis: int, of: int) -> bool:
        """Between the two axes there may be others of size 1 alone: heads of a mask, say."""
        front = (g.shape(value) or ())[:axis]
        rest = front[1:] if self._has_batch(g, value, axis, of) else front
        return of > 0 and all(size == 1 for size in rest)

    def goes_on(self, g: Graph, value: str, axis: int, of: int) -> bool:
        """What is the same for all of the batch is computed once, as keys and values are."""
        return self._has_batch(g, value, axis, of)

    def shape(self, shape: Shape, axis: int, of: int) -> Shape:
        return (self.batch, *[1] * of, *shape[axis + 1 :])

    def take(self, write: Writer, value: str, axis: int, of: int) -> str:
        g, each = write.g, self._has_batch(write.g, value, axis, of)
        # (0, .., 0, index) names an entry of `axis` and of the axes in front of it.
        front = axis - each
        places = write.once((of, 0), lambda: self._places(write, of))
        if front:
            name = write.integers((*[0] * front, 1))
            places = write.once((of, front), lambda: g.op("Mul", places, name, at=write.at))
        return g.op("GatherND", value, places, at=write.at, batch_dims=int(each))

    def _has_batch(self, g: Graph, value: str, axis: int, of: int) -> bool:
        return axis == of and (g.shape(value) or ())[:1] == (self.batch,)

    def _places(self, write: Writer, of: int) -> str:
        """The index as [batch, 1, .., 1], with as many axes as the rows up to their own."""
        g, places, shape = write.g, self.index, (self.batch, *[1] * (of + 1))
        if g.shape(places) != shape:
            places = reshape(g, places, [-1, *[1] * (of + 1)], at=write.at)
        if g.dtype(self.index) != TensorProto.INT64:
            places = g.op("Cast", places, at=write.at, to=TensorProto.INT64)
        g.learn_type(places, TensorType(TensorProto.INT64, shape))
        return places


Selection: TypeAlias = Entries | Window | OneEach
Wanted: TypeAlias = ForAll | OneEach
"""What an operator is asked for: it need not know how the rows are taken."""


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """One place where rows are selected: along `axis` of `value`, and `result` is what is left."""

    selection: Selection
    value: str
    axis: int
    result: NodeProto
    drops_axis: bool
