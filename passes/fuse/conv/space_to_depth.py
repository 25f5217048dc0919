"""Merge a space-to-depth and the Conv after it into one Conv with larger windows and strides.

Every b-th row and column of an image, stacked as channels, goes through a Conv with k taps and
stride s along each axis. Its tap (j, offset i) covers x[b (s o + j - p) + i], so it is tap b j + i
of a Conv on x itself, with b k taps, stride b s and padding b p:

    conv(concat(x[i0::b, i1::b] for all i), W) = conv(x, W')    W'[o, c, b j + i] = W[o, (i, c), j]

Written as strided Slices and a Concat (the "focus" of YOLO detectors, in any order of the
offsets), with SpaceToDepth, or as Reshape, Transpose, Reshape (PyTorch's pixel_unshuffle). The
number of weights and operations stays the same, without the copies.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import slice_ranges
from passes.analysis.view_algebra import Trace, int_product, leaves
from passes.fuse.conv.padding import explicit_pads
from passes.fuse.linear.affine import may_copy
from passes.simplify.canonicalize.slice_concat_pad import is_to_end
from toolkit.ir import FLOATS, Array, Graph, node as nd
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

_MAX_PIECES = 64

w = const("w", dtype=tuple(FLOATS))


class _Blocks(NamedTuple):
    """A space-to-depth with blocks of `size`: `order[i]` holds, for its i-th channel, the channel
    of the image and the offset along each spatial axis."""

    image: str
    size: int
    order: list[tuple[int, ...]]


@rewrite(op.Conv(op.Concat(op.Slice(var(), ...), ...).named("stack"), w, ...), opset=10)
def slices_into_conv(g: Graph, stack: NodeProto, node: NodeProto) -> str:
    """Slices of every second row and column, stacked, then a Conv: one Conv of stride 2"""
    return _one_conv(g, node, _from_slices(g, stack))


@rewrite(op.Conv(op.SpaceToDepth(var("x")).named("stack"), w, ...))
def space_to_depth_into_conv(g: Graph, x: str, stack: NodeProto, node: NodeProto) -> str:
    """SpaceToDepth, then a Conv: one Conv of stride `blocksize`"""
    size: int = nd.attr(stack, "blocksize", 0)
    channels = _channels(g, x, 4)
    order = [(c, *i) for i in product(range(size), repeat=2) for c in range(channels)]
    return _one_conv(g, node, _Blocks(x, size, order))


@rewrite(op.Conv(op.Reshape(op.Transpose(var()), ...).named("stack"), w, ...))
def pixel_unshuffle_into_conv(g: Graph, stack: NodeProto, node: NodeProto) -> str:
    """[N, C, H, W] as [N, C, H/b, b, W/b, b], transposed, as [N, C b b, H/b, W/b], then a Conv"""
    return _one_conv(g, node, _from_views(g, stack))


# -- the source of each channel


def _from_slices(g: Graph, stack: NodeProto) -> _Blocks:
    if len(stack.input) > _MAX_PIECES:
        raise MatchFailure("too many pieces for a space-to-depth")
    image, sizes, offsets = "", set[int](), list[tuple[int, ...]]()
    for name in stack.input:
        piece = g.producer(name)
        is_slice = piece is not None and nd.is_op(piece, "Slice")
        if piece is None or not is_slice or piece.input[0] != (image or piece.input[0]):
            raise MatchFailure("the pieces are not Slices of one image")
        image = piece.input[0]
        rank = g.rank(image)
        if rank is None or rank < 3:
            raise MatchFailure("the rank of the image is not known")
        if nd.attr(stack, "axis", 1) not in (1, 1 - rank):
            raise MatchFailure("the pieces are not stacked as channels")
        size, offset = _strided(g, piece, rank)
        sizes.add(size)
        offsets.append(offset)
    if len(sizes) != 1:
        raise MatchFailure("the pieces have different strides")
    size = sizes.pop()
    everything = set(product(range(size), repeat=len(offsets[0])))
    if len(offsets) != len(everything) or set(offsets) != everything:
        raise MatchFailure("the pieces do not cover the image")
    channels = _channels(g, image, len(offsets[0]) + 2)
    return _Blocks(image, size, [(c, *offset) for offset in offsets for c in range(channels)])


def _strided(g: Graph, piece: NodeProto, rank: int) -> tuple[int, tuple[int, ...]]:
    """Return step and starts of a Slice that runs to the end of all spatial axes."""
    bounds, shape = slice_ranges(g, piece), g.shape(piece.input[0])
    if bounds is None or shape is None or sorted(bounds) != list(range(2, rank)):
        raise MatchFailure("a piece is not sliced along all spatial axes")
    step = bounds[2][2]
    if not isinstance(step, int) or step < 2 or any(by != step for _, _, by in bounds.values()):
        raise MatchFailure("a piece is not sliced with one step along all spatial axes")
    starts: list[int] = []
    for axis in range(2, rank):
        start, end, _ = bounds[axis]
        if not is_to_end(end, shape[axis]):
            raise MatchFailure("a piece does not extend to the end of the axis")
        if not isinstance(start, int) or not 0 <= start < step:
            raise MatchFailure("a piece does not start in the first block")
        starts.append(start)
    return step, tuple(starts)


def _from_views(g: Graph, stack: NodeProto) -> _Blocks:
    """Return the blocks of a chain of views; its channels are factors of the image's axes."""
    trace = Trace(g, stack.output[0])
    stacked = [leaves(axis) for axis in trace.axes]
    for source in trace.sources:
        own = [leaves(axis) for axis in source.axes]
        if len(own) != len(stacked) or source.scale != 1.0 or own[0] != stacked[0]:
            continue
        blocks = [axis[-1] for axis in own[2:] if axis]
        split = [[*outer, block] for outer, block in zip(stacked[2:], blocks, strict=False)]
        size = blocks[0].size if blocks else 0
        if not isinstance(size, int) or any(block.size != size for block in blocks):
            continue
        if own[2:] != split or set(stacked[1]) != {*own[1], *blocks}:
            continue
        channels, order = _channels(g, source.value, len(own)), list[tuple[int, ...]]()
        for indices in product(*(range(int_product([factor]) or 0) for factor in stacked[1])):
            at = dict(zip(stacked[1], indices, strict=True))
            channel = 0
            for factor in own[1]:
                channel = channel * (int_product([factor]) or 0) + at[factor]
            order.append((channel, *(at[block] for block in blocks)))
        if len(order) == channels * size ** len(blocks):
            return _Blocks(source.value, size, order)
    raise MatchFailure("it does not stack the elements of square blocks as channels")


def _channels(g: Graph, image: str, rank: int) -> int:
    shape = g.shape(image)
    if shape is None or len(shape) != rank or not isinstance(shape[1], int) or not shape[1]:
        raise MatchFailure("the number of channels is not known")
    return shape[1]


# -- writing


def _one_conv(g: Graph, node: NodeProto, blocks: _Blocks) -> str:
    weight = g.const(node.input[1])
    size = blocks.size
    if weight is None or weight.ndim < 3 or nd.attr(node, "group", 1) != 1:
        raise MatchFailure("it is a grouped Conv")
    if size < 2 or weight.shape[1] != len(blocks.order):
        raise MatchFailure("it does not convolve the stacked channels")
    if not may_copy(g, node.input[1]):
        raise MatchFailure("its weights have other users, and are too large to be copied")
    count = weight.ndim - 2
    dilations = nd.attr(node, "dilations", [1] * count)
    if any(d != 1 and k != 1 for d, k in zip(dilations, weight.shape[2:], strict=True)):
        raise MatchFailure("its kernel is dilated")
    pads = explicit_pads(node)
    strides = nd.attr(node, "strides", [1] * count)
    spread = _spread(weight, blocks)
    stack = g.producer(node.input[0])
    inputs = [blocks.image, g.constant(spread, node.input[1]), *node.input[2:]]
    g.set_inputs(node, inputs)
    for name in ("auto_pad", "dilations"):
        g.del_attr(node, name)
    g.set_attr(node, "kernel_shape", list(spread.shape[2:]))
    g.set_attr(node, "strides", [size * stride for stride in strides])
    g.set_attr(node, "pads", [size * pad for pad in pads] or None)
    if stack is not None:
        g.prune(stack)
    return node.output[0]


def _spread(weight: Array, blocks: _Blocks) -> Array:
    """W'[o, c, b j + i] = W[o, (i, c), j]"""
    size, count = blocks.size, weight.ndim - 2
    channels = len(blocks.order) // size**count
    taps = [size * k for k in weight.shape[2:]]
    spread = np.zeros((weight.shape[0], channels, *taps), dtype=weight.dtype)
    for index, (channel, *offset) in enumerate(blocks.order):
        picked = tuple(slice(start, None, size) for start in offset)
        spread[(slice(None), channel, *picked)] = weight[:, index]
    return spread


RULES = (slices_into_conv, space_to_depth_into_conv, pixel_unshuffle_into_conv)
