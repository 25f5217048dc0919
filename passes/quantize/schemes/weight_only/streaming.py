"""Quantize a weight by blocks, a piece at a time, without loading all of it.

A layer computes y = x W, and blocks run along its inputs. A weight is stored with inputs first, or
`turned`, with outputs first. The last block of an output is padded with zeros, which are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from passes.quantize.layers.int8_weights import Unfit
from passes.quantize.schemes.weight_only.blocks import Fit, Grid, fit_nearest
from passes.quantize.schemes.weight_only.gptq import Solver
from passes.quantize.schemes.weight_only.hqq import fit_half_quadratic
from toolkit.ir.graph import Array
from toolkit.storage.spill import allocate

_PIECE_BYTES = 1 << 20
_WHOLE_BYTES = 1 << 24
_VANISHED = {4: 0.75, 8: 0.5}
"""A weight stays float if more than this share of its nonzero elements would become zero."""


class CodeSink(Protocol):
    """A destination for the codes of some outputs and blocks; see `packing`."""

    def put(self, outputs: slice, blocks: slice, codes: Array) -> None: ...

    def done(self) -> Array: ...


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """Float32 scales and uint8 zero points, [outputs, blocks]."""

    scale: Array
    zero: Array


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """The codes of a weight, as stored, and their scales."""

    codes: Array
    scales: Scales


class Method(Protocol):
    """A method to choose codes."""

    @property
    def whole(self) -> bool:
        """Whether it needs all inputs of an output at once."""
        ...

    def __call__(self, piece: Array, grid: Grid, inputs: int) -> tuple[Array, Fit]:
        """Return the codes of a piece [outputs, blocks, block], and their fit [outputs, blocks]."""
        ...


@dataclass(frozen=True, slots=True)
class Nearest:
    """Round to nearest in the range with the least squared error."""

    whole: bool = False

    def __call__(self, piece: Array, grid: Grid, inputs: int) -> tuple[Array, Fit]:
        rows = piece.reshape(-1, piece.shape[-1])
        return _rounded(piece, fit_nearest(rows, grid), grid)


@dataclass(frozen=True, slots=True)
class HalfQuadratic:
    """Round to nearest in the range of half-quadratic quantization (`hqq`)."""

    whole: bool = False

    def __call__(self, piece: Array, grid: Grid, inputs: int) -> tuple[Array, Fit]:
        rows = piece.reshape(-1, piece.shape[-1])
        return _rounded(piece, fit_half_quadratic(rows, grid), grid)


@dataclass(frozen=True, slots=True, eq=False)
class Compensated:
    """Compensate errors by later inputs (`gptq`)."""

    solver: Solver
    whole: bool = True

    def __call__(self, piece: Array, grid: Grid, inputs: int) -> tuple[Array, Fit]:
        outputs, blocks, block = piece.shape
        codes, fit = self.solver.quantize(piece.reshape(outputs, -1)[:, :inputs], grid, block)
        padded = np.empty((outputs, blocks * block), np.uint8)
        padded[:, :inputs] = codes
        padded[:, inputs:] = fit.zero[:, -1:]
        return padded.reshape(piece.shape), fit


def quantize_blocks(
    weights: Array, turned: bool, block: int, grid: Grid, method: Method, sink: CodeSink
) -> Scales:
    """Write the codes of a float32 matrix to `sink`. Raises Unfit."""
    outputs, inputs = weights.shape if turned else weights.shape[::-1]
    blocks = -(-inputs // block)
    scale = allocate((outputs, blocks), np.float32)
    zero = allocate((outputs, blocks), np.uint8)
    present = left = 0
    for rows, columns, piece in _pieces(weights, turned, block, method.whole):
        if not np.isfinite(piece).all():
            nan = np.isnan(piece).any()
            raise Unfit("NaN among its weights" if nan else "infinite weights")
        with np.errstate(over="ignore", invalid="ignore"):
            codes, fit = method(piece, grid, inputs)
        if not np.isfinite(fit.scale).all():
            raise Unfit("weights beyond the range of a scale")
        sink.put(rows, columns, codes)
        scale[rows, columns], zero[rows, columns] = fit.scale, fit.zero
        present += int(np.count_nonzero(piece))
        left += int(np.count_nonzero(codes != zero[rows, columns, None]))
    if present - left > _VANISHED[grid.bits] * present:
        raise Unfit(f"weights of which {1 - left / present:.0%} would be zero beside the largest")
    return Scales(scale, zero)


def _rounded(piece: Array, fit: Fit, grid: Grid) -> tuple[Array, Fit]:
    codes = fit.codes(piece.reshape(-1, piece.shape[-1]), grid).astype(np.uint8)
    across = piece.shape[:2]
    return codes.reshape(piece.shape), Fit(fit.scale.reshape(across), fit.zero.reshape(across))


def _pieces(
    weights: Array, turned: bool, block: int, whole: bool
) -> Iterator[tuple[slice, slice, Array]]:
    """Yield outputs, blocks, and their weights [outputs, blocks, block], padded with zeros."""
    outputs, inputs = weights.shape if turned else weights.shape[::-1]
    blocks = -(-inputs // block)
    if not outputs or not inputs:
        return
    if turned or whole:
        room = (_WHOLE_BYTES if whole else _PIECE_BYTES) // 4
        some, at_once = max(1, room // inputs), blocks
    else:  # along the rows of the file
        room = _PIECE_BYTES // 4 // block
        some, at_once = min(outputs, room), max(1, room // outputs)
    for first in range(0, blocks, at_once):
        columns = slice(first, min(first + at_once, blocks))
        span = slice(columns.start * block, min(columns.stop * block, inputs))
        for start in range(0, outputs, some):
            rows = slice(start, min(start + some, outputs))
            found = weights[rows, span] if turned else np.transpose(weights[span, rows])
            shape = rows.stop - rows.start, (columns.stop - columns.start) * block
            piece = np.zeros(shape, np.float32)
            piece[:, : found.shape[1]] = found
            yield rows, columns, piece.reshape(shape[0], -1, block)
