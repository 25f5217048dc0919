"""Rules of operators that slice, gather, join or pad, and of Range and OneHot."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from passes.analysis.axes import positive_axis
from passes.analysis.shapes.dims import best, plus, slice_indices, sliced
from passes.analysis.shapes.facts import (
    INT32,
    INT64,
    MOST_CONTENTS,
    Answer,
    Array,
    Fact,
    Op,
    Rule,
    Size,
    Sizes,
    blank,
    numeric,
    same_as_input,
    scalar,
    small_shape,
    vector,
)
from toolkit.ir import node as nd
from toolkit.symbolic import Dim, ceildiv, floordiv, maximum


def concat(op: Op) -> Answer:
    shapes = [op.shape(i) for i in range(len(op.inputs))]
    dtype = next((found for i in range(len(op.inputs)) if (found := op.dtype(i))), 0)
    known = [shape for shape in shapes if shape is not None]
    if not known:
        return Fact(dtype, None)
    axis = positive_axis(op.int("axis", 1 if op.version < 4 else 0), len(known[0]))
    sizes: list[Size] = [best(column) for column in zip(*known, strict=True)]
    complete = len(known) == len(shapes)
    sizes[axis] = plus(*(shape[axis] for shape in known)) if complete else None
    parts = None if small_shape(sizes) is None else op.all_contents()
    return Fact(dtype, sizes, None if parts is None else np.concatenate(parts, axis))


def slice_(op: Op) -> Answer:
    known, shape = op.type(0), op.shape(0)
    if shape is None:
        return Fact(known.dtype, None)
    old = op.version < 10
    starts: Sizes | None = op.ints("starts") if old else op.sizes(1)
    ends: Sizes | None = op.ints("ends") if old else op.sizes(2)
    count = _slice_count(op, starts, ends)
    axes = op.ints("axes") if old else op.numbers(3)
    if axes is None and not op.given(3):
        axes = None if count is None else list(range(count))
    if axes is None:
        return Fact(known.dtype, blank(len(shape)))
    starts = starts if starts is not None else blank(len(axes))
    ends = ends if ends is not None else blank(len(axes))
    steps: Sizes | None = op.sizes(4) if op.given(4) and not old else [1] * len(axes)
    steps = steps if steps is not None else blank(len(axes))
    sizes: list[Size] = list(shape)
    data = op.data(0)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        place = positive_axis(axis, len(shape))
        sizes[place] = sliced(shape[place], start, end, step)
        data = None if data is None else _cut(data, place, start, end, step)
    return Fact(known.dtype, sizes, data)


def _slice_count(op: Op, starts: Sizes | None, ends: Sizes | None) -> int | None:
    """Return the number of sliced axes when they are not listed, or None."""
    for found in (starts, ends):
        if found is not None:
            return len(found)
    return op.length(1) or op.length(2)


def _cut(data: Array, axis: int, start: Size, end: Size, step: Size) -> Array | None:
    if not (isinstance(start, int) and isinstance(end, int) and isinstance(step, int)):
        return None
    taken = slice_indices(data.shape[axis], start, end, step) if step else None
    return None if taken is None else np.take(data, list(taken), axis)


def split(op: Op) -> Answer:
    known, shape = op.type(0), op.shape(0)
    count = op.outputs
    if shape is None:
        return [Fact(known.dtype, None)] * count
    axis = positive_axis(op.int("axis"), len(shape))
    parts = _split_sizes(op, shape[axis], count)
    facts: list[Fact] = []
    data, offset = op.data(0), 0
    for part in parts:
        sizes = (*shape[:axis], part, *shape[axis + 1 :])
        piece = None
        if data is not None and data.ndim == 1 and isinstance(part, int):
            piece = data[offset : offset + part]
            offset += part
        else:
            data = None
        facts.append(Fact(known.dtype, sizes, piece))
    return facts


def _split_sizes(op: Op, size: Dim, count: int) -> Sizes:
    given: Sizes | None = op.ints("split")
    if given is None and op.given(1):
        given = op.sizes(1) or blank(count)
    if given is not None:
        if len(given) != count:
            raise ValueError("Split needs one size per output")
        return given
    equal = floordiv(size, count)
    if op.version < 18 or equal * count == size:
        return [equal] * count
    if isinstance(size, int):
        chunk = -(-size // count)
        last = size - chunk * (count - 1)
        return [*[chunk] * (count - 1), last] if last >= 0 else blank(count)
    return blank(count)


def gather(op: Op) -> Answer:
    known, shape, index = op.type(0), op.shape(0), op.shape(1)
    if shape is None or index is None:
        return Fact(known.dtype, None)
    axis = positive_axis(op.int("axis"), len(shape))
    sizes = (*shape[:axis], *index, *shape[axis + 1 :])
    data = op.data(0)
    if data is not None:
        places = op.data(1)
        if places is None or not numeric(places) or small_shape(sizes) is None:
            data = None
        else:
            taken: Any = np.take(data, places.astype(np.int64), axis)
            data = cast(Array, taken) if isinstance(taken, np.ndarray) else scalar(taken)
    return Fact(known.dtype, sizes, data)


def gather_nd(op: Op) -> Answer:
    shape, index = op.shape(0), op.shape(1)
    depth = index[-1] if index else None
    if shape is None or index is None or not isinstance(depth, int):
        return Fact(op.dtype(0), None)
    return Fact(op.dtype(0), (*index[:-1], *shape[op.int("batch_dims") + depth :]))


def pad(op: Op) -> Answer:
    known, shape = op.type(0), op.shape(0)
    pads = _pads(op)
    if shape is None:
        return Fact(known.dtype, None)
    axes = list(range(len(shape)))
    if op.given(3):
        numbers = op.numbers(3)
        if numbers is None:
            return Fact(known.dtype, blank(len(shape)))
        axes = [positive_axis(axis, len(shape)) for axis in numbers]
    if pads is None:
        return Fact(
            known.dtype, [None if place in axes else size for place, size in enumerate(shape)]
        )
    if len(pads) != 2 * len(axes):
        raise ValueError("Pad needs two pads per axis")
    sizes: list[Size] = list(shape)
    for place, begin, end in zip(axes, pads, pads[len(axes) :], strict=False):
        sizes[place] = plus(sizes[place], begin, end)
    return Fact(known.dtype, sizes)


def _pads(op: Op) -> list[Dim] | None:
    if op.version >= 11:
        return op.sizes(1)
    return cast("list[Dim] | None", op.ints("pads" if op.version >= 2 else "paddings"))


def range_(op: Op) -> Answer:
    dtype = op.dtype(0) or op.dtype(1)
    if dtype not in (INT64, INT32):
        return _range_of_floats(op, dtype)
    start, limit, delta = (op.contents(i) for i in range(3))
    if start is None or limit is None or delta is None:
        return Fact(dtype, (None,))
    first, last, step = start.item(), limit.item(), delta.item()
    if not isinstance(step, int) or step == 0:
        return Fact(dtype, (None,))
    count = maximum(ceildiv(last - first, step), 0)
    data = None
    if isinstance(count, int) and count <= MOST_CONTENTS:
        data = vector([first + place * step for place in range(count)])
    return Fact(dtype, (count,), data)


def _range_of_floats(op: Op, dtype: int) -> Answer:
    """Infer a Range from 0 to a size cast to float, as TensorFlow exports it; defer the rest."""
    start, delta = op.const(0), op.const(2)
    producer = op.known.graph.producer(op.inputs[1])
    if start is None or delta is None or producer is None or not nd.is_op(producer, "Cast"):
        return None
    limit = op.known.contents(producer.input[0])
    if limit is None or limit.size != 1 or (start.item(), delta.item()) != (0, 1):
        return None
    return Fact(dtype, (maximum(limit.item(), 0),))


def one_hot(op: Op) -> Answer:
    dtype, shape = op.dtype(2), op.shape(0)
    if shape is None:
        return Fact(dtype, None)
    depth: Size = None
    sizes, number = op.sizes(1), op.const(1)
    if sizes is not None:
        depth = sizes[0]
    elif number is not None and number.size == 1:
        depth = int(number.reshape(-1)[0])
    place = positive_axis(op.int("axis", -1), len(shape) + 1)
    return Fact(dtype, (*shape[:place], depth, *shape[place:]))


RULES: dict[str, Rule] = {
    "Concat": concat,
    "Slice": slice_,
    "Split": split,
    "Gather": gather,
    "GatherND": gather_nd,
    "Scatter": same_as_input,
    "ScatterElements": same_as_input,
    "ScatterND": same_as_input,
    "TensorScatter": same_as_input,
    "Pad": pad,
    "Range": range_,
    "OneHot": one_hot,
}
