"""Large arrays, a few megabytes at a time: read where they lie, made in a file without a name."""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from toolkit.graph import Array

_BLOCK_BYTES = 1 << 22
_FILE_FROM = 1 << 24


def blocks(weights: Array) -> Iterator[tuple[slice, Array]]:
    """Rows in groups of a few megabytes; an array without elements has none."""
    if not weights.size:
        return
    step = max(1, _BLOCK_BYTES * weights.shape[0] // weights.nbytes)
    for start in range(0, weights.shape[0], step):
        rows = slice(start, start + step)
        yield rows, weights[rows]


def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array to be filled; a large one is mapped to a file, and takes no memory."""
    size = math.prod(shape) * dtype.itemsize
    if size < _FILE_FROM:
        return np.empty(shape, dtype=dtype)
    with tempfile.TemporaryFile(prefix="toolkit-") as file:
        file.truncate(size)
        return np.frombuffer(mmap.mmap(file.fileno(), size), dtype=dtype).reshape(shape)
