"""Large arrays, a few megabytes at a time: read where they lie, made in a file without a name."""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from toolkit.graph import Array

_BLOCK_BYTES = 1 << 22
_FILE_FROM = 1 << 16


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


def allocate(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """An array to be filled; a large one is mapped to a file, and takes no memory."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < _FILE_FROM:
        return np.empty(shape, dtype=dtype)
    with tempfile.TemporaryFile(prefix="toolkit-") as file:
        file.truncate(size)
        return np.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype).reshape(shape)
