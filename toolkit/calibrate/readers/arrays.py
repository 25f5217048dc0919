"""Arrays in files: one .npz with many samples, or a folder with one feed a file.

A .npz is read row by row from the archive, compressed or not: memory does not grow with samples.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from toolkit.calibrate.readers.fit import Inputs, describe
from toolkit.calibrate.readers.reader import file_bytes
from toolkit.calibrate.statistics import Array
from toolkit.errors import UsageError
from toolkit.ir.model import Model

_BROKEN = (OSError, ValueError, EOFError, zipfile.BadZipFile)


@dataclass(frozen=True, slots=True)
class _Member:
    """An array in the archive, and how it is cut into feeds."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    rows: int
    """Rows of the first axis in a feed; 0: the whole array, in every feed."""
    drops_axis: bool
    """Whether a row is a whole input, without the axis that counts samples."""

    @property
    def feeds(self) -> int | None:
        return self.shape[0] // self.rows if self.rows else None


class ArrayFile:
    """One .npz: arrays by input name, whose first axis counts samples.

    It is cut into pieces of the model's batch where that is fixed, and of one sample where it is
    dynamic. An array with one axis more than the input holds a whole input a sample; a single
    number goes into every feed.
    """

    def __init__(self, path: Path, model: Model) -> None:
        self.notes: list[str] = []
        self._path, self._inputs = path, Inputs.of(model)
        self._members = list(self._plan())
        counted = {m.name: m.feeds for m in self._members if m.feeds is not None}
        self._count = min(counted.values(), default=1)
        for name, feeds in counted.items():
            if feeds != self._count:
                least = next(other for other, n in counted.items() if n == self._count)
                raise UsageError(
                    f"'{path}': '{name}' makes {feeds} feeds, '{least}' {self._count}; "
                    "all inputs need the same number of samples"
                )

    def count(self) -> int | None:
        return self._count

    def fingerprint(self) -> Iterable[bytes] | None:
        return file_bytes([self._path])

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(self._path))
            readers = {m.name: _rows(stack, archive, m) for m in self._members}
            for index in range(self._count):
                what = f"'{self._path}', feed {index}"
                try:
                    feed = {name: next(rows) for name, rows in readers.items()}
                except _BROKEN as error:
                    raise UsageError(f"{what} cannot be read: the file is damaged") from error
                yield what, feed

    def _plan(self) -> Iterator[_Member]:
        try:
            with zipfile.ZipFile(self._path) as archive:
                names = [name.removesuffix(".npy") for name in archive.namelist()]
                for name in names:
                    if name not in self._inputs.types:
                        self.notes.append(f"'{name}' is no input of the model: it was ignored")
                kept = [name for name in names if name in self._inputs.types]
                headers = {name: _header(archive, name) for name in kept}
        except _BROKEN as error:
            raise UsageError(f"'{self._path}' is no .npz file of plain arrays") from error
        if not names:
            raise UsageError(f"'{self._path}' is empty: it holds no array")
        for name, (shape, fortran, dtype) in headers.items():
            yield self._cut(name, shape, fortran, dtype)

    def _cut(
        self, name: str, shape: tuple[int, ...], fortran: bool, dtype: np.dtype[Any]
    ) -> _Member:
        if not shape:
            return _Member(name, shape, dtype, fortran, 0, False)
        declared = self._inputs.types[name]
        sizes = declared.shape if declared is not None else None
        if sizes is not None and len(shape) == len(sizes) + 1:
            batch, drops_axis = 1, True
        elif sizes is not None and len(shape) != len(sizes):
            raise UsageError(
                f"'{self._path}': '{name}' has rank {len(shape)}; the model takes "
                f"{describe(declared)}"
            )
        else:
            first = sizes[0] if sizes else 1
            batch, drops_axis = first if isinstance(first, int) and first > 0 else 1, False
        if shape[0] < batch:
            had = f"{shape[0]} samples" if shape[0] else "no sample"
            raise UsageError(f"'{self._path}': '{name}' has {had}; the model's batch is {batch}")
        left = shape[0] % batch
        if left:
            self.notes.append(f"'{name}': the last {left} samples make no batch of {batch}")
        return _Member(name, shape, dtype, fortran, batch, drops_axis)


class ArrayFolder:
    """Files of one feed each: .npz by input name, .npy for a model with a single input."""

    def __init__(self, files: Sequence[Path], model: Model) -> None:
        self.notes: list[str] = []
        self._files = files
        self._required = model.graph.feeds

    def count(self) -> int | None:
        return len(self._files)

    def fingerprint(self) -> Iterable[bytes] | None:
        return file_bytes(self._files)

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for path in self._files:
            yield f"'{path}'", self._load(path)

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            loaded: Any = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.lib.npyio.NpzFile):
                with loaded:
                    return {name: loaded[name] for name in list(loaded.files)}
        except _BROKEN as error:
            raise UsageError(f"'{path}' is no file of plain arrays") from error
        if len(self._required) != 1:
            listed = ", ".join(self._required)
            raise UsageError(f"'{path}' is one array, and the model takes {listed}; save .npz")
        return {self._required[0]: loaded}


_Header = tuple[tuple[int, ...], bool, np.dtype[Any]]


def _header(archive: zipfile.ZipFile, name: str) -> _Header:
    with _member(archive, name) as file:
        return _read_header(file)


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    found = name if name in archive.NameToInfo else f"{name}.npy"
    return archive.open(found)


def _read_header(file: IO[bytes]) -> _Header:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    return shape, fortran, dtype


def _rows(stack: ExitStack, archive: zipfile.ZipFile, member: _Member) -> Iterator[Array]:
    """The pieces of an array, in order, each read when it is asked for."""
    file = stack.enter_context(_member(archive, member.name))
    _read_header(file)
    if not member.rows or member.fortran:  # in column order no row is in one piece
        whole = _read(file, member.shape, member.dtype, "F" if member.fortran else "C")
        while not member.rows:
            yield whole
        for at in range(0, member.shape[0] - member.rows + 1, member.rows):
            piece = whole[at : at + member.rows]
            yield piece[0] if member.drops_axis else piece
        return
    shape = (member.rows, *member.shape[1:])
    for _ in range(member.shape[0] // member.rows):
        piece = _read(file, shape, member.dtype, "C")
        yield piece[0] if member.drops_axis else piece


def _read(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any], order: Any) -> Array:
    size = int(np.prod(shape)) * dtype.itemsize
    data = file.read(size)
    if len(data) != size:
        raise EOFError("the array ends too early")
    return np.frombuffer(data, dtype).reshape(shape, order=order)
