"""Paired latency, on a clock that the tests turn by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pytest

from tests.checks import model
from toolkit.errors import UsageError
from toolkit.runtime.latency import Effort, Timing, latency, paired


@dataclass
class Clock:
    """Time that passes only when somebody runs."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, *seconds: float) -> Callable[[], None]:
        """A contender whose runs take these seconds, over and over."""
        turns: Iterator[float] = cycle(seconds)

        def run() -> None:
            self.now += next(turns)

        return run


def test_the_ratio_is_to_the_first() -> None:
    clock = Clock()
    runs = {"a": clock.taking(0.010), "b": clock.taking(0.005), "c": clock.taking(0.020)}
    found = paired(runs, Effort(least=5, most=5), clock)
    assert [round(t.ratio, 6) for t in found.values()] == [1, 0.5, 2]
    assert found["b"].seconds == pytest.approx(0.005)
    assert found["b"].high < 1
    assert found["a"].low <= 1 <= found["a"].high


def test_a_long_run_is_not_repeated() -> None:
    """One that allocates, and one a round; a short one is repeated to fill its turn."""
    clock, runs = Clock(), [0, 0]

    def run(which: int, seconds: float) -> Callable[[], None]:
        def count() -> None:
            runs[which] += 1
            clock.now += seconds

        return count

    paired({"long": run(0, 0.1), "short": run(1, 0.001)}, Effort(least=3, most=3), clock)
    assert runs == [4, 2 + 3 * 3]


def test_contenders_take_turns() -> None:
    order: list[str] = []
    clock = Clock()

    def run(name: str) -> Callable[[], None]:
        def log() -> None:
            order.append(name)
            clock.now += 1

        return log

    paired({"a": run("a"), "b": run("b")}, Effort(least=3, most=3), clock)
    in_rounds = [name for i, name in enumerate(order) if not i or order[i - 1] != name]
    assert in_rounds == ["a", "b"] * 3


def test_what_disturbs_a_round_or_a_run_does_not_count() -> None:
    clock = Clock()
    # of the first contender, every third turn is slowed down; of the second, every second run
    first = clock.taking(0.01, 0.01, 0.01, 0.01, 0.07)
    second = clock.taking(0.001, 0.004)
    found = paired({"a": first, "b": second}, Effort(least=15, most=15), clock)
    assert found["b"].ratio == pytest.approx(0.1)


def test_a_change_of_pace_meets_both() -> None:
    clock = Clock()
    pace = [1.0]

    def run(seconds: float) -> Callable[[], None]:
        def go() -> None:
            clock.now += seconds * pace[0]
            pace[0] *= 1.01

        return go

    found = paired({"a": run(0.01), "b": run(0.005)}, Effort(least=40, most=40), clock)
    assert found["b"].ratio == pytest.approx(0.5, rel=0.05)


def test_it_ends_when_it_is_decided() -> None:
    clock = Clock()
    runs = {"a": clock.taking(0.010), "b": clock.taking(0.005)}
    assert paired(runs, Effort(least=7, most=50, against=1.0), clock)["b"].rounds == 7
    assert paired(runs, Effort(least=7, most=9, against=0.5), clock)["b"].rounds == 9
    assert paired(runs, Effort(least=7, most=11), clock)["b"].rounds == 11


def test_the_uncertainty_is_that_of_the_median() -> None:
    clock = Clock()
    noise = np.random.default_rng(0).uniform(0.9, 1.1, 400).tolist()
    runs = {"a": clock.taking(1.0), "b": clock.taking(*noise)}
    few = paired(runs, Effort(least=8, most=8), clock)["b"]
    many = paired(runs, Effort(least=150, most=150), clock)["b"]
    assert many.low <= many.ratio <= many.high
    assert many.high - many.low < few.high - few.low
    assert few.low <= 1 <= few.high


def test_it_says_what_it_measured() -> None:
    assert str(Timing(0.1, 0.5, 0.45, 0.61, 9)) == "0.50 [0.45, 0.61] of the time"


def test_nothing_to_measure() -> None:
    with pytest.raises(UsageError, match="nothing to measure"):
        paired({})
    with pytest.raises(UsageError, match="cannot measure"):
        Effort(least=0)


@pytest.mark.parametrize("threads", [1, 2])
def test_models(threads: int) -> None:
    subject = model("g (float[N] x) => (float[N] y) { y = Exp (x) }")
    feeds = [{"x": np.ones(size, np.float32)} for size in (3, 5)]
    found = latency({"a": subject, "b": subject}, feeds, threads, Effort(least=2, most=2))
    assert found.keys() == {"a", "b"}
    assert all(timing.rounds == 2 for timing in found.values())
