"""Calibration arrays: one .npz with many samples, or a folder with one feed per file."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.calibrate.readers.reader import FileSource
from toolkit.calibrate.statistics import Array
from toolkit.errors import UsageError
from toolkit.feeds.user_samples import describe
from toolkit.ir.model import Model

_DAMAGED = (OSError, ValueError, EOFError, zipfile.BadZipFile)


class ArrayFile(FileSource):
    """One .npz: arrays by input name, whose first axis counts samples.

    A feed holds as many samples as the model's batch if that is fixed, and one if it is dynamic. An
    array with one more axis than the input holds a whole input per sample; a scalar is part of
    every feed. The arrays are extracted to a temporary folder and mapped: memory does not grow with
    the number of samples.
    """

    def __init__(self, files: Sequence[Path], model: Model, options: None = None) -> None:
        super().__init__(files)
        path = self._path = files[0]
        self._graph = model.graph
        self._folder = tempfile.TemporaryDirectory(prefix="toolkit-")
        self._arrays = self._extract()
        self._batches = {name: self._batch(name, a.shape) for name, a in self._arrays.items()}
        counts = {
            name: len(self._arrays[name]) // batch for name, batch in self._batches.items() if batch
        }
        self._count = min(counts.values(), default=1)
        for name, count in counts.items():
            if count != self._count:
                least = next(other for other, n in counts.items() if n == self._count)
                raise UsageError(
                    f"'{path}': '{name}' makes {count} feeds, '{least}' {self._count}; "
                    "all inputs need the same number of samples"
                )

    def count(self) -> int | None:
        return self._count

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for index in range(self._count):
            feed = {name: self._rows(name, index) for name in self._arrays}
            yield f"'{self._path}', feed {index}", feed

    def _rows(self, name: str, index: int) -> Array:
        array, batch = self._arrays[name], self._batches[name]
        if not batch:
            return np.array(array)
        rows = np.array(array[index * batch : (index + 1) * batch])
        rank = self._graph.rank(name)
        return rows[0] if rank is not None and array.ndim > rank else rows

    def _extract(self) -> dict[str, Array]:
        """Map the archive's arrays for inputs of the model, including frozen ones."""
        known = (*self._graph.inputs, *self._graph.model.frozen)
        arrays: dict[str, Array] = {}
        try:
            with zipfile.ZipFile(self._path) as archive:
                members = archive.namelist()
                for member in members:
                    name = member.removesuffix(".npy")
                    if name not in known:
                        self.notes.append(f"'{name}' is not an input of the model and was ignored")
                        continue
                    file = Path(self._folder.name) / f"{len(arrays)}.npy"
                    with archive.open(member) as source, file.open("wb") as target:
                        shutil.copyfileobj(source, target)
                    arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False)
        except _DAMAGED as error:
            raise UsageError(f"'{self._path}' is not an .npz file of plain arrays") from error
        if not members:
            raise UsageError(f"'{self._path}' is empty: it holds no arrays")
        return arrays

    def _batch(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the rows of an array per feed; 0: the whole array."""
        if not shape:
            return 0
        declared = self._graph.type(name)
        sizes = declared.shape if declared is not None else None
        if sizes is not None and len(shape) not in (len(sizes), len(sizes) + 1):
            raise UsageError(
                f"'{self._path}': '{name}' has rank {len(shape)}; the model takes "
                f"{describe(declared)}"
            )
        first = sizes[0] if sizes and len(shape) == len(sizes) else 1
        batch = first if isinstance(first, int) and first > 0 else 1
        if shape[0] < batch:
            had = f"{shape[0]} samples" if shape[0] else "no samples"
            raise UsageError(f"'{self._path}': '{name}' has {had}; the model's batch is {batch}")
        left = shape[0] % batch
        if left:
            self.notes.append(f"'{name}': the last {left} samples do not fill a batch of {batch}")
        return batch


class ArrayFolder(FileSource):
    """A folder of feeds, one per file: .npz by input name, .npy for models with one input."""

    def __init__(self, files: Sequence[Path], model: Model, options: None = None) -> None:
        super().__init__(files)
        self._required = model.graph.feeds

    def count(self) -> int | None:
        return len(self.files)

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for path in self.files:
            yield f"'{path}'", self._load(path)

    def _load(self, path: Path) -> dict[str, Any]:
        try:
            loaded: Any = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.lib.npyio.NpzFile):
                with loaded:
                    return {name: loaded[name] for name in list(loaded.files)}
        except _DAMAGED as error:
            raise UsageError(f"'{path}' is not a file of plain arrays") from error
        if len(self._required) != 1:
            listed = ", ".join(self._required)
            raise UsageError(f"'{path}' is one array, and the model takes {listed}; save .npz")
        return {self._required[0]: loaded}
