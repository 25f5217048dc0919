"""Calibration data: the user's description of the samples, and the feeds for one model.

A user gives `Calib`; a pass gets `CalibrationData` in its context. Passes never change the model's
inputs: the feeds of the original serve all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.calibrate.collector import Calibration, Feeds, Progress, Recorder, collect
from toolkit.calibrate.observers import Observer
from toolkit.calibrate.readers import Reader, ReaderOptions, reader_for

if TYPE_CHECKING:
    from toolkit.feeds import Feed
    from toolkit.ir.model import Model


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """Feeds for a model, and the settings for collecting statistics on them."""

    feeds: Feeds
    cache: Path | None = None
    """The folder of cached statistics."""
    custom_ops: tuple[str, ...] = ()
    progress: Progress | None = None
    real: bool = True
    """Whether the feeds are a user's samples rather than synthetic inputs."""

    @property
    def notes(self) -> list[str]:
        """Remarks on inputs and samples that were ignored."""
        return self.feeds.notes if isinstance(self.feeds, Reader) else []

    @property
    def used(self) -> bool:
        """Whether the feeds, or cached statistics of them, have been used."""
        return not isinstance(self.feeds, Reader) or self.feeds.was_used

    def first(self, most: int) -> CalibrationData:
        """Return the same data, limited to the first `most` feeds."""
        return replace(self, feeds=_First(self.feeds, most))

    def collect(
        self, model: Model, observers: Mapping[str, Observer], recorder: Recorder | None = None
    ) -> Calibration:
        """Observe tensors of `model` on every feed; `recorder` takes the model's outputs."""
        return collect(
            model,
            self.feeds,
            observers,
            cache=self.cache,
            progress=self.progress,
            custom_ops=self.custom_ops,
            recorder=recorder,
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
    """The user's calibration settings: a source (see `toolkit.calibrate.readers`) and options."""

    source: object
    options: ReaderOptions | None = None
    cache: Path | None = None

    def open(
        self, model: Model, custom_ops: Sequence[str] = (), progress: Progress | None = None
    ) -> CalibrationData:
        """Return the data for this model; raises UsageError if the source cannot be read."""
        reader = reader_for(self.source, model, self.options)
        real = self.source != "random"
        return CalibrationData(reader, self.cache, tuple(custom_ops), progress, real)
