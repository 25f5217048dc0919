"""Synthetic calibration inputs, drawn from each input's domain, for a first try only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from toolkit.calibrate.readers.reader import SampleSource
from toolkit.errors import UsageError
from toolkit.feeds import Feed, FeedGenerator
from toolkit.ir.model import Model
from toolkit.storage.spool import Spool

_BATCH = 8
"""Feeds generated, and held in memory, at once."""


class RandomFeeds(SampleSource):
    """`count` seeded random feeds on which the model runs."""

    def __init__(self, model: Model, seed: int, count: int) -> None:
        super().__init__()
        self.notes.append("random feeds: their ranges say little about those of real data")
        self._model, self._seed, self._count = model, seed, count
        self._spool = Spool(self._generate())

    def count(self) -> int | None:
        return self._count

    def fingerprint(self) -> Iterable[bytes] | None:
        return [f"{self._seed} {self._count}".encode()]

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for index, feed in enumerate(self._spool):
            yield f"random feed {index}", feed

    def _generate(self) -> Iterator[Feed]:
        from toolkit.runtime.session import Session

        session = Session(self._model)

        def run(feed: Feed) -> list[Any]:
            session.run(feed)
            return []  # the generator would keep the outputs

        for start in range(0, self._count, _BATCH):
            generator = FeedGenerator(self._model, self._seed + start)
            runs = generator.find(run, min(_BATCH, self._count - start))
            if not runs:
                raise UsageError(f"random feeds fail: {generator.refusal}; give real samples")
            yield from (run.feed for run in runs)
