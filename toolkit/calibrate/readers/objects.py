"""Calibration data from Python: a function, an object with `get_next`, or an iterable of feeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any, cast

from toolkit.calibrate.readers.reader import SampleSource
from toolkit.errors import UsageError
from toolkit.storage.spool import Spool
from toolkit.user_code import call, object_at


class PythonFeeds(SampleSource):
    """The feeds of user code: `start` returns an iterable of them, from the first one on."""

    def __init__(
        self,
        start: Callable[[], Any],
        name: str = "",
        length: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`name` is the address of the code in error messages."""
        super().__init__()
        self._start, self._name, self._length = start, name, length

    def count(self) -> int | None:
        return self._length()

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        name = self._name or "the calibration data"
        feeds = call(lambda: iter(self._start()), name)
        for index in count():
            feed = call(lambda: next(feeds, None), name)
            if feed is None:
                return
            what = f"{self._name}, feed {index}" if self._name else f"feed {index}"
            if not isinstance(feed, Mapping):
                kind = type(feed).__name__
                raise UsageError(f"{what} is {kind}; it must be a dict of arrays by input name")
            yield what, cast("Mapping[str, Any]", feed)


def feeds_in(source: Any) -> PythonFeeds | None:
    """Return the feeds in an iterable, or in an object that follows onnxruntime's convention.

    `get_next` returns a feed, or None at the end; an optional `rewind` starts over. An
    iterator, and an object without `rewind`, can be read only once: its feeds are kept on disk.
    """
    if callable(getattr(source, "get_next", None)):
        if callable(getattr(source, "rewind", None)):
            return PythonFeeds(lambda: _rewound(source))
        source = iter(source.get_next, None)
    if isinstance(source, Iterator):
        spool = Spool(cast("Iterator[Any]", source))
        return PythonFeeds(lambda: spool, length=spool.count)
    if isinstance(source, Iterable) and not isinstance(source, (str, bytes, Mapping)):
        length: Any = getattr(cast("Iterable[Any]", source), "__len__", lambda: None)
        return PythonFeeds(lambda: cast("Iterable[Any]", source), length=length)
    return None


def _rewound(reader: Any) -> Iterator[Any]:
    reader.rewind()
    return iter(reader.get_next, None)


def feeds_at(address: str) -> PythonFeeds:
    """Return the feeds at `module:name` or `./file.py:name`: a function of them, or an object.

    The function is called without arguments for each reading. It returns an iterable of feeds, or
    an object with `get_next`.
    """
    found: Any = object_at(address)
    if callable(found):
        return PythonFeeds(lambda: _returned(found, address), address)
    feeds = feeds_in(found)
    if feeds is None:
        raise UsageError(f"{address} is not a function that returns an iterable of feeds")
    return feeds


def _returned(function: Callable[[], Any], address: str) -> Iterable[Any]:
    made = function()
    if callable(getattr(made, "get_next", None)):
        return iter(made.get_next, None)
    if not isinstance(made, Iterable) or isinstance(made, Mapping):
        kind = type(cast(object, made)).__name__
        raise UsageError(f"{address} returns {kind}; it must be an iterable of feeds")
    return cast("Iterable[Any]", made)
