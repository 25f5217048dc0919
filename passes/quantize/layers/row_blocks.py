"""Iterate over large arrays in blocks of rows, without copying them into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

from toolkit.ir.graph import Array

_BLOCK_BYTES = 1 << 22
"""The size of a block."""


class RowSource(Protocol):
    """Weights that are read some rows at a time: an array, or a tensor dequantized on the fly."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, rows: slice, /) -> Array: ...


def blocks(weights: RowSource) -> Iterator[tuple[slice, Array]]:
    """Yield blocks of rows of a few megabytes each, none for an empty array."""
    if not all(weights.shape):
        return
    row_bytes = math.prod(weights.shape[1:]) * weights.dtype.itemsize
    step = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, weights.shape[0], step):
        rows = slice(start, start + step)
        yield rows, weights[rows]
