"""Space-to-depth in front of a Conv: the two are one Conv with larger windows and strides.

The images of every b-th row and column, stacked as channels, go through a Conv with k taps and
stride s along each axis. Tap (j, offset i) of that reads x[b (s o + j - p) + i], so it is tap
b j + i of a Conv on x itself, with b k taps, stride b s and padding b p:

    conv(concat(x[i0::b, i1::b] for all i), W) = conv(x, W')    W'[o, c, b j + i] = W[o, (i, c), j]

Spelled with strided Slices and a Concat (the "focus" of YOLO detectors, in any order of the
offsets), with SpaceToDepth, or as Reshape, Transpose, Reshape (PyTorch's pixel_unshuffle). The
number of weights stays, nothing is computed that was not before, and the copies are gone.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
from onnx import NodeProto

from passes.analysis.axes import TO_THE_END, positive_axes
from passes.analysis.operands import int_operand, permutation
from passes.fuse.linear.affine import may_copy
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import FLOATS
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import Miss, rewrite

_MOST_PIECES = 64

w = const("w", dtype=tuple(FLOATS))


class _Blocks(NamedTuple):
    """What the channels of a stack are: `size` steps along each axis, `order[i]` for the i-th
    channel the channel of the image and its offset along each axis."""

    image: str
    size: int
    order: list[tuple[int, ...]]


@rewrite(op.Conv(op.Concat(op.Slice(var(), ...), ...).named("stack"), w, ...), opset=10)
def slices_into_conv(g: Graph, stack: NodeProto, node: NodeProto) -> str:
    """Every second row and column by Slices, stacked, then a Conv: one Conv of stride 2"""
    return _one_conv(g, node, _from_slices(g, stack))


@rewrite(op.Conv(op.SpaceToDepth(var("x")).named("stack"), w, ...))
def space_to_depth_into_conv(g: Graph, x: str, stack: NodeProto, node: NodeProto) -> str:
    """SpaceToDepth, then a Conv: one Conv of stride `blocksize`"""
    size: int = nd.attr(stack, "blocksize", 0)
    channels = _channels(g, x, 4)
    order = [(c, *i) for i in product(range(size), repeat=2) for c in range(channels)]
    return _one_conv(g, node, _Blocks(x, size, order))


@rewrite(
    op.Conv(
        op.Reshape(op.Transpose(op.Reshape(var("x"), ...).named("cut")).named("turn"), ...).named(
            "stack"
        ),
        w,
        ...,
    )
)
def pixel_unshuffle_into_conv(
    g: Graph, x: str, cut: NodeProto, turn: NodeProto, stack: NodeProto, node: NodeProto
) -> str:
    """[N, C, H, W] as [N, C, H/b, b, W/b, b], turned, as [N, C b b, H/b, W/b], then a Conv"""
    return _one_conv(g, node, _from_reshapes(g, x, cut, turn, stack))


# -- which channel is what


def _from_slices(g: Graph, stack: NodeProto) -> _Blocks:
    if len(stack.input) > _MOST_PIECES:
        raise Miss("too many pieces for a space-to-depth")
    image, sizes, offsets = "", set[int](), list[tuple[int, ...]]()
    for name in stack.input:
        piece = g.producer(name)
        if piece is None or not nd.is_op(piece, "Slice"):
            raise Miss("not all pieces are Slices")
        if image and piece.input[0] != image:
            raise Miss("the pieces are not of one image")
        image = piece.input[0]
        rank = g.rank(image)
        if rank is None or rank < 3:
            raise Miss("the rank of the image is not known")
        if nd.attr(stack, "axis", 1) not in (1, 1 - rank):
            raise Miss("the pieces are not stacked as channels")
        size, offset = _strided(g, piece, rank)
        sizes.add(size)
        offsets.append(offset)
    if len(sizes) != 1:
        raise Miss("the pieces are not of one stride")
    size = sizes.pop()
    everything = set(product(range(size), repeat=len(offsets[0])))
    if len(offsets) != len(everything) or set(offsets) != everything:
        raise Miss("the pieces do not make up the image")
    channels = _channels(g, image, len(offsets[0]) + 2)
    return _Blocks(image, size, [(c, *offset) for offset in offsets for c in range(channels)])


def _strided(g: Graph, piece: NodeProto, rank: int) -> tuple[int, tuple[int, ...]]:
    """Step and starts of a Slice to the end along all spatial axes."""
    starts, ends = int_operand(g, piece, "starts", 1), int_operand(g, piece, "ends", 2)
    steps = int_operand(g, piece, "steps", 4)
    if starts is None or ends is None or steps is None:
        raise Miss("a piece is not cut by constants")
    axes = positive_axes(int_operand(g, piece, "axes", 3, absent=range(len(starts))), rank)
    if axes is None or sorted(axes) != list(range(2, rank)) or len(set(steps)) != 1:
        raise Miss("a piece is not cut alike along all spatial axes")
    shape = g.shape(piece.input[0]) or ()
    for axis, end in zip(axes, ends, strict=True):
        size = shape[axis]
        if not (end >= TO_THE_END or (isinstance(size, int) and end >= size)):
            raise Miss("a piece does not go to the end")
    step = steps[0]
    if step < 2 or not all(0 <= start < step for start in starts):
        raise Miss("a piece does not start in the first block")
    by_axis = dict(zip(axes, starts, strict=True))
    return step, tuple(by_axis[axis] for axis in range(2, rank))


def _from_reshapes(g: Graph, x: str, cut: NodeProto, turn: NodeProto, stack: NodeProto) -> _Blocks:
    whole, parts, result = g.shape(x), g.shape(cut.output[0]), g.shape(stack.output[0])
    perm = permutation(g, turn)
    if whole is None or parts is None or result is None or perm is None:
        raise Miss("a shape is not known")
    count = len(whole) - 2
    if count < 1 or len(parts) != 2 + 2 * count or len(result) != len(whole):
        raise Miss("it does not cut every spatial axis in two")
    channels, size = _channels(g, x, len(whole)), parts[3]
    if parts[:2] != whole[:2] or not isinstance(size, int) or size < 2:
        raise Miss("it does not cut blocks")
    if any(parts[3 + 2 * i] != size for i in range(count)):
        raise Miss("its blocks are not of one size")
    if any(parts[2 + 2 * i] != result[2 + i] for i in range(count)):
        raise Miss("its blocks are not of known size")
    if any(parts[2 + 2 * i] * size != whole[2 + i] for i in range(count)):
        raise Miss("it cuts something else than blocks")
    places = {1: 0, **{3 + 2 * i: i + 1 for i in range(count)}}
    if perm[0] != 0 or perm[-count:] != tuple(range(2, 2 + 2 * count, 2)):
        raise Miss("the rows and columns of blocks do not come last, in order")
    middle = perm[1:-count]
    if result[1] != channels * size**count or set(middle) != set(places):
        raise Miss("its channels are not those of the blocks")
    order: list[tuple[int, ...]] = []
    for found in product(*(range(channels if axis == 1 else size) for axis in middle)):
        entry = [0] * (count + 1)
        for axis, index in zip(middle, found, strict=True):
            entry[places[axis]] = index
        order.append(tuple(entry))
    return _Blocks(x, size, order)


def _channels(g: Graph, image: str, rank: int) -> int:
    shape = g.shape(image)
    if shape is None or len(shape) != rank or not isinstance(shape[1], int) or not shape[1]:
        raise Miss("the number of channels is not known")
    return shape[1]


# -- writing


def _one_conv(g: Graph, node: NodeProto, blocks: _Blocks) -> str:
    weight = g.const(node.input[1])
    size = blocks.size
    if weight is None or weight.ndim < 3 or nd.attr(node, "group", 1) != 1:
        raise Miss("it is a Conv in groups")
    if size < 2 or weight.shape[1] != len(blocks.order):
        raise Miss("it is not a Conv of that stack")
    if not may_copy(g, node.input[1]):
        raise Miss("its weights have other readers, and are too large to be copied")
    count = weight.ndim - 2
    dilations = nd.attr(node, "dilations", [1] * count)
    if any(d != 1 and k != 1 for d, k in zip(dilations, weight.shape[2:], strict=True)):
        raise Miss("it leaves out taps")
    auto = nd.attr(node, "auto_pad", "NOTSET")
    if auto not in ("NOTSET", "VALID"):
        raise Miss(f"its padding follows from the size of its input ({auto})")
    pads = nd.attr(node, "pads", [0] * 2 * count) if auto == "NOTSET" else [0] * 2 * count
    strides = nd.attr(node, "strides", [1] * count)
    spread = _spread(weight, blocks)
    stack = g.producer(node.input[0])
    inputs = [blocks.image, g.constant(spread, node.input[1]), *node.input[2:]]
    g.set_inputs(node, inputs)
    for name in ("auto_pad", "dilations"):
        if nd.attr(node, name) is not None:
            g.del_attr(node, name)
    g.set_attr(node, "kernel_shape", list(spread.shape[2:]))
    g.set_attr(node, "strides", [size * stride for stride in strides])
    g.set_attr(node, "pads", [size * pad for pad in pads])
    if stack is not None:
        g.prune(stack)
    return node.output[0]


def _spread(weight: Array, blocks: _Blocks) -> Array:
    """W'[o, c, b j + i] = W[o, (i, c), j]"""
    size, count = blocks.size, weight.ndim - 2
    channels = len(blocks.order) // size**count
    taps = [size * k for k in weight.shape[2:]]
    spread = np.zeros((weight.shape[0], channels, *taps), dtype=weight.dtype)
    for place, (channel, *offset) in enumerate(blocks.order):
        picked = tuple(slice(start, None, size) for start in offset)
        spread[(slice(None), channel, *picked)] = weight[:, place]
    return spread


RULES = (slices_into_conv, space_to_depth_into_conv, pixel_unshuffle_into_conv)
