"""Large arrays in scratch files: mapped, so that they take no memory that cannot be given back.

Each file has a name as long as an array in it is alive, so that a runtime can map it as well (see
`place_of`). Small arrays share a file: a model has more of them than a process may have open files.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]

FILE_FROM = 1 << 16
"""Arrays of fewer bytes are plain memory."""
_SHARED = 1 << 25
"""Bytes of a file for several arrays; one of more than half of that gets a file of its own."""
_ALIGNMENT = mmap.ALLOCATIONGRANULARITY


class Place(NamedTuple):
    """Where an array's bytes are: from `offset` on in the file `path`."""

    path: Path
    offset: int


class _File(mmap.mmap):
    """A mapped scratch file, removed when nothing of it is in use any more."""

    path: Path
    used: int
    start: int
    """The address of its first byte."""

    @classmethod
    def of(cls, size: int) -> _File:
        descriptor, name = tempfile.mkstemp(prefix="toolkit-", suffix=".scratch")
        try:
            os.truncate(descriptor, size)
            made = cls(descriptor, size)
        except BaseException:
            os.unlink(name)
            raise
        finally:
            os.close(descriptor)
        made.path, made.used = Path(os.path.realpath(name)), 0
        made.start = np.frombuffer(made, np.uint8, count=1).ctypes.data
        weakref.finalize(made, _remove, name)
        return made

    def take(self, size: int) -> int | None:
        """The offset of so many free bytes; None when there are fewer."""
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        if start + size > len(self):
            return None
        self.used = start + size
        return start


class _Open:
    """The file that the next small array goes to."""

    def __init__(self) -> None:
        self._file: weakref.ref[_File] | None = None
        self._lock = Lock()

    def take(self, size: int) -> tuple[_File, int]:
        if size > _SHARED // 2:
            return _File.of(size), 0
        with self._lock:
            file = self._file() if self._file is not None else None
            start = file.take(size) if file is not None else None
            if file is None or start is None:
                file, start = _File.of(_SHARED), 0
                file.used = size
                self._file = weakref.ref(file)
            return file, start


_open = _Open()


def allocate(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """An array to be filled; a large one is mapped to a scratch file."""
    kind = np.dtype(dtype)
    count = math.prod(shape)
    if count * kind.itemsize < FILE_FROM:
        return np.empty(shape, dtype=kind)
    file, start = _open.take(count * kind.itemsize)
    return np.frombuffer(file, dtype=kind, count=count, offset=start).reshape(shape)


def place_of(array: Array) -> Place | None:
    """Where a contiguous array lies in a scratch file; None for one that lies in none."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, _File) or not array.flags.c_contiguous:
        return None
    return Place(owner.path, array.ctypes.data - owner.start)


def _remove(name: str) -> None:
    with suppress(OSError):  # where a mapped file cannot be removed, the system's cleaner will
        os.unlink(name)
