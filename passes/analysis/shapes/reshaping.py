"""Rules of operators that reshape, permute or repeat elements, and of those that return shapes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from passes.analysis.axes import positive_axis
from passes.analysis.shapes.dims import broadcast, is_zero_only_if_empty, product
from passes.analysis.shapes.facts import (
    CONTENT_TYPES,
    FLOAT,
    INT64,
    Answer,
    Fact,
    Op,
    Rule,
    Size,
    Sizes,
    blank,
    of_rank,
    scalar,
    small_shape,
    vector,
)
from toolkit.ir.tensor_type import Shape
from toolkit.symbolic import Dim, floordiv, is_nonneg


def identity(op: Op) -> Answer:
    known = op.type(0)
    if known.dtype == 0:
        return None  # possibly a sequence
    return Fact(known.dtype, known.shape, op.data(0))


def constant(op: Op) -> Answer:
    tensor = op.known.graph.tensor(op.node.output[0])
    if tensor is None:
        return None
    return Fact(tensor.data_type, tuple(tensor.dims), op.known.data(op.node.output[0]))


def shape_of(op: Op) -> Answer:
    shape = op.shape(0)
    if shape is None:
        return Fact(INT64, (None,))
    rank = len(shape)
    start, end = op.int("start"), op.int("end", rank)
    start = max(start + rank, 0) if start < 0 else min(start, rank)
    end = max(end + rank, 0) if end < 0 else min(end, rank)
    picked = shape[start:end]
    return Fact(INT64, (len(picked),), vector(picked))


def size_of(op: Op) -> Answer:
    shape = op.shape(0)
    return Fact(INT64, (), None if shape is None else scalar(product(shape)))


# -- views


def reshape(op: Op) -> Answer:
    dtype, shape = op.type(0).dtype, op.shape(0)
    wanted = cast("list[Dim] | None", op.ints("shape")) if op.version < 5 else op.sizes(1)
    if wanted is None:
        return Fact(dtype, of_rank(op.length(1)))
    target = reshaped(shape, wanted, op.int("allowzero") != 0)
    numbers = small_shape(target)
    data = op.contents(0) if numbers is not None else None
    return Fact(dtype, target, None if data is None else data.reshape(numbers))


def reshaped(shape: Shape | None, wanted: list[Dim], allow_zero: bool) -> Sizes:
    """Return the result shape of a Reshape to the target `wanted`.

    A symbolic entry that is 0 at run time copies a size. It is taken for a size only if it equals
    the size that would be copied, if it accounts for the element count, or if it is 0 for empty
    tensors alone.
    """
    sizes: list[Size] = []
    inferred: int | None = None
    doubtful: list[int] = []
    for place, entry in enumerate(wanted):
        copied = shape[place] if shape is not None and place < len(shape) else None
        if entry == 0 and not allow_zero:
            sizes.append(copied)
        elif entry == -1:
            inferred = place
            sizes.append(None)
        else:
            sizes.append(entry if is_nonneg(entry) else None)
            if not (allow_zero or entry == copied or is_zero_only_if_empty(entry)):
                doubtful.append(place)
    total = None if shape is None else product(shape)
    if doubtful and product(sizes) != total:
        for place in doubtful:
            sizes[place] = None
    if inferred is None and sizes.count(None) == 1:
        # An unknown entry accounts for the element count, where that is provably not 0.
        others = product(size for size in sizes if size is not None)
        if isinstance(others, int) and others > 0:
            inferred = sizes.index(None)
    if inferred is not None and shape is not None and total is not None:
        others = product(size for place, size in enumerate(sizes) if place != inferred)
        if others is not None and others != 0:
            sizes[inferred] = floordiv(*_without_common(shape, sizes, total, others))
    return sizes


def _without_common(shape: Shape, sizes: list[Size], total: Dim, others: Dim) -> tuple[Dim, Dim]:
    """Return numerator and denominator without the sizes that are factors of both.

    The symbolic division cancels such factors too, but not where a size is a sum.
    """
    if isinstance(total, int) or isinstance(others, int):
        return total, others
    above, below = list(shape), [size for size in sizes if size is not None]
    for size in list(below):
        if size in above:
            above.remove(size)
            below.remove(size)
    return cast(Dim, product(above)), cast(Dim, product(below))


def flatten(op: Op) -> Answer:
    shape = op.shape(0)
    if shape is None:
        return Fact(op.dtype(0), (None, None))
    axis = op.int("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return Fact(op.dtype(0), (product(shape[:axis]), product(shape[axis:])))


def squeeze(op: Op) -> Answer:
    known, shape = op.type(0), op.shape(0)
    axes = op.axes(1)
    if shape is None:
        return Fact(known.dtype, None)
    if axes is None:
        # Without axes, all sizes of 1 are removed: a symbolic size that may be 1 leaves the rank
        # unknown.
        if op.given(1) or not all(isinstance(size, int) for size in shape):
            return Fact(known.dtype, None)
        gone = {place for place, size in enumerate(shape) if size == 1}
    else:
        gone = {positive_axis(axis, len(shape)) for axis in axes}
    kept = tuple(size for place, size in enumerate(shape) if place not in gone)
    data = op.contents(0)
    return Fact(known.dtype, kept, None if data is None else data.reshape(small_shape(kept)))


def unsqueeze(op: Op) -> Answer:
    known, shape = op.type(0), op.shape(0)
    axes = op.axes(1)
    if shape is None or axes is None:
        return Fact(known.dtype, None)
    rank = len(shape) + len(axes)
    places = {positive_axis(axis, rank) for axis in axes}
    rest = iter(shape)
    sizes = tuple(1 if place in places else next(rest) for place in range(rank))
    data = op.contents(0)
    return Fact(known.dtype, sizes, None if data is None else data.reshape(small_shape(sizes)))


def transpose(op: Op) -> Answer:
    known, shape = op.type(0), op.shape(0)
    if shape is None:
        return Fact(known.dtype, None)
    order = op.ints("perm") or list(range(len(shape)))[::-1]
    if len(order) != len(shape):
        raise ValueError("perm does not fit the rank")
    data: Any = op.data(0)
    if data is not None:
        data = data.transpose(order)
    return Fact(known.dtype, tuple([shape[axis] for axis in order]), data)


def expand(op: Op) -> Answer:
    known, shape = op.type(0), op.shape(0)
    wanted: Sizes | None = op.sizes(1) or of_rank(op.length(1))
    if shape is None or wanted is None:
        return Fact(known.dtype, None)
    target = broadcast(shape, wanted)
    numbers = small_shape(target)
    data: Any = op.data(0)
    if data is not None:
        data = None if numbers is None else np.broadcast_to(data, numbers)
    return Fact(known.dtype, target, data)


def tile(op: Op) -> Answer:
    known, shape, repeats = op.type(0), op.shape(0), op.sizes(1)
    if op.version < 6:
        return None  # another signature
    if shape is None:
        return Fact(known.dtype, None if repeats is None else blank(len(repeats)))
    if repeats is None:
        return Fact(known.dtype, blank(len(shape)))
    target = [product(pair) for pair in zip(shape, repeats, strict=True)]
    data: Any = op.data(0)
    if data is not None:
        data = None if small_shape(target) is None else np.tile(data, cast("list[int]", repeats))
    return Fact(known.dtype, target, data)


def constant_of_shape(op: Op) -> Answer:
    value = op.attribute("value")
    dtype = FLOAT if value is None else value.t.data_type
    sizes = op.sizes(0)
    if sizes is None:
        return Fact(dtype, of_rank(op.length(0)))
    numbers, data = small_shape(sizes), None
    if numbers is not None and dtype in CONTENT_TYPES and value is not None:
        item = int(op.known.graph.model.weights.array(value.t).reshape(-1)[0])
        data = np.full(numbers, item, dtype=object)
    return Fact(dtype, [size if is_nonneg(size) else None for size in sizes], data)


def depth_to_space(op: Op) -> Answer:
    shape, block = op.shape(0), op.int("blocksize", 1)
    if shape is None:
        return Fact(op.dtype(0), blank(4))
    n, c, h, w = shape
    return Fact(op.dtype(0), (n, floordiv(c, block * block), h * block, w * block))


def space_to_depth(op: Op) -> Answer:
    shape, block = op.shape(0), op.int("blocksize", 1)
    if shape is None:
        return Fact(op.dtype(0), blank(4))
    n, c, h, w = shape
    return Fact(op.dtype(0), (n, c * block * block, floordiv(h, block), floordiv(w, block)))


RULES: dict[str, Rule] = {
    "Identity": identity,
    "Constant": constant,
    "Shape": shape_of,
    "Size": size_of,
    "Reshape": reshape,
    "Flatten": flatten,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Transpose": transpose,
    "Expand": expand,
    "Tile": tile,
    "ConstantOfShape": constant_of_shape,
    "DepthToSpace": depth_to_space,
    "SpaceToDepth": space_to_depth,
}
