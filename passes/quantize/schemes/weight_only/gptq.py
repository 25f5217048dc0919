"""GPTQ: quantize input by input; later inputs compensate the errors of earlier ones.

With H = X^T X over the layer's calibration inputs X, rounding the weights of input i by the error e
changes the outputs least if the weights of all later inputs j change by

    w_j <- w_j - e U_ij / U_ii,     U^T U = (H + d I)^-1, U upper triangular

The damping d is a hundredth of the mean diagonal, more if H is still singular. Scale and zero point
of a block are fitted to its weights when it is reached. After Frantar et al., "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers" (2022).

`in_order` takes the inputs by descending diagonal of H; scales are then fitted in advance, and
blocks still consist of adjacent inputs.

With the inputs reversed, H + d I = L L^T, and U is L^-1 reversed. Both are computed in place (see
`triangular`), in an array that is mapped to a file like H itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from passes.quantize.layers.row_blocks import blocks
from passes.quantize.schemes.weight_only.blocks import Fit, Grid, fit_nearest
from passes.quantize.schemes.weight_only.triangular import factor, invert
from toolkit.ir.graph import Array
from toolkit.storage.spill import allocate

DAMPING = 0.01
_MOST_DAMPING = 1.0
_CHUNK = 128
"""Inputs per chunk; errors are propagated beyond a chunk at its end."""


@dataclass(frozen=True, slots=True, eq=False)
class Solver:
    """The order of the inputs and U, shared by all layers with the same input."""

    order: Array
    upper: Array
    weight: Array
    """The diagonal of H by input."""
    in_order: bool

    @classmethod
    def of(cls, gram: Array, in_order: bool, damping: float = DAMPING) -> Solver:
        """Return the solver for H [inputs, inputs], which is not modified."""
        weight: Array = np.array(np.diagonal(gram))
        order = np.argsort(-weight, kind="stable") if in_order else np.arange(len(weight))
        backwards = order[::-1]
        mean = float(weight.mean()) or 1.0
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
                return cls(order, square[::-1, ::-1], weight, in_order)
            if damping >= _MOST_DAMPING:
                return cls(order, np.eye(len(square), dtype=np.float32), weight, in_order)
            damping = min(damping * 10, _MOST_DAMPING)

    def quantize(self, weights: Array, grid: Grid, block: int) -> tuple[Array, Fit]:
        """Return the codes of weights [outputs, inputs], and the fit of their blocks.

        The fit is [outputs, blocks].
        """
        outputs, inputs = weights.shape
        left = np.ascontiguousarray(weights.T[self.order], dtype=np.float32)
        blocks = -(-inputs // block)
        scale = np.ones((blocks, outputs), np.float32)
        zero = np.zeros((blocks, outputs), np.float32)
        if self.in_order:
            for at in range(blocks):
                span = slice(at * block, (at + 1) * block)
                scale[at], zero[at] = self._fitted(weights[:, span], grid, span)
        codes = np.empty((inputs, outputs), np.uint8)
        step = max(_CHUNK, block)
        for start in range(0, inputs, step):
            stop = min(start + step, inputs)
            errors = np.empty((stop - start, outputs), np.float32)
            for i in range(start, stop):
                place = int(self.order[i])
                at = place // block
                if not self.in_order and i % block == 0:
                    rows = np.transpose(left[i : i + block])
                    scale[at], zero[at] = self._fitted(rows, grid, slice(i, i + block))
                code = np.rint(left[i] / scale[at] + zero[at])
                np.clip(code, 0, grid.top, out=code)
                codes[place] = code
                error = (left[i] - (code - zero[at]) * scale[at]) / self.upper[i, i]
                left[i:stop] -= np.outer(self.upper[i, i:stop], error)
                errors[i - start] = error
            left[stop:] -= self.upper[start:stop, stop:].T @ errors
        return np.transpose(codes), Fit(np.transpose(scale), np.transpose(zero))

    def _fitted(self, rows: Array, grid: Grid, span: slice) -> tuple[Array, Array]:
        weight = self.weight[span]
        importance = weight / weight.mean() if weight.any() else None
        found = fit_nearest(np.ascontiguousarray(rows), grid, importance)
        return found.scale[:, 0], found.zero[:, 0]
