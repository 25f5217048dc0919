"""Fuse instance norms and group norms between Reshapes.

    instance norm   reshape to N C -1, normalize, reshape back: the operator takes any rank
    group norm      reshape to N G -1, normalize, reshape back, for G groups of channels

onnxruntime has no CPU kernel for GroupNormalization and takes nearly twice as long for its
decomposition: it is only written for the target `onnx`.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.fuse.norm.norm_writer import INSTANCE, LAYER
from passes.fuse.norm.scale_bias import GROUP
from toolkit.ir import Array, Graph, Shape, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

x = var("x")
scale, shift = var("scale"), var("shift")
flat = op.Reshape(x, ...).named("flat")


@rewrite(op.Reshape(op.InstanceNormalization(flat, scale, shift).named("norm"), ...))
def reshaped_instance_norm(
    g: Graph, x: str, flat: NodeProto, norm: NodeProto, node: NodeProto
) -> str:
    """Reshape(InstanceNormalization(Reshape(x, [N, C, -1]))) = InstanceNormalization(x)"""
    before, within = _shapes(g, x, flat, node)
    if before[:2] != within[:2]:
        raise MatchFailure("the channels are reshaped, too")
    return g.op(INSTANCE, x, *norm.input[1:], at=node, **nd.attrs(norm))


@rewrite(
    op.Reshape(op.any(INSTANCE, LAYER)(flat, scale, shift | None).named("norm"), ...), opset=21
)
def group_norm(g: Graph, x: str, flat: NodeProto, norm: NodeProto, node: NodeProto) -> str:
    """Reshape(norm(Reshape(x, [N, G, -1]))) = GroupNormalization(x)"""
    before, within = _shapes(g, x, flat, node)
    channels, groups = before[1], within[1]
    if not isinstance(channels, int) or not isinstance(groups, int) or before[0] != within[0]:
        raise MatchFailure("the number of channels or groups is not known")
    if not groups or channels % groups:
        raise MatchFailure(f"{channels} channels do not form {groups} groups")
    if norm.op_type == LAYER and nd.attr(norm, "axis", -1) % len(within) != 2:
        raise MatchFailure("the norm is not over whole groups")
    weights = _by_channel(g, norm.input[1], norm, channels)
    biases = given(norm, 2) and _by_channel(g, norm.input[2], norm, channels)
    if not biases:
        zeros: Array = np.zeros_like(g.const(weights))
        biases = g.constant(zeros, "shift")
    epsilon = nd.attr(norm, "epsilon", 1e-5)
    return g.op(GROUP, x, weights, biases, at=node, epsilon=epsilon, num_groups=groups)


def _shapes(g: Graph, x: str, flat: NodeProto, node: NodeProto) -> tuple[Shape, Shape]:
    """Return the shape outside the Reshapes, which must be equal before and after, and inside."""
    before, within, after = g.shape(x), g.shape(flat.output[0]), g.shape(node.output[0])
    if before is None or within is None or before != after:
        raise MatchFailure("the shapes are not known, or not the same before and after")
    if len(before) < 3 or len(within) < 3:
        raise MatchFailure("the input has only batch and channel axes")
    return before, within


def _by_channel(g: Graph, value: str, norm: NodeProto, channels: int) -> str:
    """Return a scale per group, or one for all elements, as a scale per channel."""
    array = g.const(value)
    if array is None or not array.size:
        raise MatchFailure(f"'{value}' is not constant")
    if norm.op_type == INSTANCE:
        return g.constant(np.repeat(array, channels // array.size), value)
    if not np.all(array == array.reshape(-1)[0]):
        raise MatchFailure(f"'{value}' varies within a group")
    return g.constant(np.full(channels, array.reshape(-1)[0], array.dtype), value)


RULES = (reshaped_instance_norm,)

ONNX_RULES = (group_norm,)
"""Slower than their formulas on onnxruntime's CPU kernels: for the target `onnx` only."""
