"""Large arrays in mapped scratch files, whose pages the system can evict.

A file keeps its name as long as an array in it is alive, so that a runtime can map it as well (see
`file_range`). Smaller arrays share a file, because the number of open files is limited.
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
"""The smallest array, in bytes, that is kept in a file."""
_SHARED = 1 << 25
"""The size of a shared file in bytes; arrays larger than half of it get a file of their own."""
_ALIGNMENT = mmap.ALLOCATIONGRANULARITY


class FileRange(NamedTuple):
    """The location of an array in a file."""

    path: Path
    offset: int


class _ScratchFile(mmap.mmap):
    """A mapped scratch file, removed when no array in it is alive."""

    path: Path
    used: int
    start: int
    """The address of its first byte."""

    @classmethod
    def of(cls, size: int) -> _ScratchFile:
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
        """Reserve bytes and return their offset; None if too few are free."""
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        if start + size > len(self):
            return None
        self.used = start + size
        return start


class _SharedFile:
    """The scratch file that the next smaller array goes to."""

    def __init__(self) -> None:
        self._file: weakref.ref[_ScratchFile] | None = None
        self._lock = Lock()

    def take(self, size: int) -> tuple[_ScratchFile, int]:
        """Reserve bytes and return their file and offset."""
        if size > _SHARED // 2:
            return _ScratchFile.of(size), 0
        with self._lock:
            file = self._file() if self._file is not None else None
            start = file.take(size) if file is not None else None
            if file is None or start is None:
                file, start = _ScratchFile.of(_SHARED), 0
                file.used = size
                self._file = weakref.ref(file)
            return file, start


_shared_file = _SharedFile()


def allocate(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return an uninitialized array; a large one is mapped to a scratch file."""
    kind = np.dtype(dtype)
    count = math.prod(shape)
    if count * kind.itemsize < FILE_FROM:
        return np.empty(shape, dtype=kind)
    file, start = _shared_file.take(count * kind.itemsize)
    return np.frombuffer(file, dtype=kind, count=count, offset=start).reshape(shape)


def file_range(array: Array) -> FileRange | None:
    """Return the location of a contiguous array in a scratch file, or None."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, _ScratchFile) or not array.flags.c_contiguous:
        return None
    return FileRange(owner.path, array.ctypes.data - owner.start)


def _remove(name: str) -> None:
    with suppress(OSError):  # some systems cannot remove a mapped file
        os.unlink(name)
