"""`--time`: the speedup of a model over its original, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.arguments import NO_VALUE
from toolkit.report.text import count

if TYPE_CHECKING:
    from toolkit.ir.model import Model

TimeBoth = Annotated[
    bool,
    typer.Option(
        "--time",
        metavar=NO_VALUE,
        help="Time both models in turn on one thread of this machine, and show the speedup.",
    ),
]


@dataclass(frozen=True, slots=True)
class Speed:
    """The speedup of a model over its original, with its 95 % confidence interval."""

    times: float
    low: float
    high: float
    seconds: tuple[float, float]
    """Seconds for a run on one feed: of the original, and of the model."""
    feeds: int
    sizes: str

    def __str__(self) -> str:
        first, second = (f"{1000 * seconds:.3g} ms" for seconds in self.seconds)
        on = count(self.feeds, "feed")
        where = f"{on} ({self.sizes})" if self.sizes else on
        times = f"{self.times:.2f}x ({self.low:.2f}x to {self.high:.2f}x)"
        return f"{times}, {first} -> {second} a run, one thread, on {where}"

    def to_json(self) -> dict[str, Any]:
        return {
            "times": round(self.times, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "seconds": {"before": self.seconds[0], "after": self.seconds[1]},
            "feeds": self.feeds,
        }


@dataclass(frozen=True, slots=True)
class Untimed:
    """The reason why two models could not be timed."""

    reason: str

    def __str__(self) -> str:
        return f"not timed: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        return {"reason": self.reason}


def speed_of(
    model: Model,
    original: Model,
    samples: Sequence[Path] | None,
    seed: int,
    libraries: Sequence[str],
    shown: bool,
    specialized: Model | None = None,
) -> Speed | Untimed:
    """Time a model and its original in turn, on the samples or else on synthetic inputs.

    The inputs are those of the `specialized` original, if the model is optimized from that.
    """
    from toolkit.errors import RuntimeRefused
    from toolkit.report.console import steps_bar
    from toolkit.runtime.latency import latency
    from toolkit.verification.reference import Reference

    try:
        with steps_bar(shown, "timing both models"):
            fed = specialized or original
            made = Reference.of(fed, samples or (), seed, libraries, original).feeds
            feeds = made.feeds[: len(samples or ())] or made.feeds
            feeds = [{**feed, **fed.frozen} for feed in feeds]
            if not feeds:
                return Untimed(made.refusal)
            found = latency({"original": original, "model": model}, feeds, custom_ops=libraries)
    except RuntimeRefused as refusal:
        return Untimed(str(refusal))
    timing = found["model"]
    if timing.low <= 0:
        return Untimed("a run is too short for this system's clock")
    sizes = {} if samples else made.sizes
    return Speed(
        times=1 / timing.ratio,
        low=1 / timing.high,
        high=1 / timing.low,
        seconds=(found["original"].seconds / len(feeds), timing.seconds / len(feeds)),
        feeds=len(feeds),
        sizes="; ".join(f"{name} {', '.join(map(str, of))}" for name, of in sizes.items()),
    )
