"""Read and write the operands of a node independently of the opset.

Axes, ranges, pads and bounds moved from attributes to inputs over the years. The functions that
read take either form and return None for a value that only the run determines; those that write use
the form of the model's opset. `fits` and `reshape_target` answer the two questions about shapes
that most rewrites ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.axes import positive_axes
from passes.analysis.shapes.dims import slice_indices
from toolkit.ir import Array, Graph, Shape, TensorType, node as nd
from toolkit.symbolic import Dim, Expr, floordiv, is_positive

# -- reading


def given(node: NodeProto, index: int) -> str:
    """Return the name of an input, or "" if it is omitted."""
    return node.input[index] if index < len(node.input) else ""


def dims(g: Graph, value: str) -> list[Dim] | None:
    """Return the integers in `value`, numbers or symbolic, as a flat list; None if unknown."""
    known = g.data(value)
    if known is None:
        known = g.const(value)
        if known is None or known.dtype.kind not in "iu":
            return None
    sizes: list[Dim] = known.reshape(-1).tolist()
    return sizes


def ints(g: Graph, value: str) -> list[int] | None:
    """Return the integers in `value` if all of them are numbers, or None."""
    return whole(dims(g, value))


def whole(sizes: Sequence[Dim] | None) -> list[int] | None:
    """Return `sizes` if all of them are numbers, or None."""
    if sizes is None or any(isinstance(size, Expr) for size in sizes):
        return None
    return [size for size in sizes if isinstance(size, int)]


def operand(
    g: Graph, node: NodeProto, name: str, index: int, absent: Sequence[int] | None = None
) -> list[Dim] | None:
    """Return the integers of the attribute `name` or the input `index`; `absent` without both."""
    found: list[Dim] | int | None = nd.attr(node, name)
    if found is not None:
        return [found] if isinstance(found, int) else found
    value = given(node, index)
    if value:
        return dims(g, value)
    return None if absent is None else list(absent)


def int_operand(
    g: Graph, node: NodeProto, name: str, index: int, absent: Sequence[int] | None = None
) -> list[int] | None:
    """Return what `operand` returns if all of it are numbers, or None."""
    return whole(operand(g, node, name, index, absent))


def slice_ranges(g: Graph, node: NodeProto) -> dict[int, tuple[Dim, Dim, Dim]] | None:
    """Return the (start, end, step) of each axis that a Slice names, or None if unknown.

    Axes are counted from the front.
    """
    starts, ends = operand(g, node, "starts", 1), operand(g, node, "ends", 2)
    if starts is None or ends is None:
        return None
    absent = range(len(starts))
    axes = positive_axes(int_operand(g, node, "axes", 3, absent), g.rank(node.input[0]))
    steps = operand(g, node, "steps", 4, absent=[1] * len(starts))
    if axes is None or steps is None or not len(starts) == len(ends) == len(axes) == len(steps):
        return None
    return dict(zip(axes, zip(starts, ends, steps, strict=True), strict=True))


def slice_range(g: Graph, node: NodeProto) -> tuple[int, int, int] | None:
    """Return axis, start and end of a Slice with step 1 along one axis of known size."""
    found, shape = slice_ranges(g, node), g.shape(node.input[0])
    if found is None or shape is None or len(found) != 1:
        return None
    [(axis, (start, end, step))] = found.items()
    numbers = whole([shape[axis], start, end])
    if numbers is None or step != 1:
        return None
    size, first, last = numbers
    taken = slice_indices(size, first, last, 1)
    return None if taken is None else (axis, taken.start, taken.stop)


def permutation(g: Graph, node: NodeProto) -> tuple[int, ...] | None:
    """Return the permutation of a Transpose; without the attribute, the axes in reverse."""
    perm = nd.attr(node, "perm")
    if perm is not None:
        return tuple(perm)
    rank = g.rank(node.input[0])
    return None if rank is None else tuple(reversed(range(rank)))


def normalized_from(g: Graph, node: NodeProto) -> int | None:
    """Return the first normalized axis of a norm, or None if it is unknown.

    Also None if scale or bias vary along other axes, as per-head scales [heads, 1, size] do.
    """
    rank = g.rank(node.input[0])
    axes = positive_axes([nd.attr(node, "axis", -1)], rank)
    if rank is None or axes is None:
        return None
    for name in nd.inputs_of(node)[1:]:
        shape = g.shape(name)
        if shape is None or any(size != 1 for size in shape[: axes[0] - rank]):
            return None
    return axes[0]


def scalar_value(g: Graph, value: str) -> float | None:
    """Return the number in a float constant of one element, or None."""
    array = g.const(value)
    if array is None or array.size != 1 or array.dtype.kind != "f":
        return None
    return float(array.reshape(-1)[0])


def extra_outputs_used(g: Graph, node: NodeProto) -> bool:
    """Return whether any output but the first has users."""
    return any(extra and not g.is_unused(extra) for extra in node.output[1:])


# -- shapes


def same_shape(g: Graph, a: str, b: str) -> bool:
    """Return whether both values have the same known shape."""
    shape = g.shape(a)
    return shape is not None and shape == g.shape(b)


def fits(g: Graph, value: str, into: str, result: str) -> bool:
    """Return whether `into` keeps its shape when `value` is broadcast to it, with this `result`."""
    if same_shape(g, into, result):
        return True
    shape, rank = g.shape(value), g.rank(into)
    if shape is None or any(size != 1 for size in shape):
        return False
    return not shape or (rank is not None and len(shape) <= rank)


def broadcast(*shapes: Shape | None) -> Shape | None:
    """Return the shape that these broadcast to; None if one is unknown or two sizes may differ."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    sizes: list[Dim] = []
    for place in range(1, max(map(len, known), default=0) + 1):
        column = {shape[-place] for shape in known if place <= len(shape)} - {1}
        if len(column) > 1:
            return None
        sizes.append(*column or (1,))
    return tuple(reversed(sizes))


def reshape_target(
    source: Shape | None, result: Shape | None, inferred: int | None = None
) -> list[int] | None:
    """Return the constant target that reshapes `source` to `result` in every run, or None.

    A symbolic size is copied (0) from the same axis, which holds for empty tensors too, or is the
    only inferred one (-1). Next to an empty dimension nothing can be inferred, so all other sizes
    must be provably positive, unless the model itself infers the size at axis `inferred`.
    """
    if source is None or result is None:
        return None
    target: list[int] = []
    for place, size in enumerate(result):
        copied = place < len(source) and source[place] == size
        if size == 0 and not copied:
            return None
        target.append(size if isinstance(size, int) else 0 if copied else -1)
    if -1 in target:
        left = target.index(-1)
        others = (*result[:left], *result[left + 1 :])
        if -1 in target[left + 1 :] or (left != inferred and not all(map(is_positive, others))):
            return None
    return target


# -- writing


def int_vector(g: Graph, values: Sequence[int], hint: str = "axes") -> str:
    return g.constant(np.array(values, dtype=np.int64), hint)


def scalar(g: Graph, number: float, dtype: int, hint: str = "scalar") -> str:
    """Add a constant without axes, of element type `dtype`."""
    array: Array = np.array(number, dtype=helper.tensor_dtype_to_np_dtype(dtype))
    return g.constant(array, hint)


def squeeze(g: Graph, x: str, axes: Sequence[int], at: NodeProto) -> str:
    return _with_axes(g, "Squeeze", x, axes, at)


def unsqueeze(g: Graph, x: str, axes: Sequence[int], at: NodeProto | None = None) -> str:
    return _with_axes(g, "Unsqueeze", x, axes, at)


def _with_axes(g: Graph, op_type: str, x: str, axes: Sequence[int], at: NodeProto | None) -> str:
    if g.opset() < 13:
        return g.op(op_type, x, at=at, axes=list(axes))
    return g.op(op_type, x, int_vector(g, axes), at=at)


def reshape(
    g: Graph, x: str, target: Sequence[int], at: NodeProto, shape: Shape | None = None
) -> str:
    """Add a Reshape (opset 5) to `target`; its result has `shape`, inferred by default."""
    result, source = g.op("Reshape", x, int_vector(g, target, "shape"), at=at), g.shape(x)
    if shape is None and source is not None:
        shape = _reshaped(source, target)
    if shape is not None:
        g.learn_type(result, TensorType(g.dtype(x), shape))
    return result


def _reshaped(source: Shape, target: Sequence[int]) -> Shape | None:
    sizes: list[Dim] = [source[i] if size == 0 else size for i, size in enumerate(target)]
    if -1 in target:
        inferred, rest = target.index(-1), -prod(sizes)
        if not is_positive(rest):
            return None
        sizes[inferred] = floordiv(prod(source), rest)
        if sizes[inferred] * rest != prod(source):
            return None
    return tuple(sizes)


def transpose(g: Graph, x: str, perm: Sequence[int], at: NodeProto) -> str:
    result, shape = g.op("Transpose", x, at=at, perm=list(perm)), g.shape(x)
    if shape is not None:
        g.learn_type(result, TensorType(g.dtype(x), tuple(shape[axis] for axis in perm)))
    return result


def set_int_operand(
    g: Graph, node: NodeProto, name: str, index: int, values: Sequence[int], like: str = ""
) -> None:
    """Set the integers of an operand in the form that the node uses.

    That is an attribute, or an input with the element type of the old one or of `like`.
    """
    old = nd.attr(node, name)
    if old is not None:
        g.set_attr(node, name, list(values) if isinstance(old, list) else values[0])
        return
    before = given(node, index)
    narrow = g.dtype(before or like) == TensorProto.INT32 if before or like else False
    array: Array = np.array(values, dtype=np.int32 if narrow else np.int64)
    if before and g.rank(before) == 0:
        array = array.reshape(())
    inputs = list(node.input)
    inputs.extend([""] * (index + 1 - len(inputs)))
    inputs[index] = g.constant(array, name)
    g.set_inputs(node, inputs)
