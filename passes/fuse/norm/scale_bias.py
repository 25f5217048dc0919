"""Fold the scale and bias that follow a normalization into it, and the Casts around it.

    norm(x, w) * c = norm(x, w c),   (norm(x, w) + b) * c = norm(x, w c) + b c,   norm(x, w) + b

An operand is folded where it has the shape of the normalized axes (of the channels, for instance
and group norms) or broadcasts to it, also across a Transpose. A scale of ones and a bias of zeros
are replaced by the model's own weights; others are combined.

Casts from half precision to float or double and back are dropped: the operator itself takes its
statistics in float (`stash_type`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import extra_outputs_used, given, permutation
from passes.fuse.norm.norm_writer import INSTANCE, LAYER, RMS, inverse
from passes.fuse.typed_op import typed_op
from toolkit.ir import Array, Graph, Shape, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.rule import MatchFailure, rewrite
from toolkit.symbolic import Dim

GROUP = "GroupNormalization"

normal = op.any(LAYER, RMS, INSTANCE, GROUP)(var("x"), ...).shared().named("norm")
laid_out = op.Transpose(normal).shared().named("moved") | normal
operand = var("c")


@rewrite(
    op.any("Mul", "Add")(laid_out, operand),
    op.any("Div", "Sub")(laid_out, operand),
    opset=17,
)
def scaled_or_shifted_norm(
    g: Graph, x: str, c: str, norm: NodeProto, moved: NodeProto | None, node: NodeProto
) -> str:
    """norm(x) * c, norm(x) + c, norm(x) / c, norm(x) - c"""
    if extra_outputs_used(g, norm):
        raise MatchFailure(f"the statistics of {nd.label(norm)} have other users")
    if norm.op_type == RMS and node.op_type in ("Add", "Sub"):
        raise MatchFailure("an RMSNormalization has no bias")
    if norm.op_type == GROUP and g.opset() < 21:
        raise MatchFailure("its scale is per group, not per channel")
    perm = None if moved is None else permutation(g, moved)
    if moved is not None and perm is None:
        raise MatchFailure(f"the order of {nd.label(moved)} is not known")
    last = norm if moved is None else moved
    if not _has_only_scaling_users(g, norm, moved):
        raise MatchFailure(f"'{last.output[0]}' has other users")
    parameter = _as_parameter(g, norm, c, perm)
    if node.op_type in ("Div", "Sub"):
        parameter = _inverted(g, node.op_type, parameter)
    scale, shift = norm.input[1], given(norm, 2)
    if node.op_type in ("Mul", "Div"):
        scale, shift = (value and _combined(g, "Mul", value, parameter) for value in (scale, shift))
    else:
        shift = _combined(g, "Add", shift, parameter) if shift else parameter
    inputs = nd.without_blanks([x, scale, shift])
    known = g.type(norm.output[0])
    result = typed_op(g, known, norm.op_type, *inputs, at=node, **nd.attrs(norm))
    return result if perm is None else g.op("Transpose", result, at=node, perm=list(perm))


@rewrite(op.Cast(op.any(LAYER, RMS)(op.Cast(var("x")).shared(), ...).named("norm")), opset=17)
def norm_in_half(g: Graph, x: str, norm: NodeProto, node: NodeProto) -> str:
    """Cast(norm(Cast(x))) = norm(x) in half precision, with statistics in float (`stash_type` 1)"""
    half = TensorProto.FLOAT16
    if g.dtype(x) != half or nd.attr(node, "to") != half:
        raise MatchFailure("the Casts are not from half precision and back")
    if nd.attr(norm, "stash_type", 1) != 1:
        raise MatchFailure("the statistics are not taken in float")
    if extra_outputs_used(g, norm):
        raise MatchFailure(f"the statistics of {nd.label(norm)} have other users")
    parameters = [_in_half(g, value) if value else "" for value in norm.input[1:]]
    return g.op(norm.op_type, x, *parameters, at=node, **nd.attrs(norm))


# -- shapes


def _parameter_axes(g: Graph, norm: NodeProto, rank: int) -> list[int]:
    """Return the axes of the input that scale and bias lie along."""
    if norm.op_type in (INSTANCE, GROUP):
        return [1]
    axis = nd.attr(norm, "axis", -1)
    return list(range(axis % rank, rank))


def _as_parameter(g: Graph, norm: NodeProto, value: str, perm: Sequence[int] | None) -> str:
    """Return `value` in the shape of a scale of `norm`: itself, or a rearranged constant.

    `perm` is that of the Transpose between the norm and `value`.
    """
    known, shape = g.type(norm.input[0]), g.shape(value)
    if known is None or known.shape is None or shape is None:
        raise MatchFailure(f"the shape of '{norm.input[0]}' or '{value}' is not known")
    if g.dtype(value) != known.dtype:
        raise MatchFailure(f"'{value}' and the norm differ in element type")
    rank = len(known.shape)
    if len(shape) > rank:
        raise MatchFailure(f"'{value}' has a larger rank than the norm")
    order = list(range(rank)) if perm is None else list(perm)
    padded: list[Dim] = [1] * (rank - len(shape)) + list(shape)
    here = dict(zip(order, padded, strict=True))
    axes = _parameter_axes(g, norm, rank)
    wanted = [known.shape[axis] for axis in axes]
    if any(here[axis] != 1 for axis in range(rank) if axis not in axes):
        raise MatchFailure(f"'{value}' varies along axes that are not normalized")
    if any(here[axis] not in (1, size) for axis, size in zip(axes, wanted, strict=True)):
        raise MatchFailure(f"'{value}' does not have the sizes of the normalized axes")
    if list(shape) == wanted and perm is None and axes[-1] == rank - 1:
        return value
    array = g.const(value)
    sizes = [size for size in wanted if isinstance(size, int)]
    if array is None or len(sizes) != len(wanted):
        raise MatchFailure(f"'{value}' does not have the shape of a scale, and is not constant")
    padding = (1,) * (rank - len(shape))
    laid: Array = np.transpose(np.reshape(array, padding + array.shape), inverse(order))
    laid = np.reshape(laid, tuple(laid.shape[axis] for axis in axes))
    return g.constant(np.ascontiguousarray(np.broadcast_to(laid, sizes)), value)


def _has_only_scaling_users(g: Graph, norm: NodeProto, moved: NodeProto | None) -> bool:
    """Return whether the norm has one user, or only users that scale it and get their own norm."""
    if moved is not None and g.use_count(norm.output[0]) > 1:
        return False
    value = (moved or norm).output[0]
    if g.use_count(value) == 1 and not g.is_captured(value):
        return True
    if moved is not None or g.is_output(value) or g.is_captured(value):
        return False
    shape = g.shape(norm.input[1])
    return all(_is_scaling(g, value, user, shape) for user in g.users(value))


def _is_scaling(g: Graph, value: str, user: NodeProto, shape: Shape | None) -> bool:
    others = [name for name in user.input if name != value]
    if not nd.is_op(user, "Mul") or len(others) != 1 or not g.is_const(others[0]):
        return False
    return shape is not None and g.shape(others[0]) == shape


# -- contents


def _combined(g: Graph, op_type: str, old: str, new: str) -> str:
    """Return the product or sum of two parameters of one shape.

    If one of them is neutral, the other is returned and may be variable; else both are constant.
    """
    before, after = g.const(old), g.const(new)
    if before is not None and (before == (op_type == "Mul")).all():
        return new
    if op_type == "Mul" and before is not None and not before.any():
        return old
    if before is None or after is None:
        raise MatchFailure(f"'{old}' and '{new}' are not both constants")
    function = np.multiply if op_type == "Mul" else np.add
    return g.constant(function(before, after, dtype=np.float64).astype(before.dtype), old)


def _inverted(g: Graph, op_type: str, value: str) -> str:
    """Return 1 / c for a division by c, -c for a subtraction."""
    array = g.const(value)
    if array is None or (op_type == "Div" and not np.all(array)):
        raise MatchFailure(f"'{value}' is not constant, or has zeros")
    exact = array.astype(np.float64)
    return g.constant((1 / exact if op_type == "Div" else -exact).astype(array.dtype), value)


def _in_half(g: Graph, value: str) -> str:
    """Return a constant in half precision, which must represent it exactly."""
    array = g.const(value)
    if array is None:
        raise MatchFailure(f"'{value}' is not constant")
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    if not np.array_equal(half.astype(array.dtype), array):
        raise MatchFailure(f"'{value}' is not representable in half precision")
    return g.constant(half, value)


RULES = (scaled_or_shifted_norm, norm_in_half)
