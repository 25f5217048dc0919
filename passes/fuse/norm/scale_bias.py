"""Scale and bias of a normalization, from what follows it, and its element type.

    norm(x, w) * c = norm(x, w c),   (norm(x, w) + b) * c = norm(x, w c) + b c,   norm(x, w) + b

An operand goes in where it has the shape of the normalized axes (of the channels, for instance and
group norms) or broadcasts to it, also on the other side of a Transpose. A scale of ones and a bias
of zeros are replaced, so that the model's own weights stay what they are; others are combined.

Between Casts from half precision to a wider type and back, the operator works on half precision by
itself: it takes its statistics in float (`stash_type`). Exporters go as far as double.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import given, permutation
from passes.fuse.norm.norm_writer import INSTANCE, LAYER, RMS
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import Shape
from toolkit.pattern import op, var
from toolkit.rewriting.rule import Miss, rewrite
from toolkit.symbolic import Dim

GROUP = "GroupNormalization"

normal = op.any(LAYER, RMS, INSTANCE, GROUP)(var("x"), ...).shared().named("norm")
laid_out = op.Transpose(normal).shared().named("turn") | normal
operand = var("c")


@rewrite(
    op.any("Mul", "Add")(laid_out, operand),
    op.any("Div", "Sub")(laid_out, operand),
    opset=17,
)
def scaled_or_shifted_norm(
    g: Graph, x: str, c: str, norm: NodeProto, turn: NodeProto | None, node: NodeProto
) -> str:
    """norm(x) * c, norm(x) + c, norm(x) / c, norm(x) - c"""
    if any(not g.is_unused(extra) for extra in norm.output[1:] if extra):
        raise Miss(f"the statistics of {nd.label(norm)} are used too")
    if norm.op_type == RMS and node.op_type in ("Add", "Sub"):
        raise Miss("an RMSNormalization has no bias")
    if norm.op_type == GROUP and g.opset() < 21:
        raise Miss("scales of groups are not scales of channels")
    perm = None if turn is None else permutation(g, turn)
    if turn is not None and perm is None:
        raise Miss(f"the order of {nd.label(turn)} is not known")
    last = norm if turn is None else turn
    if not _all_read_alike(g, norm, turn):
        raise Miss(f"'{last.output[0]}' is read by others too")
    fitted = _fitted(g, norm, c, perm)
    scale, shift = norm.input[1], given(norm, 2)
    match node.op_type:
        case "Mul":
            scale, shift = _times(g, scale, fitted), _times(g, shift, fitted)
        case "Div":
            divisor = _inverted(g, fitted)
            scale, shift = _times(g, scale, divisor), _times(g, shift, divisor)
        case "Add":
            shift = _plus(g, shift, fitted, 1)
        case _:
            shift = _plus(g, shift, fitted, -1)
    inputs = nd.without_blanks([x, scale, shift])
    result = g.op(norm.op_type, *inputs, at=node, **nd.attrs(norm))
    known = g.type(norm.output[0])
    if known is not None:
        g.learn_type(result, known)
    return result if perm is None else g.op("Transpose", result, at=node, perm=list(perm))


@rewrite(op.Cast(op.any(LAYER, RMS)(op.Cast(var("x")).shared(), ...).named("norm")), opset=17)
def norm_in_half(g: Graph, x: str, norm: NodeProto, node: NodeProto) -> str:
    """Half precision in and out, statistics in float: what `stash_type` 1, the default, says."""
    half = TensorProto.FLOAT16
    if g.dtype(x) != half or nd.attr(node, "to") != half:
        raise Miss("the Casts are not from half precision and back")
    if nd.attr(norm, "stash_type", 1) != 1:
        raise Miss("the statistics are not taken in float")
    if any(not g.is_unused(extra) for extra in norm.output[1:] if extra):
        raise Miss(f"the statistics of {nd.label(norm)} are used too")
    parameters = [_in_half(g, value) if value else "" for value in norm.input[1:]]
    return g.op(norm.op_type, x, *parameters, at=node, **nd.attrs(norm))


# -- shapes


def _parameter_axes(g: Graph, norm: NodeProto, rank: int) -> list[int]:
    """The axes of the input that scale and bias lie along."""
    if norm.op_type in (INSTANCE, GROUP):
        return [1]
    axis = nd.attr(norm, "axis", -1)
    return list(range(axis % rank, rank))


def _fitted(g: Graph, norm: NodeProto, value: str, perm: Sequence[int] | None) -> str:
    """`value` in the shape of a scale of `norm`: itself, or a constant laid out anew.

    `perm` is the Transpose between the norm and the place where the value is met.
    """
    known, shape = g.type(norm.input[0]), g.shape(value)
    if known is None or known.shape is None or shape is None:
        raise Miss(f"the shape of '{norm.input[0]}' or '{value}' is not known")
    if g.dtype(value) != known.dtype:
        raise Miss(f"'{value}' is not of the type of the norm")
    rank = len(known.shape)
    if len(shape) > rank:
        raise Miss(f"'{value}' has more axes than the norm")
    order = list(range(rank)) if perm is None else list(perm)
    padded: list[Dim] = [1] * (rank - len(shape)) + list(shape)
    here = dict(zip(order, padded, strict=True))
    axes = _parameter_axes(g, norm, rank)
    wanted = [known.shape[axis] for axis in axes]
    if any(here[axis] != 1 for axis in range(rank) if axis not in axes):
        raise Miss(f"'{value}' varies along axes that are not normalized")
    if any(here[axis] not in (1, size) for axis, size in zip(axes, wanted, strict=True)):
        raise Miss(f"'{value}' does not have the sizes of the normalized axes")
    if list(shape) == wanted and perm is None and axes[-1] == rank - 1:
        return value
    array = g.const(value)
    sizes = [size for size in wanted if isinstance(size, int)]
    if array is None or len(sizes) != len(wanted):
        raise Miss(f"'{value}' does not have the shape of a scale, and is not constant")
    back = sorted(range(rank), key=order.__getitem__)
    padding = (1,) * (rank - len(shape))
    laid: Array = np.transpose(np.reshape(array, padding + array.shape), back)
    laid = np.reshape(laid, tuple(laid.shape[axis] for axis in axes))
    return g.constant(np.ascontiguousarray(np.broadcast_to(laid, sizes)), value)


def _all_read_alike(g: Graph, norm: NodeProto, turn: NodeProto | None) -> bool:
    """Whether the norm is read once, or only to be scaled by weights: then by a norm for each."""
    if turn is not None and g.use_count(norm.output[0]) > 1:
        return False
    value = (turn or norm).output[0]
    if g.use_count(value) == 1 and not g.is_captured(value):
        return True
    if turn is not None or g.is_output(value) or g.is_captured(value):
        return False
    shape = g.shape(norm.input[1])
    return all(_is_scaling(g, value, reader, shape) for reader in g.users(value))


def _is_scaling(g: Graph, value: str, reader: NodeProto, shape: Shape | None) -> bool:
    others = [name for name in reader.input if name != value]
    if not nd.is_op(reader, "Mul") or len(others) != 1 or not g.is_const(others[0]):
        return False
    return shape is not None and g.shape(others[0]) == shape


# -- contents


def _times(g: Graph, value: str, factor: str) -> str:
    if not value:
        return ""
    old, new = g.const(value), g.const(factor)
    if old is not None and _is_filled(old, 1) and g.shape(value) == g.shape(factor):
        return factor
    if old is not None and _is_filled(old, 0):
        return value
    if old is None or new is None:
        raise Miss(f"'{value}' and '{factor}' are not both constants")
    return _constant(g, old.astype(np.float64) * new.astype(np.float64), old.dtype, value)


def _plus(g: Graph, value: str, term: str, sign: int) -> str:
    new = g.const(term)
    old = g.const(value) if value else None
    blank = not value or (old is not None and _is_filled(old, 0))
    if blank and sign > 0:
        return term
    if new is None or (value and old is None):
        raise Miss(f"'{value}' and '{term}' are not both constants")
    before = 0.0 if old is None else old.astype(np.float64)
    return _constant(g, before + sign * new.astype(np.float64), new.dtype, term)


def _inverted(g: Graph, value: str) -> str:
    array = g.const(value)
    if array is None or not np.all(array):
        raise Miss(f"'{value}' is not constant, or has zeros")
    return _constant(g, 1 / array.astype(np.float64), array.dtype, value)


def _in_half(g: Graph, value: str) -> str:
    """A constant as half precision, which must hold it as it is."""
    array = g.const(value)
    if array is None:
        raise Miss(f"'{value}' is not constant")
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    if not np.array_equal(half.astype(array.dtype), array):
        raise Miss(f"'{value}' is more precise than half precision")
    return g.constant(half, value)


def _constant(g: Graph, array: Array, dtype: np.dtype[np.generic], hint: str) -> str:
    return g.constant(np.asarray(array).astype(dtype), hint)


def _is_filled(array: Array, value: float) -> bool:
    return bool(np.all(array == value))


RULES = (scaled_or_shifted_norm, norm_in_half)
