"""Cholesky factors and inverses of large matrices, in place and by blocks.

    A = L L^T     L_jj L_jj^T = A_jj - sum_{k<j} L_jk L_jk^T
                  L_ij = (A_ij - sum_{k<j} L_ik L_jk^T) L_jj^-T
    X = L^-1      X_ii = L_ii^-1
                  X_ij = -X_ii sum_{j<=k<i} L_ik X_kj

Each step touches some rows only, since the matrix may be mapped from a file. Diagonal blocks are
computed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from toolkit.ir.graph import Array

_BLOCK = 256
"""Rows of a block."""


def factor(matrix: Array) -> None:
    """Replace a symmetric matrix by L; raise LinAlgError if it is not positive definite."""
    for at in _spans(len(matrix)):
        done, below = slice(0, at.start), slice(at.stop, None)
        before: Array = np.transpose(matrix[at, done])
        corner: Array = matrix[at, at] - np.matmul(matrix[at, done], before)
        lower: Array = np.linalg.cholesky(corner.astype(np.float64))
        _require_finite(lower)
        matrix[at, at] = lower
        matrix[at, below] = 0
        turned: Array = np.transpose(np.linalg.inv(lower)).astype(matrix.dtype)
        for under in _spans(len(matrix), at.stop):
            left: Array = matrix[under, at] - np.matmul(matrix[under, done], before)
            matrix[under, at] = np.matmul(left, turned)


def invert(lower: Array) -> None:
    """Replace L by its inverse; raise LinAlgError if it is numerically singular."""
    for at in _spans(len(lower)):
        done = slice(0, at.start)
        with np.errstate(over="ignore", invalid="ignore"):
            corner: Array = np.linalg.inv(lower[at, at].astype(np.float64)).astype(lower.dtype)
            rest: Array = -corner @ (lower[at, done] @ lower[done, done])
        _require_finite(corner)
        _require_finite(rest)
        lower[at, done], lower[at, at] = rest, corner


def _spans(size: int, start: int = 0) -> Iterator[slice]:
    return (slice(at, min(at + _BLOCK, size)) for at in range(start, size, _BLOCK))


def _require_finite(numbers: Array) -> None:
    if not np.isfinite(numbers).all():
        raise np.linalg.LinAlgError("not finite")
