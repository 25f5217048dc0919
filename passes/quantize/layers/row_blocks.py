"""Large arrays, a few megabytes at a time, where they lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

from toolkit.ir.graph import Array

_BLOCK_BYTES = 1 << 22


class Rows(Protocol):
    """What weights are read from, some rows at a time: an array, or what is computed as read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __getitem__(self, rows: slice, /) -> Array: ...


def blocks(weights: Rows) -> Iterator[tuple[slice, Array]]:
    """Rows in groups of a few megabytes; an array without elements has none."""
    if not all(weights.shape):
        return
    row_bytes = math.prod(weights.shape[1:]) * weights.dtype.itemsize
    step = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, weights.shape[0], step):
        rows = slice(start, start + step)
        yield rows, weights[rows]
