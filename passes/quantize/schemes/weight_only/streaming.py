"""Quantize a weight by blocks, a piece at a time, without loading all of it.

A layer computes y = x W, and blocks run along its inputs. A weight is stored with inputs first, or
`turned`, with outputs first. The last block of an output is padded with zeros, which are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from passes.quantize.layers.int8_weights import Unfit, require_finite, require_kept
from passes.quantize.schemes.weight_only.blocks import Fit, Grid, fit_nearest
from passes.quantize.schemes.weight_only.gptq import Solver
from passes.quantize.schemes.weight_only.packing import NBitsCodes, SignedCodes
from toolkit.ir.graph import Array
from toolkit.storage.spill import allocate

_PIECE_BYTES = 1 << 20
"""The size of a piece in float32."""
_WHOLE_BYTES = 1 << 24
"""The size of a piece with all inputs of its outputs."""
_MOST_VANISHED = {4: 0.75, 8: 0.5}
"""A weight stays float if a larger share of its nonzero elements vanishes, by bits."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockCodes:
    """The codes of a weight as the sink lays them out, with scales and zeros [outputs, blocks]."""

    codes: Array
    fit: Fit


@dataclass(frozen=True, slots=True)
class Rounding:
    """Round to nearest with the scales and zero points that `fit` finds for float32 blocks."""

    fit: Callable[[Array, Grid], Fit] = fit_nearest

    def __call__(self, piece: Array, grid: Grid, inputs: int) -> tuple[Array, Fit]:
        """Return the codes of a piece [outputs, blocks, block], and the fit [outputs, blocks]."""
        rows, across = piece.reshape(-1, piece.shape[-1]), piece.shape[:2]
        fit = self.fit(rows, grid)
        codes = fit.codes(rows, grid).astype(np.uint8)
        return codes.reshape(piece.shape), Fit(fit.scale.reshape(across), fit.zero.reshape(across))


CodeMethod: TypeAlias = Rounding | Solver
CodeSink: TypeAlias = NBitsCodes | SignedCodes


def quantize_blocks(
    weights: Array, turned: bool, block: int, grid: Grid, method: CodeMethod, sink: CodeSink
) -> Fit:
    """Write the codes of a float32 matrix to `sink`; return its fit. Raises Unfit."""
    by_output = weights if turned else np.transpose(weights)
    outputs, inputs = by_output.shape
    blocks = -(-inputs // block)
    scale = allocate((outputs, blocks), np.float32)
    zero = allocate((outputs, blocks), np.uint8)
    present = left = 0
    for rows, columns, piece in _pieces(by_output, block, turned, isinstance(method, Solver)):
        require_finite(piece)
        with np.errstate(over="ignore", invalid="ignore"):
            codes, fit = method(piece, grid, inputs)
        if not np.isfinite(fit.scale).all():
            raise Unfit("weights beyond the range of a scale")
        sink.put(rows, columns, codes)
        scale[rows, columns], zero[rows, columns] = fit.scale, fit.zero
        present += int(np.count_nonzero(piece))
        left += int(np.count_nonzero(codes != zero[rows, columns, None]))
    require_kept(present, left, _MOST_VANISHED[grid.format.bits])
    return Fit(scale, zero)


def _pieces(
    weights: Array, block: int, by_rows: bool, whole: bool
) -> Iterator[tuple[slice, slice, Array]]:
    """Yield outputs, blocks, and their weights [outputs, blocks, block], padded with zeros.

    `by_rows`: the weights [outputs, inputs] are stored in this order. With `whole`, a piece has all
    inputs of its outputs.
    """
    outputs, inputs = weights.shape
    blocks = -(-inputs // block)
    if not outputs or not inputs:
        return
    if by_rows or whole:
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
            found = weights[rows, span]
            shape = rows.stop - rows.start, (columns.stop - columns.start) * block
            piece = np.zeros(shape, np.float32)
            piece[:, : found.shape[1]] = found
            yield rows, columns, piece.reshape(shape[0], -1, block)
