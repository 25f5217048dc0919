"""Feeds: synthetic inputs from each input's domain, at several sizes, and the user's samples.

`make_feeds` infers a domain from the uses of each input, draws values and sizes from it, and keeps
the feeds on which the model runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.errors import RuntimeRefused, UsageError
from toolkit.feeds.generate import FeedGenerator, RecordedRun, RunModel
from toolkit.feeds.user_samples import Feed, Sample, read_sample
from toolkit.ir.model import Model

__all__ = ["Feed", "FeedGenerator", "FeedSet", "Sample", "find_feeds", "make_feeds"]


@dataclass(frozen=True, slots=True)
class FeedSet:
    """Feeds that a model accepts, with its outputs."""

    runs: list[RecordedRun] = field(default_factory=list[RecordedRun])
    refusal: str = ""
    """Why the set is empty."""

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def feeds(self) -> list[Feed]:
        return [run.feed for run in self.runs]

    @property
    def sizes(self) -> dict[str, list[int]]:
        """The sizes of each dynamic dimension over all feeds, in ascending order."""
        return distinct_sizes(run.sizes for run in self.runs)


def distinct_sizes(runs: Iterable[Mapping[str, int]]) -> dict[str, list[int]]:
    """Return the sizes of each dimension over several runs, in ascending order."""
    found: dict[str, set[int]] = {}
    for sizes in runs:
        for name, size in sizes.items():
            found.setdefault(name, set()).add(size)
    return {name: sorted(sizes) for name, sizes in found.items()}


def make_feeds(
    model: Model,
    samples: Sequence[Sample] = (),
    seed: int = 0,
    count: int | None = None,
    *,
    custom_ops: Sequence[str] = (),
) -> FeedSet:
    """Return the samples and `count` synthetic feeds for `model` (by default two or three).

    Raises RuntimeRefused if the model cannot be loaded, and UsageError for a sample that does not
    fit the model or on which it fails.
    """
    from toolkit.runtime.session import Session

    generator = FeedGenerator(model, seed)
    return find_feeds(model, generator, Session(model, custom_ops=custom_ops).run, samples, count)


def find_feeds(
    model: Model,
    generator: FeedGenerator,
    run: RunModel,
    samples: Sequence[Sample],
    count: int | None = None,
) -> FeedSet:
    """Return the samples and `count` feeds of a generator; `run` is the model as a function."""
    runs = [_try_sample(model, sample, run) for sample in samples]
    runs += generator.find(run, count)
    return FeedSet(runs, generator.refusal if not runs else "")


def _try_sample(model: Model, sample: Sample, run: RunModel) -> RecordedRun:
    feed = read_sample(sample, model.graph)
    try:
        return RecordedRun(feed, run(feed))
    except RuntimeRefused as refusal:
        what = "the sample" if isinstance(sample, Mapping) else f"sample '{os.fspath(sample)}'"
        raise UsageError(f"the model fails on {what}: {refusal}") from refusal
