"""Paired, interleaved latency: the relative time of several models, with confidence intervals.

Contenders take turns, A B C A B C, in bursts of a few milliseconds, so that other load affects all
of them alike. The fastest run of a burst counts, since other load only adds time. Each round gives
one ratio to the first contender; the result is the median ratio, and its order statistics bound
the true median with a confidence of 95 %:

    P(r_(k) <= median <= r_(n+1-k)) >= 0.95    with k = n/2 - 0.98 sqrt(n)

On one thread, the thread's own time is measured, which excludes other programs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.feeds import Feed
    from toolkit.ir.model import Model

Run = Callable[[], object]
Clock = Callable[[], float]

_BURST = 0.003
"""Seconds of one contender's burst."""
_MOST_REPEATS = 500
"""Runs per burst."""
_CONFIDENCE = 0.98
"""Half of 1.96, the two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The number of rounds, from `least` to `most`; none starts after `seconds`.

    The measurement stops early when every confidence interval excludes the ratio `against`.
    """

    seconds: float = 2.0
    least: int = 7
    most: int = 200
    against: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.least <= self.most and self.seconds > 0):
            raise UsageError(f"cannot measure {self.least} to {self.most} rounds, {self.seconds} s")


USUAL = Effort()
"""The default effort."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of one contender, in seconds and relative to the first one (below 1: faster)."""

    seconds: float
    ratio: float
    low: float
    high: float
    """The 95 % confidence interval of the ratio."""
    rounds: int

    def __str__(self) -> str:
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}] of the time"


def paired(
    runs: Mapping[str, Run], effort: Effort = USUAL, clock: Clock = time.thread_time
) -> dict[str, Timing]:
    """Time the contenders in turns, each relative to the first."""
    if not runs:
        raise UsageError("there is nothing to measure")
    turns = {name: _Turns(run, clock) for name, run in runs.items()}
    first = next(iter(turns.values()))
    end = time.monotonic() + effort.seconds
    rounds = 0
    while rounds < effort.least or (rounds < effort.most and time.monotonic() < end):
        for turn in turns.values():
            turn.take()
        rounds += 1
        if rounds >= effort.least and _decided(turns.values(), first, effort.against):
            break
    return {name: turn.against(first) for name, turn in turns.items()}


def latency(
    models: Mapping[str, Model],
    feeds: Sequence[Feed],
    threads: int = 1,
    effort: Effort = USUAL,
    custom_ops: Sequence[str] = (),
) -> dict[str, Timing]:
    """Time models with the runtime's default options on all feeds.

    A model is not fed the inputs that are frozen in it.
    """
    from toolkit.feeds.user_samples import without_frozen
    from toolkit.runtime.session import Deployed

    sessions = {name: Deployed(model, threads, custom_ops) for name, model in models.items()}
    runs = {
        name: _runner(session.run, [without_frozen(feed, models[name].frozen) for feed in feeds])
        for name, session in sessions.items()
    }
    return paired(runs, effort, time.thread_time if threads == 1 else time.perf_counter)


def _runner(run: Callable[[Feed], object], feeds: Sequence[Feed]) -> Run:
    def all_feeds() -> None:
        for feed in feeds:
            run(feed)

    return all_feeds


@dataclass(slots=True)
class _Turns:
    """One contender and the seconds of its bursts so far."""

    run: Run
    clock: Clock
    seconds: list[float] = field(default_factory=list[float])
    _repeats: int = 0

    def take(self) -> None:
        if not self._repeats:
            self.run()  # the first run allocates
            once = self._once()
            self._repeats = max(1, min(_MOST_REPEATS, math.ceil(_BURST / max(once, 1e-9))))
            if self._repeats == 1:
                self.seconds.append(once)
                return
        self.seconds.append(min(self._once() for _ in range(self._repeats)))

    def _once(self) -> float:
        started = self.clock()
        self.run()
        return self.clock() - started

    def against(self, first: _Turns) -> Timing:
        pairs = zip(self.seconds, first.seconds, strict=True)
        ratios = sorted(own / max(other, 1e-12) for own, other in pairs)
        low, high = _interval(ratios)
        return Timing(median(self.seconds), median(ratios), low, high, len(ratios))


def _interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, by the normal approximation."""
    count = len(ordered)
    below = max(0, math.floor(count / 2 - _CONFIDENCE * math.sqrt(count)))
    return ordered[below], ordered[count - 1 - below]


def _decided(turns: Iterable[_Turns], first: _Turns, against: float | None) -> bool:
    if against is None:
        return False
    found = [turn.against(first) for turn in turns if turn is not first]
    return bool(found) and all(t.high < against or t.low > against for t in found)
