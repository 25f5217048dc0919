"""Input samples: made up inside each input's domain, at several sizes, or the user's own.

`make_feeds` looks at how the graph uses each input, draws values and sizes for it, and keeps what
the model takes: the model itself is the judge of what it can be fed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.errors import RuntimeRefused, UsageError
from toolkit.feeds.generate import Run, Search, Trial
from toolkit.feeds.user_samples import Feed, Sample, read_sample
from toolkit.ir.model import Model

__all__ = ["Feed", "Feeds", "Sample", "Search", "find_feeds", "make_feeds"]


@dataclass(frozen=True, slots=True)
class Feeds:
    """The feeds that a model took, with what it answered."""

    trials: list[Trial] = field(default_factory=list[Trial])
    refusal: str = ""
    """Why there is no feed, when there is none."""

    def __len__(self) -> int:
        return len(self.trials)

    @property
    def feeds(self) -> list[Feed]:
        return [trial.feed for trial in self.trials]

    @property
    def sizes(self) -> dict[str, list[int]]:
        """The sizes that each dynamic dimension was given, in ascending order."""
        seen: dict[str, set[int]] = {}
        for trial in self.trials:
            for symbol, size in trial.sizes.items():
                seen.setdefault(symbol, set()).add(size)
        return {symbol: sorted(found) for symbol, found in seen.items()}


def make_feeds(
    model: Model,
    samples: Sequence[Sample] = (),
    seed: int = 0,
    count: int | None = None,
    *,
    custom_ops: Sequence[str] = (),
) -> Feeds:
    """Feeds for `model`: its samples, then `count` made-up ones (by default two or three).

    Raises RuntimeRefused when the model cannot be loaded, and UsageError for a sample that does
    not fit or that the model refuses.
    """
    from toolkit.runtime.session import Session

    search = Search(model, seed)
    return find_feeds(model, search, Session(model, custom_ops=custom_ops).run, samples, count)


def find_feeds(
    model: Model, search: Search, run: Run, samples: Sequence[Sample], count: int | None
) -> Feeds:
    """The same with a search that was made before; `run` is the model as a function."""
    trials = [_try_sample(model, sample, run) for sample in samples]
    trials += search.find(run, count)
    return Feeds(trials, search.refusal if not trials else "")


def _try_sample(model: Model, sample: Sample, run: Run) -> Trial:
    feed = read_sample(sample, model.graph)
    try:
        return Trial(feed, run(feed))
    except RuntimeRefused as refusal:
        what = "the sample" if isinstance(sample, Mapping) else f"sample '{os.fspath(sample)}'"
        raise UsageError(f"the model refuses {what}: {refusal}") from refusal
