"""View the weights of linear layers and convolutions by inputs and outputs, and scale them.

    layer           weights as stored          viewed as
    MatMul          [..., K, N]                the same (Gemm and FusedMatMul may have [N, K])
    Conv            [O, I / groups, *taps]     [groups, O / groups, I / groups, *taps]
    ConvTranspose   [I, O / groups, *taps]     [groups, I / groups, O / groups, *taps]

Weights are read in blocks, and large results are mapped to files: memory does not grow with their
size.
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
from toolkit.ir import FLOATS, Array, Graph, node as nd
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.storage.spill import allocate

_CONVOLUTIONS = ("Conv", "com.microsoft::FusedConv", "ConvTranspose")
_MATRICES = ("MatMul", "Gemm", FUSED_MATMUL)


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """The weights of a layer; all axes but `axis` are those of the viewed `shape`."""

    node: NodeProto
    shape: tuple[int, ...]
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    axis: int
    """The axis of the outputs in the stored weights, along which quantizers have scales."""
    groups: int = 1
    """The outputs that share an index of `axis`, in a grouped ConvTranspose."""

    @property
    def is_matrix(self) -> bool:
        return nd.qualified(self.node) in _MATRICES

    @property
    def rank(self) -> int:
        """The rank of the stored weights."""
        return len(self.shape) - (not self.is_matrix)

    @property
    def reads_channels(self) -> bool:
        """Whether its inputs are the last axis of a matrix, or axis 1 of an image."""
        return not any(nd.attr(self.node, name, 0) for name in TURNED_INPUT)

    @property
    def name(self) -> str:
        return self.node.input[1]

    @property
    def inputs(self) -> int:
        return int(np.prod([self.shape[axis] for axis in self.in_axes]))

    @property
    def outputs(self) -> int:
        return int(np.prod([self.shape[axis] for axis in self.out_axes]))

    @property
    def depth(self) -> int:
        """The number of products that an output sums."""
        return int(np.prod(self.shape)) // self.outputs

    def spread(self, numbers: Array, axes: tuple[int, ...]) -> Array:
        """Reshape numbers per input or output to broadcast against the viewed weights."""
        return numbers.reshape([n if a in axes else 1 for a, n in enumerate(self.shape)])

    def floats(self, g: Graph) -> Array:
        """Return a view of the weights."""
        found = g.const(self.name)
        assert found is not None, self.name
        return found.reshape(self.shape)

    def largest(self, g: Graph, axes: tuple[int, ...], factor: Array | None = None) -> Array:
        """Return max |w f| per input or output; raise MatchFailure for infinity and NaN."""

        def sizes(block: Array, rows: slice) -> Array:
            size = np.abs(block.astype(np.float32, copy=False))
            return size if factor is None else size * rows_of(factor, rows)

        found = self.gather(g, axes, sizes, np.maximum)
        if not np.isfinite(found).all():
            raise MatchFailure("weights that are not finite")
        return found

    def gather(
        self,
        g: Graph,
        axes: tuple[int, ...],
        numbers: Callable[[Array, slice], Array],
        how: np.ufunc,
    ) -> Array:
        """Reduce numbers to one per input or output by `how`, in float64, starting from 0.

        `numbers` computes them from a block of rows of the viewed weights.
        """
        others = tuple(a for a in range(len(self.shape)) if a not in axes)
        found = np.zeros([n if a in axes else 1 for a, n in enumerate(self.shape)])
        for rows, block in blocks(self.floats(g)):
            made = how.reduce(numbers(block, rows), axis=others, dtype=np.float64, keepdims=True)
            at = rows if 0 in axes else slice(None)
            found[at] = how(found[at], made)
        return found.reshape(-1)


def rows_of(array: Array, rows: slice) -> Array:
    """Return some rows of an array that broadcasts against the viewed weights."""
    return array[rows] if array.shape[0] > 1 else array


def kernel_of(g: Graph, node: NodeProto) -> Kernel | None:
    """Return the weights of a layer; None unless they are constant floats."""
    if nd.qualified(node) not in (*_CONVOLUTIONS, *_MATRICES):
        return None
    tensor = g.tensor(given(node, 1))
    if tensor is None or tensor.data_type not in FLOATS or 0 in tensor.dims:
        return None
    found = kernel_with(node, tuple(tensor.dims))
    return None if found is None or (found.is_matrix and g.is_const(node.input[0])) else found


def kernel_with(node: NodeProto, shape: tuple[int, ...]) -> Kernel | None:
    """Return the weights of a matrix product or convolution, stored in this shape."""
    rank, groups = len(shape), nd.attr(node, "group", 1)
    if nd.qualified(node) in _MATRICES:
        rows, columns = rank - 2, rank - 1
        if nd.attr(node, "transB", 0):
            rows, columns = columns, rows
        return Kernel(node, shape, (rows,), (columns,), columns) if rank > 1 else None
    if rank < 3 or groups < 1 or shape[0] % groups:
        return None
    seen = (groups, shape[0] // groups, *shape[1:])
    if nd.is_op(node, "ConvTranspose"):
        return Kernel(node, seen, (0, 1), (0, 2), 1, groups)
    return Kernel(node, seen, (0, 2), (0, 1), 0)


def put_scaled(g: Graph, node: NodeProto, slot: int, seen: tuple[int, ...], factor: Array) -> None:
    """Multiply a constant, viewed in the shape `seen`, by a factor.

    Raise MatchFailure if it is large and has other users, or if its type cannot hold the result.
    """
    name = node.input[slot]
    known = g.const(name)
    assert known is not None, name
    if not may_copy(g, name):
        raise MatchFailure(f"'{name}' is large and has other users")
    shape = known.shape
    if seen != shape and known.size != int(np.prod(seen)):
        known, shape = np.broadcast_to(known, seen), seen  # the constant grows
    result = allocate(shape, known.dtype)
    viewed, source = result.reshape(seen), known.reshape(seen)
    for rows, block in blocks(source):
        part = rows_of(factor, rows) if factor.ndim == len(seen) else factor
        with np.errstate(over="ignore"):
            viewed[rows] = block.astype(np.float64) * part
        written = viewed[rows]
        if not np.isfinite(written.astype(np.float32)).all() or _has_vanished(block, written):
            raise MatchFailure(f"{known.dtype} cannot hold the scaled '{name}'")
    result.flags.writeable = False
    g.set_input(node, slot, g.constant(result, name))
    drop_unused(g, name)


def _has_vanished(before: Array, after: Array) -> bool:
    """Whether elements above a millionth of the largest became zero."""
    lost = (before != 0) & (after == 0)
    if not lost.any():
        return False
    largest = np.abs(before.astype(np.float32)).max()
    return bool((np.abs(before[lost].astype(np.float32)) > 1e-6 * largest).any())
