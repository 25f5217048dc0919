"""Reading and writing what a node works on, whatever the opset calls it.

Axes, ranges, pads and bounds moved from attributes to inputs over the years. Readers here take
either form and answer None for what only the run will know; writers use the form of the model's
opset. `fits` and `reshape_target` are the two questions about shapes that most rewrites ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.axes import positive_axes
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import Shape, TensorType
from toolkit.symbolic import Dim, Expr, floordiv, is_positive

# -- reading


def given(node: NodeProto, index: int) -> str:
    """The name of an input, blank when it was left out."""
    return node.input[index] if index < len(node.input) else ""


def dims(g: Graph, value: str) -> list[Dim] | None:
    """The integers in `value`, symbolic ones among them, as a flat list; None when unknown."""
    known = g.data(value)
    if known is None:
        known = g.const(value)
        if known is None or known.dtype.kind not in "iu":
            return None
    sizes: list[Dim] = known.reshape(-1).tolist()
    return sizes


def ints(g: Graph, value: str) -> list[int] | None:
    """The integers in `value` when all of them are plain numbers."""
    return whole(dims(g, value))


def whole(sizes: Sequence[Dim] | None) -> list[int] | None:
    """The same sizes, if they all are plain numbers."""
    if sizes is None or any(isinstance(size, Expr) for size in sizes):
        return None
    return [size for size in sizes if isinstance(size, int)]


def operand(
    g: Graph, node: NodeProto, name: str, index: int, absent: Sequence[int] | None = None
) -> list[Dim] | None:
    """The integers of the attribute `name` or the input `index`; `absent` when neither is given."""
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
    """`operand`, for plain numbers only."""
    return whole(operand(g, node, name, index, absent))


def permutation(g: Graph, node: NodeProto) -> tuple[int, ...] | None:
    """The axes of a Transpose; reversed when it names none."""
    perm = nd.attr(node, "perm")
    if perm is not None:
        return tuple(perm)
    rank = g.rank(node.input[0])
    return None if rank is None else tuple(reversed(range(rank)))


def normalized_from(g: Graph, node: NodeProto) -> int | None:
    """The first of the axes that a norm runs along, if scale and bias lie along those alone.

    None when that is not known, or where they differ along others: by heads, as [heads, 1, size].
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
    """Whether any output but the first has users."""
    return any(extra and not g.is_unused(extra) for extra in node.output[1:])


# -- shapes


def same_shape(g: Graph, a: str, b: str) -> bool:
    """Whether both have a known shape, and the same one at every run."""
    shape = g.shape(a)
    return shape is not None and shape == g.shape(b)


def fits(g: Graph, value: str, into: str, result: str) -> bool:
    """Whether broadcasting `value` against `into`, as `result`, leaves the shape of `into`."""
    if same_shape(g, into, result):
        return True
    shape, rank = g.shape(value), g.rank(into)
    if shape is None or any(size != 1 for size in shape):
        return False
    return not shape or (rank is not None and len(shape) <= rank)


def broadcast(*shapes: Shape) -> Shape | None:
    """The shape that these broadcast to; None when two sizes cannot be compared."""
    sizes: list[Dim] = []
    for place in range(1, max(map(len, shapes), default=0) + 1):
        size: Dim = 1
        for shape in shapes:
            other: Dim = shape[-place] if place <= len(shape) else 1
            if other in (1, size):
                continue
            if size != 1:
                return None
            size = other
        sizes.append(size)
    return tuple(reversed(sizes))


def reshape_target(
    source: Shape | None, result: Shape | None, inferred: int | None = None
) -> list[int] | None:
    """What a Reshape has to be told to make `result` of `source`, at every run; None if it cannot.

    A size that varies is copied (0) from the same place, which is right for empty tensors too, or
    is the only one that is left to the runtime (-1). That needs all others to be positive for sure,
    because next to an empty dimension nothing can be inferred; unless it is at the place that the
    model itself had left to the runtime, `inferred`.
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
    """Give an operand new contents in the form that the node uses: attribute, or input of the type
    of the old one or of `like`."""
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
