"""Fold a Pad into the convolution or pooling that uses it, and slices of a Conv into its padding.

    Conv(Pad(x, p))         = Conv(x, pads + p)                        zeros, spatial axes, p >= 0
    AveragePool(Pad(x, p))  = AveragePool(x, p), the padding counted   zeros
    MaxPool(Pad(x, p))      = MaxPool(x, pads + p)                     -inf, or zeros around x >= 0
    Conv(x)[k:-m]           = Conv(x, pads - (k, m) strides)           if it pads that much

A MaxPool pads with -inf itself: zeros are equivalent only where every window holds an element of x
and no element of x is negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import (
    extra_outputs_used,
    given,
    int_operand,
    scalar_value,
    slice_ranges,
)
from passes.simplify.canonicalize.elementwise import limits
from passes.simplify.canonicalize.slice_concat_pad import is_to_end
from toolkit.ir import Graph, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.rule import MatchFailure, rewrite
from toolkit.symbolic import Dim, is_nonneg

_POSITIVE = ("Relu", "Sigmoid", "HardSigmoid", "Softmax", "Softplus", "Abs", "Exp", "Sqrt")
"""Operators with non-negative results."""

_KEEPS_SIGN = ("MaxPool", "AveragePool", "Concat", "Add", "Mul")
"""Operators with non-negative results for non-negative operands."""

_DEPTH = 4

pad = op.Pad(var("x"), ...).named("pad")


@rewrite(op.Conv(pad, ...), opset=2)
def pad_into_conv(g: Graph, x: str, pad: NodeProto, node: NodeProto) -> str:
    """Conv(Pad(x, p), W) = Conv(x, W, pads + p)"""
    if _pad_value(g, pad) != 0:
        raise MatchFailure("the Pad does not pad with zeros")
    _move(g, x, pad, node)
    return node.output[0]


@rewrite(op.AveragePool(pad), opset=7)
def pad_into_average_pool(g: Graph, x: str, pad: NodeProto, node: NodeProto) -> str:
    """AveragePool(Pad(x, p)) = AveragePool(x, p) counting the padding"""
    if _pad_value(g, pad) != 0:
        raise MatchFailure("the Pad does not pad with zeros")
    if any(explicit_pads(node)) and not nd.attr(node, "count_include_pad", 0):
        raise MatchFailure("its own padding is excluded from the average, that of the Pad is not")
    _require_small(node, _move(g, x, pad, node))
    g.set_attr(node, "count_include_pad", 1)
    return node.output[0]


@rewrite(op.MaxPool(pad), opset=2)
def pad_into_max_pool(g: Graph, x: str, pad: NodeProto, node: NodeProto) -> str:
    """MaxPool(Pad(x, p)) = MaxPool(x, pads + p) for padding with -inf, or with 0 around x >= 0"""
    if extra_outputs_used(g, node):
        raise MatchFailure("its Indices output is used, and padding would shift the indices")
    if any(step != 1 for step in nd.attr(node, "dilations", ())):
        raise MatchFailure("its windows are dilated, so one may cover padding alone")
    fill = _pad_value(g, pad)
    if fill != -np.inf and not (fill == 0 and _is_non_negative(g, x, _DEPTH)):
        raise MatchFailure("the padding may be the maximum of a window")
    _require_small(node, _move(g, x, pad, node))
    return node.output[0]


@rewrite(op.Slice(op.Conv(var(), ...).named("conv"), ...), opset=2)
def slice_of_conv(g: Graph, conv: NodeProto, node: NodeProto) -> str:
    """Conv(x)[k:-m] needs less padding: Conv(x, pads - (k, m) strides)"""
    shape, found = g.shape(conv.output[0]), slice_ranges(g, node)
    if shape is None or found is None:
        raise MatchFailure("the bounds of the Slice are not known")
    if min(found) < 2:
        raise MatchFailure("the batch or the channels are sliced")
    sides = len(shape) - 2
    pads = explicit_pads(conv) or [0] * (2 * sides)
    strides = nd.attr(conv, "strides", [1] * sides)
    for axis, (start, end, step) in found.items():
        first, last = _cut_off(shape[axis], start, end, step)
        pads[axis - 2] -= first * strides[axis - 2]
        pads[axis - 2 + sides] -= last * strides[axis - 2]
    if min(pads) < 0:
        raise MatchFailure("the Slice crops more than the Conv pads")
    return g.add("Conv", conv.input, 1, {**nd.attrs(conv), "pads": pads}, at=node).output[0]


def _cut_off(size: Dim, start: Dim, end: Dim, step: Dim) -> tuple[int, int]:
    """Return how many elements a Slice cuts off at either end of an axis."""
    if step != 1 or not isinstance(start, int) or not isinstance(end, int) or start < 0:
        raise MatchFailure("the Slice does more than crop a fixed number of elements at the ends")
    if is_to_end(end, size):
        last = 0
    elif end < 0:
        last = -end
    elif isinstance(size, int):
        last = size - end
    else:
        raise MatchFailure("the number of cropped elements depends on the input size")
    if not is_nonneg(size - start - last):
        raise MatchFailure("the Slice may crop more elements than the axis has")
    return start, last


# -- operands and attributes


def _pad_value(g: Graph, pad: NodeProto) -> float | None:
    """Return the value a Pad pads with; None for other modes, or when it is not constant."""
    if nd.attr(pad, "mode", "constant") != "constant":
        return None
    if g.opset() < 11:
        return nd.attr(pad, "value", 0.0)
    if not given(pad, 2):
        return 0.0
    return scalar_value(g, pad.input[2])


def explicit_pads(node: NodeProto) -> list[int]:
    """Return the node's own padding, begins and ends, or an empty list; else raise MatchFailure."""
    auto = nd.attr(node, "auto_pad", "NOTSET")
    if auto not in ("NOTSET", "VALID"):
        raise MatchFailure(f"its padding depends on the input size ({auto})")
    if nd.attr(node, "ceil_mode", 0):
        raise MatchFailure("it rounds its output size up, beyond the padding")
    return list(nd.attr(node, "pads", ())) if auto == "NOTSET" else []


def _spatial_pads(g: Graph, x: str, pad: NodeProto) -> list[int]:
    """Return the padding of the spatial axes, begins and ends; else raise MatchFailure."""
    rank = g.rank(x)
    pads = int_operand(g, pad, "pads", 1)
    if rank is None or rank < 3 or pads is None:
        raise MatchFailure("the amount of padding is not known")
    axes = positive_axes(int_operand(g, pad, "axes", 3, absent=range(rank)), rank)
    if axes is None or len(pads) != 2 * len(axes):
        raise MatchFailure("the padded axes are not known")
    if min(pads, default=0) < 0:
        raise MatchFailure("the padding is negative")
    spread = np.zeros((2, rank), dtype=np.int64)
    for index, axis in enumerate(axes):
        spread[:, axis] = pads[index], pads[index + len(axes)]
    if spread[:, :2].any():
        raise MatchFailure("the batch or the channels are padded")
    return spread[:, 2:].reshape(-1).tolist()


def _is_non_negative(g: Graph, value: str, depth: int) -> bool:
    node = g.producer(value)
    if node is None or not depth:
        constant = g.const(value) if node is None else None
        return constant is not None and constant.dtype.kind == "f" and bool((constant >= 0).all())
    if nd.is_op(node, *_POSITIVE):
        return True
    if nd.is_op(node, "Clip"):
        found = limits(g, node)
        return found is not None and found[0] is not None and found[0] >= 0
    return nd.is_op(node, *_KEEPS_SIGN) and all(
        _is_non_negative(g, name, depth - 1) for name in node.input if name
    )


# -- writing


def _move(g: Graph, x: str, pad: NodeProto, node: NodeProto) -> list[int]:
    """Move the padding of `pad` to `node`, which then uses `x`; return the total padding."""
    added = _spatial_pads(g, x, pad)
    own = explicit_pads(node) or [0] * len(added)
    total = [a + b for a, b in zip(added, own, strict=True)]
    g.set_input(node, 0, x)
    g.del_attr(node, "auto_pad")
    g.set_attr(node, "pads", total)
    return total


def _require_small(node: NodeProto, pads: Sequence[int]) -> None:
    """Require padding smaller than the window: runtimes reject windows of padding alone."""
    kernel = nd.attr(node, "kernel_shape", ())
    if any(size <= pad for size, pad in zip([*kernel, *kernel], pads, strict=True)):
        raise MatchFailure("the padding is as large as the window")


RULES = (pad_into_conv, pad_into_average_pool, pad_into_max_pool, slice_of_conv)
