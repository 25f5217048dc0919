"""Weights of linear layers and convolutions, seen by their inputs and outputs, and scaled.

    layer           weights as stored          seen as
    MatMul          [..., K, N]                the same (Gemm and FusedMatMul may have [N, K])
    Conv            [O, I / groups, *taps]     [groups, O / groups, I / groups, *taps]
    ConvTranspose   [I, O / groups, *taps]     [groups, I / groups, O / groups, *taps]

Weights are read in blocks where they lie, and what is made of a large one goes to a file of its
own, so that memory does not grow with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.fuse.linear.affine import may_copy
from passes.quantize.layers.layers import FUSED_MATMUL, TURNED_INPUT
from passes.quantize.layers.row_blocks import blocks
from passes.quantize.layers.weight_storage import drop_unused
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import FLOATS
from toolkit.rewriting.match_failure import Miss
from toolkit.storage.spill import allocate

_CONVOLUTIONS = ("Conv", "com.microsoft::FusedConv", "ConvTranspose")
_MATRICES = ("MatMul", "Gemm", FUSED_MATMUL)


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """The constant weights of a layer. `shape` is how they are seen; axes are of that."""

    node: NodeProto
    rank: int
    """As stored."""
    shape: tuple[int, ...]
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    is_matrix: bool
    reads_channels: bool = True
    """Whether its inputs lie along the last axis of a matrix, or axis 1 of an image."""

    @property
    def name(self) -> str:
        return self.node.input[1]

    @property
    def inputs(self) -> int:
        return int(np.prod([self.shape[axis] for axis in self.in_axes]))

    @property
    def outputs(self) -> int:
        return int(np.prod([self.shape[axis] for axis in self.out_axes]))

    def spread(self, numbers: Array, axes: tuple[int, ...]) -> Array:
        """Numbers by input or by output, laid along the weights as they are seen."""
        return numbers.reshape([n if a in axes else 1 for a, n in enumerate(self.shape)])

    def floats(self, g: Graph) -> Array:
        """The weights, as they are seen; a view."""
        found = g.const(self.name)
        assert found is not None, self.name
        return found.reshape(self.shape)

    def largest(self, g: Graph, axes: tuple[int, ...], factor: Array | None = None) -> Array:
        """max |w f| by input or by output; a Miss for weights that are not all finite."""

        def sizes(block: Array, rows: slice) -> Array:
            size = np.abs(block.astype(np.float32, copy=False))
            return size if factor is None else size * rows_of(factor, rows)

        found = self.gather(g, axes, sizes, np.maximum)
        if not np.isfinite(found).all():
            raise Miss("weights that are not finite")
        return found

    def gather(
        self,
        g: Graph,
        axes: tuple[int, ...],
        numbers: Callable[[Array, slice], Array],
        how: np.ufunc,
    ) -> Array:
        """What `how` makes, in doubles and from 0 on, of the numbers of each input or output.

        `numbers` makes them of some rows of the weights, as they are seen.
        """
        others = tuple(a for a in range(len(self.shape)) if a not in axes)
        found = np.zeros([n if a in axes else 1 for a, n in enumerate(self.shape)])
        for rows, block in blocks(self.floats(g)):
            made = how.reduce(numbers(block, rows), axis=others, dtype=np.float64, keepdims=True)
            at = rows if 0 in axes else slice(None)
            found[at] = how(found[at], made)
        return found.reshape(-1)


def rows_of(laid: Array, rows: slice) -> Array:
    """Of numbers that are laid along weights, those that belong to some rows of them."""
    return laid[rows] if laid.shape[0] > 1 else laid


def kernel_of(g: Graph, node: NodeProto) -> Kernel | None:
    """The weights of a layer; None where they are not constant floats, or it is no such layer."""
    op = nd.qualified(node)
    if op not in _CONVOLUTIONS and op not in _MATRICES:
        return None
    tensor = g.tensor(given(node, 1))
    if tensor is None or tensor.data_type not in FLOATS or 0 in tensor.dims:
        return None
    shape = tuple(tensor.dims)
    rank = len(shape)
    if op in _MATRICES:
        if rank < 2 or g.is_const(node.input[0]):
            return None
        straight = not any(nd.attr(node, name, 0) for name in TURNED_INPUT)
        rows, columns = (rank - 2,), (rank - 1,)
        if nd.attr(node, "transB", 0):
            rows, columns = columns, rows
        return Kernel(node, rank, shape, rows, columns, True, straight)
    groups = nd.attr(node, "group", 1)
    if rank < 3 or groups < 1 or shape[0] % groups:
        return None
    seen = (groups, shape[0] // groups, *shape[1:])
    inner, outer = ((0, 1), (0, 2)) if op == "ConvTranspose" else ((0, 2), (0, 1))
    return Kernel(node, rank, seen, inner, outer, False)


def put_scaled(g: Graph, node: NodeProto, slot: int, seen: tuple[int, ...], factor: Array) -> None:
    """Multiply a constant, seen in a shape, by a factor; a Miss where that must not or cannot be.

    It must not where others read a large one, and cannot where its format does not hold the result.
    """
    name = node.input[slot]
    known = g.const(name)
    assert known is not None, name
    if not may_copy(g, name):
        raise Miss(f"'{name}' is large and read by others too")
    shape = known.shape
    if seen != shape and known.size != int(np.prod(seen)):
        known, shape = np.broadcast_to(known, seen), seen  # a constant that gets more elements
    result = allocate(shape, known.dtype)
    viewed, source = result.reshape(seen), known.reshape(seen)
    for rows, block in blocks(source):
        part = rows_of(factor, rows) if factor.ndim == len(seen) else factor
        with np.errstate(over="ignore"):
            viewed[rows] = block.astype(np.float64) * part
        written = viewed[rows]
        if not np.isfinite(written.astype(np.float32)).all() or _has_vanished(block, written):
            raise Miss(f"{known.dtype} does not hold the scaled '{name}'")
    result.flags.writeable = False
    g.set_input(node, slot, g.constant(result, name))
    drop_unused(g, name)


def _has_vanished(before: Array, after: Array) -> bool:
    """Whether numbers became zero that are not tiny beside the others."""
    lost = (before != 0) & (after == 0)
    if not lost.any():
        return False
    largest = np.abs(before.astype(np.float32)).max()
    return bool((np.abs(before[lost].astype(np.float32)) > 1e-6 * largest).any())
