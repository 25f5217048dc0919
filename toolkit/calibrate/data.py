"""Calibration data: where samples come from, and, for one model, the feeds that passes observe.

`Calib` is what a user says; `CalibrationData` is what a pass gets in its context. A pass may change
the graph but never the model's inputs, so the feeds of the original serve all passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.calibrate.collector import Calibration, Feeds, Progress, collect
from toolkit.calibrate.observers import Observer

if TYPE_CHECKING:
    from toolkit.calibrate.readers import ReaderOptions
    from toolkit.feeds import Feed
    from toolkit.ir.model import Model


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """Feeds for a model, and how statistics of them are gathered."""

    feeds: Feeds
    cache: Path | None = None
    """A folder in which statistics are kept between runs."""
    custom_ops: tuple[str, ...] = ()
    progress: Progress | None = None
    real: bool = True
    """Whether they are a user's samples, not made up."""

    @property
    def notes(self) -> list[str]:
        """What was ignored or left out of the data."""
        return list(getattr(self.feeds, "notes", ()))

    @property
    def used(self) -> bool:
        """Whether somebody has read them, or what is known of them."""
        return bool(getattr(self.feeds, "was_used", True))

    def first(self, most: int) -> CalibrationData:
        """The same with no more than so many feeds."""
        return replace(self, feeds=_First(self.feeds, most))

    def collect(self, model: Model, observers: Mapping[str, Observer]) -> Calibration:
        """Observe tensors of `model`, as it is now, on every feed."""
        return collect(
            model,
            self.feeds,
            observers,
            cache=self.cache,
            progress=self.progress,
            custom_ops=self.custom_ops,
        )


@dataclass(frozen=True, slots=True)
class _First:
    feeds: Feeds
    most: int

    def __iter__(self) -> Iterator[Feed]:
        return islice(iter(self.feeds), self.most)

    def count(self) -> int | None:
        known = self.feeds.count()
        return None if known is None else min(known, self.most)

    def digest(self) -> str:
        return f"{self.feeds.digest()} first {self.most}"


@dataclass(frozen=True, slots=True)
class Calib:
    """What a user says of calibration: a source (see `toolkit.calibrate.readers`) and options."""

    source: object
    options: ReaderOptions | None = None
    cache: Path | None = None

    def open(
        self, model: Model, custom_ops: Sequence[str] = (), progress: Progress | None = None
    ) -> CalibrationData:
        """The data for this model; raises UsageError when there is no such source."""
        from toolkit.calibrate.readers import reader_for

        reader = reader_for(self.source, model, self.options)
        real = self.source != "random"
        return CalibrationData(reader, self.cache, tuple(custom_ops), progress, real)
