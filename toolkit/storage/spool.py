"""Items of a one-time iterator, kept on disk so that they can be read again."""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Spool(Generic[Item]):
    """An iterable over a one-time iterator that can be iterated again.

    Each item is pickled to a temporary file when it is first read. An iteration that stops early
    leaves the remaining items to the next one.
    """

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._file = tempfile.TemporaryFile(prefix="toolkit-")  # noqa: SIM115
        self._offsets = array("q")
        self._complete = False

    def count(self) -> int | None:
        """Return the number of items, or None until all of them have been read."""
        return len(self._offsets) if self._complete else None

    def __iter__(self) -> Iterator[Item]:
        index = 0
        while True:
            if index < len(self._offsets):
                yield self.load(index)
            elif (item := next(self._items, None)) is not None:
                self._offsets.append(self._file.seek(0, os.SEEK_END))
                pickle.dump(item, self._file, pickle.HIGHEST_PROTOCOL)
                yield item
            else:
                self._complete = True
                return
            index += 1

    def load(self, index: int) -> Item:
        """Return an item that has been read before."""
        self._file.seek(self._offsets[index])
        return pickle.load(self._file)
