"""Write a normalization with the operator that fits its axes.

    LayerNormalization     (x - mean x) / sqrt(var x + eps), over the last axes
    RMSNormalization       x / sqrt(mean x^2 + eps), over the last axes
    InstanceNormalization  like the first, over all axes but the first two

Norms over other axes (ConvNeXt normalizes the channels of N C H W) are written between two
Transposes: 1.8 to 3.2 times as fast on onnxruntime's CPU kernels as the formula. Scales are written
in full size, since the kernels are slow at broadcasting a single number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.axes import positive_axes
from passes.analysis.operands import int_operand, transpose, whole
from passes.fuse.typed_op import typed_op
from toolkit.ir import FLOATS, Array, Graph, node as nd
from toolkit.rewriting.rule import MatchFailure

LAYER, RMS, INSTANCE = "LayerNormalization", "RMSNormalization", "InstanceNormalization"


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A normalization of `x` over `axes`, multiplied by `factor`."""

    x: str
    axes: tuple[int, ...]
    epsilon: float
    factor: float = 1.0


def reduced_axes(g: Graph, x: str, *reductions: NodeProto | None) -> tuple[int, ...]:
    """Return the axes of these reductions, which must agree and keep their axes with size 1."""
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
            raise MatchFailure(f"the axes of {nd.label(node)} are not known")
        if not nd.attr(node, "keepdims", 1):
            raise MatchFailure(f"{nd.label(node)} does not keep the reduced axes")
        found.add(tuple(sorted(positive)))
    if len(found) != 1:
        raise MatchFailure("the statistics are over different axes")
    return found.pop()


def sizes_of(g: Graph, norm: NormSpec) -> list[int]:
    """Return the sizes of the normalized axes, which must be known to write a scale."""
    shape = g.shape(norm.x)
    sizes = None if shape is None else whole([shape[axis] for axis in norm.axes])
    if sizes is None:
        raise MatchFailure(f"the size of the normalized axes of '{norm.x}' is not known")
    return sizes


def write_norm(g: Graph, op_type: str, norm: NormSpec, node: NodeProto) -> str:
    """Write a layer norm or rms norm, between Transposes unless the axes are the last."""
    dtype, shape = g.dtype(norm.x), g.shape(norm.x)
    if dtype not in FLOATS or shape is None:
        raise MatchFailure(f"the type of '{norm.x}' is not known to be float")
    sizes, rank, count = sizes_of(g, norm), len(shape), len(norm.axes)
    scale = full(g, dtype, sizes, norm.factor)
    if norm.axes == tuple(range(rank - count, rank)):
        return g.op(op_type, norm.x, scale, at=node, axis=-count, epsilon=norm.epsilon)
    perm = [axis for axis in range(rank) if axis not in norm.axes] + list(norm.axes)
    last = transpose(g, norm.x, perm, node)
    known = g.type(last)
    normal = typed_op(g, known, op_type, last, scale, at=node, axis=-count, epsilon=norm.epsilon)
    return transpose(g, normal, inverse(perm), node)


def write_instance_norm(g: Graph, norm: NormSpec, node: NodeProto) -> str | None:
    """Write an InstanceNormalization; return None where it is not equivalent or has no kernel."""
    shape = g.shape(norm.x)
    if shape is None or g.dtype(norm.x) not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        return None
    channels = shape[1] if len(shape) > 2 else None
    if norm.axes != tuple(range(2, len(shape))) or not isinstance(channels, int):
        return None
    scale = full(g, g.dtype(norm.x), [channels], norm.factor)
    shift = full(g, g.dtype(norm.x), [channels], 0)
    return g.op(INSTANCE, norm.x, scale, shift, at=node, epsilon=norm.epsilon)


def full(g: Graph, dtype: int, sizes: Sequence[int], value: float) -> str:
    """Add a constant filled with `value`."""
    array: Array = np.full(tuple(sizes), value, dtype=helper.tensor_dtype_to_np_dtype(dtype))
    return g.constant(array, "scale" if value else "shift")


def inverse(perm: Sequence[int]) -> list[int]:
    return sorted(range(len(perm)), key=perm.__getitem__)
