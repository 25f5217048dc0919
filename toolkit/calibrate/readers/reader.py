"""Reader: a source of samples, checked against the model feed by feed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from toolkit.calibrate.readers.fit import Inputs
from toolkit.errors import UsageError
from toolkit.feeds import Feed
from toolkit.ir.model import Model

_PIECE = 1 << 20


class Source(Protocol):
    """Where samples come from; iterating again starts over.

    Gives each raw feed with the words that an error names it by.
    """

    notes: list[str]
    """What the user should know: inputs that were ignored, samples that were left out."""

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]: ...

    def count(self) -> int | None:
        """How many feeds there are; None when only reading them tells."""
        ...

    def fingerprint(self) -> Iterable[bytes] | None:
        """Bytes that tell these data and options from others; None: only the feeds do."""
        ...


class Reader:
    """Feeds for one model; can be iterated again, and reads one feed at a time."""

    def __init__(self, source: Source, model: Model, most: int | None = None) -> None:
        self._source, self._most = source, most
        self.was_used = False
        self._inputs = Inputs.of(model)

    @property
    def notes(self) -> list[str]:
        """What was ignored or left out, in the order of its discovery."""
        return list(dict.fromkeys((*self._source.notes, *self._inputs.notes)))

    def __iter__(self) -> Iterator[Feed]:
        """The feeds; raises UsageError for one that does not fit, or when there is none."""
        empty = self.was_used = True
        for what, raw in islice(iter(self._source), self._most):
            empty = False
            yield self._inputs.fit(raw, what)
        if empty:
            raise UsageError("the calibration data are empty: there is no sample to observe")

    def count(self) -> int | None:
        """How many feeds there are, where that is known before they are read."""
        total = self._source.count()
        return total if total is None or self._most is None else min(total, self._most)

    def digest(self) -> str:
        """A name for the data: the same for the same feeds, whenever and wherever it is asked."""
        self.was_used = True  # by whoever has statistics of them
        digest = hashlib.blake2b(digest_size=16)
        chunks = self._source.fingerprint()
        kind = type(self._source).__name__ if chunks is not None else "feeds"
        digest.update(f"{kind} {self._most}\n".encode())
        for chunk in _feed_bytes(self) if chunks is None else chunks:
            digest.update(chunk)
        return digest.hexdigest()


def file_bytes(paths: Iterable[Path]) -> Iterator[bytes]:
    """The contents of files, each behind its name and size."""
    for path in paths:
        yield f"{path.name} {path.stat().st_size}\n".encode()
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece


def _feed_bytes(feeds: Iterable[Feed]) -> Iterator[bytes]:
    for feed in feeds:
        for name in sorted(feed):
            array = np.asarray(feed[name])
            yield f"{name} {array.dtype} {array.shape}\n".encode()
            textual = array.dtype.kind == "O"
            yield repr(array.tolist()).encode() if textual else array.tobytes()
