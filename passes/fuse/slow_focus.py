"""The stem of some detectors: every second pixel of an image as a channel of its own, then a Conv.

    conv(concat(x[:, :, i::2, j::2] for all i, j), w) = conv(x, v) with stride 2,
    v[:, :, i::2, j::2] = the part of w for that piece

The same holds for any step, and for SpaceToDepth. The products are the same ones, nothing is
copied beforehand, and the Conv reads the image itself.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.axes import TO_THE_END, positive_axes
from passes.operands import int_operand
from toolkit import nodes as nd
from toolkit.graph import Array, Graph
from toolkit.pattern import const, op, var
from toolkit.rules import Miss, rewrite

Offsets = list[tuple[int, int]]
"""For each piece, in the order of the channels: its first row and column."""


@rewrite(
    op.Conv(op.Concat(var(), ..., axis=1).named("joined"), const("w", rank=4), var("b") | None),
    opset=10,
)
def focus_conv(g: Graph, joined: NodeProto, w: str, b: str | None, node: NodeProto) -> str:
    """A Conv of all pieces of an image, each of every n-th row and column"""
    pieces = [g.producer(value) for value in joined.input]
    sources = {piece.input[0] for piece in pieces if piece is not None}
    if not all(nd.is_op(piece, "Slice") for piece in pieces) or len(sources) != 1:
        raise Miss("the pieces are not slices of one value")
    found = [_offset(g, piece) for piece in pieces if piece is not None]
    steps = {step for _, step in found}
    if len(steps) != 1:
        raise Miss("the pieces have different steps")
    return _strided(g, sources.pop(), [at for at, _ in found], steps.pop(), w, b, node)


@rewrite(
    op.Conv(op.SpaceToDepth(var("x"), blocksize=var("step")), const("w", rank=4), var("b") | None),
    opset=10,
)
def space_to_depth_conv(g: Graph, x: str, step: int, w: str, b: str | None, node: NodeProto) -> str:
    """A Conv of blocks laid out as channels"""
    offsets = [(row, column) for row in range(step) for column in range(step)]
    return _strided(g, x, offsets, step, w, b, node)


def _offset(g: Graph, piece: NodeProto) -> tuple[tuple[int, int], int]:
    """Where a Slice of all rows and columns in steps begins, and its step."""
    shape = g.shape(piece.input[0])
    rank = None if shape is None else len(shape)
    starts, ends = (int_operand(g, piece, name, i) for i, name in ((1, "starts"), (2, "ends")))
    axes = positive_axes(int_operand(g, piece, "axes", 3), rank)
    steps = int_operand(g, piece, "steps", 4)
    if shape is None or rank != 4 or starts is None or ends is None or steps is None:
        raise Miss(f"{nd.label(piece)} is not known well enough")
    if sorted(axes or []) != [2, 3] or axes is None or len(set(steps)) != 1:
        raise Miss(f"{nd.label(piece)} does not take every n-th row and column")
    for axis, end in zip(axes, ends, strict=True):
        size = shape[axis]
        if end < (size if isinstance(size, int) else TO_THE_END):
            raise Miss(f"{nd.label(piece)} ends early")
    row, column = (starts[axes.index(axis)] for axis in (2, 3))
    return (row, column), steps[0]


def _strided(
    g: Graph, x: str, offsets: Offsets, step: int, w: str, b: str | None, node: NodeProto
) -> str:
    every = {(row, column) for row in range(step) for column in range(step)}
    if step < 2 or len(offsets) != len(every) or set(offsets) != every:
        raise Miss("the pieces do not make up the whole")
    attributes = nd.attrs(node)
    weights = g.const(w)
    plain = all(dilation == 1 for dilation in attributes.get("dilations", ()))
    if weights is None or attributes.get("group", 1) != 1 or not plain:
        raise Miss("the Conv is grouped or dilated")
    if attributes.get("auto_pad", "NOTSET") != "NOTSET":
        raise Miss("the Conv chooses its own padding")
    attributes["strides"] = [step * stride for stride in attributes.get("strides", (1, 1))]
    attributes["pads"] = [step * pad for pad in attributes.get("pads", (0, 0, 0, 0))]
    spread = _spread(weights, offsets, step)
    attributes["kernel_shape"] = list(spread.shape[2:])
    inputs = [x, g.constant(spread, w), b or ""]
    return g.op("Conv", *nd.without_blanks(inputs), at=node, **attributes)


def _spread(weights: Array, offsets: Offsets, step: int) -> Array:
    """Weights for the pieces as weights for the image that they are taken from."""
    outputs, inputs, height, width = weights.shape
    channels = inputs // len(offsets)
    if channels * len(offsets) != inputs:
        raise Miss("the pieces do not have the same number of channels")
    spread: Array = np.zeros((outputs, channels, step * height, step * width), weights.dtype)
    for index, (row, column) in enumerate(offsets):
        part = weights[:, index * channels : (index + 1) * channels]
        spread[:, :, row::step, column::step] = part
    return spread


RULES = (focus_conv, space_to_depth_conv)
