"""Reader: the feeds of a source, checked against a model's inputs one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.calibrate.readers.fit import Inputs
from toolkit.errors import UsageError
from toolkit.feeds import Feed
from toolkit.ir.model import Model

_CHUNK = 1 << 20
"""Bytes of a file read at once."""


class SampleSource:
    """Raw feeds from one kind of calibration data; each iteration starts over."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """Remarks for the user: ignored inputs, samples that were left out."""

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield each feed with its name for error messages."""
        raise NotImplementedError

    def count(self) -> int | None:
        """Return the number of feeds, or None if it is unknown before reading them."""
        return None

    def fingerprint(self) -> Iterable[bytes] | None:
        """Return bytes that identify data and options; None: the digest is that of the feeds."""
        return None


class FileSource(SampleSource):
    """Raw feeds from files; the digest covers the files and the `settings`."""

    def __init__(self, files: Sequence[Path], *settings: object) -> None:
        super().__init__()
        self.files = files
        self._settings = settings

    def fingerprint(self) -> Iterable[bytes] | None:
        if self._settings:
            yield repr(self._settings).encode()
        yield from _file_bytes(self.files)


class Reader:
    """The feeds of a source for one model, read one at a time; each iteration starts over."""

    def __init__(self, source: SampleSource, model: Model, most: int | None = None) -> None:
        self._source, self._most = source, most
        self.was_used = False
        self._inputs = Inputs(model)

    @property
    def notes(self) -> list[str]:
        """Remarks on ignored inputs and samples, in the order of their discovery."""
        return list(dict.fromkeys((*self._source.notes, *self._inputs.notes)))

    def __iter__(self) -> Iterator[Feed]:
        """Yield the feeds; raises UsageError if one does not fit the model, or without any."""
        empty = self.was_used = True
        for what, raw in islice(iter(self._source), self._most):
            empty = False
            yield self._inputs.fit(raw, what)
        if empty:
            raise UsageError("the calibration data are empty: at least one sample is needed")

    def count(self) -> int | None:
        """Return the number of feeds, or None if it is unknown before reading them."""
        total = self._source.count()
        return total if total is None or self._most is None else min(total, self._most)

    def digest(self) -> str:
        """Return a digest of the data, equal for equal feeds."""
        self.was_used = True  # cached statistics of the data will be used
        digest = hashlib.blake2b(digest_size=16)
        chunks = self._source.fingerprint()
        kind = type(self._source).__name__ if chunks is not None else "feeds"
        digest.update(f"{kind} {self._most}\n".encode())
        for chunk in _feed_bytes(self) if chunks is None else chunks:
            digest.update(chunk)
        return digest.hexdigest()


def _file_bytes(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yield the contents of files, each after its name and size."""
    for path in paths:
        yield f"{path.name} {path.stat().st_size}\n".encode()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk


def sole_input(model: Model, what: str) -> str:
    """Return the only input of a model; raises UsageError if there are others."""
    inputs = model.graph.feeds
    if len(inputs) != 1:
        listed = ", ".join(inputs) or "nothing"
        raise UsageError(
            f"{what} need a model with one input; it takes {listed}: use .npz or module:function"
        )
    return inputs[0]


def _feed_bytes(feeds: Iterable[Feed]) -> Iterator[bytes]:
    for feed in feeds:
        for name in sorted(feed):
            array = np.asarray(feed[name])
            yield f"{name} {array.dtype} {array.shape}\n".encode()
            is_text = array.dtype.kind == "O"
            yield repr(array.tolist()).encode() if is_text else array.tobytes()
