"""Made-up feeds, drawn inside each input's domain: for a first try, not for real ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from toolkit.calibrate.readers.objects import Spool
from toolkit.errors import UsageError
from toolkit.feeds import Search
from toolkit.ir.model import Model

_AT_ONCE = 8
"""Feeds of one search; it holds all of them in memory."""


class RandomFeeds:
    """`count` seeded feeds that the model takes."""

    def __init__(self, model: Model, seed: int, count: int) -> None:
        self.notes = ["random feeds: ranges of made-up values say little about real ones"]
        self._model, self._seed, self._count = model, seed, count
        self._spool = Spool(self._draw())

    def count(self) -> int | None:
        return self._count

    def fingerprint(self) -> Iterable[bytes] | None:
        return [f"{self._seed} {self._count}".encode()]

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for index, feed in enumerate(self._spool):
            yield f"random feed {index}", feed

    def _draw(self) -> Iterator[dict[str, Any]]:
        from toolkit.runtime.session import Session

        session = Session(self._model)

        def run(feed: dict[str, Any]) -> list[Any]:
            session.run(feed)
            return []  # the search would keep the outputs of all feeds

        for start in range(0, self._count, _AT_ONCE):
            search = Search(self._model, self._seed + start)
            trials = search.find(run, min(_AT_ONCE, self._count - start))
            if not trials:
                raise UsageError(f"no random feed runs: {search.refusal}; give real samples")
            yield from (trial.feed for trial in trials)
