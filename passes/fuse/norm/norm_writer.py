"""Writing a normalization: over which axes, in which operator, with which layout.

    LayerNormalization     (x - mean x) / sqrt(var x + eps), over the last axes
    RMSNormalization       x / sqrt(mean x^2 + eps), over the last axes
    InstanceNormalization  like the first, over all axes but the first two

Statistics over other axes (ConvNeXt normalizes the channels of N C H W) are taken between two
Transposes: 1.8 to 3.2 times as fast on the runtime's CPU kernels as the formula. Scales are
written in full, since the kernels are slow where they have to broadcast one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.axes import positive_axes
from passes.analysis.operands import int_operand, transpose
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import FLOATS, TensorType
from toolkit.rewriting.rule import Miss
from toolkit.symbolic import Dim

LAYER, RMS, INSTANCE = "LayerNormalization", "RMSNormalization", "InstanceNormalization"


@dataclass(frozen=True, slots=True)
class Core:
    """A value, the axes that its statistics are taken over, and what is added to the mean square.

    `factor` is a number that the result is multiplied by.
    """

    x: str
    axes: tuple[int, ...]
    epsilon: float
    factor: float = 1.0


def reduced_axes(g: Graph, x: str, *reductions: NodeProto | None) -> tuple[int, ...]:
    """The axes that all these reductions of values shaped like `x` are over, kept with size 1."""
    rank = g.rank(x)
    found: set[tuple[int, ...]] = set()
    for node in reductions:
        if node is None:
            continue
        axes = int_operand(g, node, "axes", 1, absent=[])
        if nd.is_op(node, "GlobalAveragePool") and rank is not None:
            axes = list(range(2, rank))
        if axes == [] and not nd.attr(node, "noop_with_empty_axes", 0) and rank is not None:
            axes = list(range(rank))
        positive = positive_axes(axes, rank)
        if not positive or rank is None:
            raise Miss(f"the axes of {nd.label(node)} are not known")
        if not nd.attr(node, "keepdims", 1):
            raise Miss(f"{nd.label(node)} drops the axes that it reduces")
        found.add(tuple(sorted(positive)))
    if len(found) != 1:
        raise Miss("the statistics are taken over different axes")
    return found.pop()


def sizes_of(g: Graph, core: Core) -> list[int]:
    """The sizes of the axes that are normalized, which must be known to write a scale."""
    shape = g.shape(core.x)
    sizes: list[Dim] = [] if shape is None else [shape[axis] for axis in core.axes]
    known = [size for size in sizes if isinstance(size, int)]
    if shape is None or len(known) != len(sizes):
        raise Miss(f"the size of the normalized axes of '{core.x}' is not known")
    return known


def write_norm(g: Graph, op_type: str, core: Core, node: NodeProto) -> str:
    """A LayerNormalization or RMSNormalization, between Transposes where the axes are not last."""
    dtype, shape = g.dtype(core.x), g.shape(core.x)
    if dtype not in FLOATS or shape is None:
        raise Miss(f"the type of '{core.x}' is not known to be floats")
    sizes, rank, count = sizes_of(g, core), len(shape), len(core.axes)
    scale = full(g, dtype, sizes, core.factor)
    if core.axes == tuple(range(rank - count, rank)):
        return g.op(op_type, core.x, scale, at=node, axis=-count, epsilon=core.epsilon)
    perm = [axis for axis in range(rank) if axis not in core.axes] + list(core.axes)
    last = transpose(g, core.x, perm, node)
    normal = g.op(op_type, last, scale, at=node, axis=-count, epsilon=core.epsilon)
    type_ = TensorType(dtype, tuple(shape[axis] for axis in perm))
    g.learn_type(last, type_)
    g.learn_type(normal, type_)
    return transpose(g, normal, inverse(perm), node)


def write_instance_norm(g: Graph, core: Core, node: NodeProto) -> str | None:
    """An InstanceNormalization; None where it does not say the same, or has no kernel."""
    shape = g.shape(core.x)
    if shape is None or g.dtype(core.x) not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        return None
    channels = shape[1] if len(shape) > 2 else None
    if core.axes != tuple(range(2, len(shape))) or not isinstance(channels, int):
        return None
    scale = full(g, g.dtype(core.x), [channels], core.factor)
    shift = full(g, g.dtype(core.x), [channels], 0)
    return g.op(INSTANCE, core.x, scale, shift, at=node, epsilon=core.epsilon)


def full(g: Graph, dtype: int, sizes: Sequence[int], value: float) -> str:
    """A constant of one number, everywhere."""
    array: Array = np.full(tuple(sizes), value, dtype=helper.tensor_dtype_to_np_dtype(dtype))
    return g.constant(array, "scale" if value else "shift")


def inverse(perm: Sequence[int]) -> list[int]:
    return sorted(range(len(perm)), key=perm.__getitem__)
