"""Samples from Python: a function, an object in onnxruntime's convention, an iterable."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, cast

import numpy as np

from toolkit.errors import ToolkitError, UsageError, summarize
from toolkit.user_code import get_object, load_file, load_module


class Spool:
    """Feeds that can be had only once, kept in a scratch folder while they go by.

    The folder goes away with this object. Until the feeds were all read once, iterating goes on
    with those that nobody saw yet.
    """

    def __init__(self, feeds: Iterator[Any]) -> None:
        self._feeds = feeds
        self._folder = tempfile.TemporaryDirectory(prefix="toolkit-")
        self._kept = 0
        self._complete = False

    def count(self) -> int | None:
        return self._kept if self._complete else None

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while True:
            if index < self._kept:
                yield self.load(index)
            else:
                feed = next(self._feeds, None)
                if feed is None:
                    self._complete = True
                    return
                self._save(feed)
                yield feed
            index += 1

    def _save(self, feed: Any) -> None:
        path = Path(self._folder.name) / f"{self._kept}.npz"
        feed = require_feed(feed, "a feed")
        try:
            # By number: names may be anything. The list of names is an array of its own.
            arrays = {str(i): np.asarray(value) for i, value in enumerate(feed.values())}
            with path.open("wb") as file:
                np.savez(file, allow_pickle=True, names=np.array(list(feed)), **arrays)
        except (ValueError, TypeError) as error:
            raise UsageError(f"a feed is no dict of arrays: {summarize(error)}") from error
        self._kept += 1

    def load(self, index: int) -> dict[str, Any]:
        """One of those that were kept."""
        path = Path(self._folder.name) / f"{index}.npz"
        # Strings are Python objects to numpy. The folder is ours alone: nobody else writes to it.
        with np.load(path, allow_pickle=True) as loaded:
            return {str(name): loaded[str(i)] for i, name in enumerate(loaded["names"])}


class GetNext:
    """An object with `get_next`, which gives a feed or None at the end (onnxruntime's convention).

    If it has `rewind`, that starts it over. Otherwise its feeds are kept in a scratch folder.
    """

    def __init__(self, reader: object) -> None:
        self.notes: list[str] = []
        self._reader: Any = reader
        rewinds = callable(getattr(reader, "rewind", None))
        self._spool = None if rewinds else Spool(self._once())

    def count(self) -> int | None:
        return self._spool.count() if self._spool is not None else None

    def fingerprint(self) -> Iterable[bytes] | None:
        return None

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if self._spool is None:
            _guarded(self._reader.rewind, "rewind")
        for index, feed in enumerate(self._once() if self._spool is None else self._spool):
            yield f"feed {index}", require_feed(feed, f"feed {index}")

    def _once(self) -> Iterator[Any]:
        while True:
            feed = _guarded(self._reader.get_next, "get_next")
            if feed is None:
                return
            yield feed


class FeedIterable:
    """An iterable of feeds; an iterator's are kept in a scratch folder while they go by."""

    def __init__(self, feeds: Iterable[Any]) -> None:
        self.notes: list[str] = []
        self._feeds = Spool(feeds) if isinstance(feeds, Iterator) else feeds

    def count(self) -> int | None:
        if isinstance(self._feeds, Spool):
            return self._feeds.count()
        length: Any = getattr(self._feeds, "__len__", None)
        return int(length()) if length is not None else None

    def fingerprint(self) -> Iterable[bytes] | None:
        return None

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for index, feed in enumerate(self._feeds):
            yield f"feed {index}", require_feed(feed, f"feed {index}")


def at_address(address: str) -> FeedFunction | GetNext | FeedIterable:
    """What `module:name` or `./file.py:name` gives feeds by: a function, or an object itself."""
    home, _, name = address.rpartition(":")
    if not home or not name:
        raise UsageError(f"'{address}' names no function: write module:function")
    module = load_file(home) if home.endswith(".py") else load_module(home)
    found: Any = get_object(module, name, home)
    if callable(found):
        return FeedFunction(address, found)
    if callable(getattr(found, "get_next", None)):
        return GetNext(found)
    if isinstance(found, Iterable) and not isinstance(found, (str, bytes, Mapping)):
        return FeedIterable(cast("Iterable[Any]", found))
    raise UsageError(f"{address} is no function; it must return an iterable of feeds")


class FeedFunction:
    """`module:function` or `./file.py:function`: called without arguments for each reading.

    It returns an iterable of feeds, or an object with `get_next`.
    """

    def __init__(self, address: str, function: Callable[[], Any]) -> None:
        self.notes: list[str] = []
        self._address = address
        self._function = function

    def count(self) -> int | None:
        return None

    def fingerprint(self) -> Iterable[bytes] | None:
        return None

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        made = _guarded(self._function, self._address)
        if callable(getattr(made, "get_next", None)):
            made = iter(made.get_next, None)
        if not isinstance(made, Iterable) or isinstance(made, Mapping):
            kind = type(cast(object, made)).__name__
            raise UsageError(f"{self._address} returns {kind}; it must be an iterable of feeds")
        feeds = iter(cast("Iterable[Any]", made))
        index = 0
        while True:
            feed = _guarded(lambda: next(feeds, None), self._address)
            if feed is None:
                return
            what = f"{self._address}, feed {index}"
            yield what, require_feed(feed, what)
            index += 1


def require_feed(feed: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(feed, Mapping):
        raise UsageError(f"{what} is {type(feed).__name__}; it must be a dict of arrays by name")
    return cast("Mapping[str, Any]", feed)


def _guarded(function: Any, what: str) -> Any:
    """What the user's code returns; whatever it raises becomes one line."""
    try:
        with redirect_stdout(sys.stderr):  # standard output is for reports
            return function()
    except ToolkitError:
        raise
    except Exception as error:
        raise UsageError(f"{what} failed: {summarize(error)}") from error
