"""GPTQ: quantize a weight one input at a time; later inputs compensate the errors of earlier ones.

With H = X^T X over the layer's calibration inputs X, an error e in the weights of input i changes
the outputs least if the weights of all later inputs j change by

    w_j <- w_j - e U_ij / U_ii,     U^T U = (H + d I)^-1, U upper triangular

The damping d is a hundredth of the mean diagonal, more if H is still singular. The scale and zero
point of a block are fitted when its first input is reached. After Frantar et al., "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers" (2022).

`by_importance` orders inputs by descending diagonal of H. Blocks still consist of adjacent inputs:
their scales are fitted in advance.

H is summed over the calibration data. For a wide layer it is larger than the weights, and therefore
mapped to a file and updated by blocks of rows. With the inputs reversed, H + d I = L L^T, and U is
L^-1 reversed. Both are computed in place (see `triangular`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from passes.quantize.layers.row_blocks import blocks
from passes.quantize.schemes.weight_only.blocks import Fit, Grid, fit_nearest
from passes.quantize.schemes.weight_only.triangular import factor, invert
from toolkit.calibrate.statistics import Array, Mismatch, Statistic, finite_bounds
from toolkit.storage.spill import allocate

DAMPING = 0.01
"""The damping d relative to the mean diagonal of H."""
_MOST_DAMPING = 1.0
_CHUNK = 128
"""Inputs per chunk; at its end, one product propagates the errors to later chunks."""
_ROWS = 4096
"""Rows of x converted to float32 at a time; bounds the memory that a large batch takes."""


class Gram(Statistic):
    """The sum of x^T x over all rows x, [inputs, inputs] in float32."""

    fields = ("total", "rows")

    def __init__(self, tensor: str) -> None:
        super().__init__(tensor, "gram")
        self.total: Array = np.empty((0, 0), np.float32)
        self.rows = 0

    @property
    def seen(self) -> bool:
        return self.rows > 0

    def update(self, values: Array) -> None:
        if not values.ndim or finite_bounds(values, self.tensor) is None:
            return
        rows = values.reshape(-1, values.shape[-1])
        self._widen(rows.shape[-1])
        for start in range(0, len(rows), _ROWS):
            some = rows[start : start + _ROWS].astype(np.float32)
            for at, _ in blocks(self.total):
                self.total[at] += np.matmul(np.transpose(some[:, at]), some)
        self.rows += len(rows)

    def _merge(self, other: Gram) -> None:
        self._widen(len(other.total))
        for at, _ in blocks(self.total):
            self.total[at] += other.total[at]
        self.rows += other.rows

    def _widen(self, channels: int) -> None:
        """Allocate the matrix, or raise Mismatch if the number of channels changed."""
        if not self.rows:
            self.total = allocate((channels, channels), np.float32)
            self.total[:] = 0
        elif channels != len(self.total):
            raise Mismatch(
                f"tensor '{self.tensor}' has {channels} channels, and had {len(self.total)} before"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Solver:
    """The order of the inputs and U; layers with the same input share them."""

    order: Array
    upper: Array
    importance: Array
    """The diagonal of H, by input."""
    by_importance: bool

    @classmethod
    def of(cls, gram: Array, by_importance: bool, damping: float = DAMPING) -> Solver:
        """Return the solver for H [inputs, inputs], which is not modified."""
        importance: Array = np.array(np.diagonal(gram))
        order = (
            np.argsort(-importance, kind="stable") if by_importance else np.arange(len(importance))
        )
        backwards = order[::-1]
        mean = float(importance.mean()) or 1.0
        square: Array = allocate(gram.shape, np.float32)
        while True:
            for rows, _ in blocks(square):
                square[rows] = gram[backwards[rows]][:, backwards]
            np.einsum("ii->i", square)[:] += np.float32(damping * mean)
            try:
                factor(square)
                invert(square)
            except np.linalg.LinAlgError:
                pass
            else:
                return cls(order, square[::-1, ::-1], importance, by_importance)
            if damping >= _MOST_DAMPING:
                return cls(order, np.eye(len(square), dtype=np.float32), importance, by_importance)
            damping = min(damping * 10, _MOST_DAMPING)

    def __call__(self, piece: Array, grid: Grid, inputs: int) -> tuple[Array, Fit]:
        """Return the codes of a piece [outputs, blocks, block] with all inputs, and its fit."""
        outputs, blocks, block = piece.shape
        codes, fit = self.quantize(piece.reshape(outputs, -1)[:, :inputs], grid, block)
        padded = np.empty((outputs, blocks * block), np.uint8)
        padded[:, :inputs] = codes
        padded[:, inputs:] = fit.zero[:, -1:]
        return padded.reshape(piece.shape), fit

    def quantize(self, weights: Array, grid: Grid, block: int) -> tuple[Array, Fit]:
        """Return the codes of weights [outputs, inputs], and the fit [outputs, blocks]."""
        outputs, inputs = weights.shape
        left = np.ascontiguousarray(weights.T[self.order], dtype=np.float32)
        blocks = -(-inputs // block)
        scale = np.ones((blocks, outputs), np.float32)
        zero = np.zeros((blocks, outputs), np.float32)
        if self.by_importance:
            for at in range(blocks):
                span = slice(at * block, (at + 1) * block)
                scale[at], zero[at] = self._fitted(weights[:, span], grid, span)
        codes = np.empty((inputs, outputs), np.uint8)
        step = max(_CHUNK, block)
        for start in range(0, inputs, step):
            stop = min(start + step, inputs)
            errors = np.empty((stop - start, outputs), np.float32)
            for i in range(start, stop):
                source = int(self.order[i])
                at = source // block
                if not self.by_importance and i % block == 0:
                    rows = np.transpose(left[i : i + block])
                    scale[at], zero[at] = self._fitted(rows, grid, slice(i, i + block))
                code = np.rint(left[i] / scale[at] + zero[at])
                np.clip(code, 0, grid.format.high, out=code)
                codes[source] = code
                error = (left[i] - (code - zero[at]) * scale[at]) / self.upper[i, i]
                left[i:stop] -= np.outer(self.upper[i, i:stop], error)
                errors[i - start] = error
            left[stop:] -= self.upper[start:stop, stop:].T @ errors
        return np.transpose(codes), Fit(np.transpose(scale), np.transpose(zero))

    def _fitted(self, rows: Array, grid: Grid, span: slice) -> tuple[Array, Array]:
        part = self.importance[span]
        importance = part / part.mean() if part.any() else None
        found = fit_nearest(np.ascontiguousarray(rows), grid, importance)
        return found.scale[:, 0], found.zero[:, 0]
