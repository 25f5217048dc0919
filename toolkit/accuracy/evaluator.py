"""The judge: a model's answers on samples, against those of the floats, within a budget.

The float model is run once. Its answers are kept in a scratch folder, of large ones a choice of
positions, so that neither samples nor outputs take memory. A verdict is one session and one run a
sample; few samples will do for screening.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np

from toolkit.accuracy.accumulators import GroupTally, tallies_of
from toolkit.accuracy.metrics import Array
from toolkit.accuracy.output_kinds import OutputKind, infer_kind, real_rows
from toolkit.accuracy.quality_report import Figure, OutputQuality, Quality
from toolkit.accuracy.recurrent_state import chains, state_pairs
from toolkit.accuracy.requirement import Demand, Score
from toolkit.calibrate.readers.objects import Spool
from toolkit.calibrate.statistics import is_float
from toolkit.errors import RuntimeRefused, UsageError
from toolkit.feeds import Feed
from toolkit.ir.model import Model
from toolkit.runtime.session import Session

MOST_SAMPLES = 128
"""Samples that a judge looks at: enough for flips of a few percent to show."""

_SECONDS, _LEAST_SAMPLES = 12.0, 16
"""A verdict should take no longer than that: of a slow model fewer samples are taken, down to so
many."""

_LOOKED_AT, _LOOKED_AT_FOR = 8, 1.0
"""Samples whose whole outputs tell the kinds, or fewer when the first ones take so many seconds."""

_AFTER = 4
"""Samples that are looked at in any case; a verdict may be clear then, or after twice as many."""

_MOST_ELEMENTS = 1 << 19
"""Of an output on one sample; of a larger one some positions are taken."""


class _Step(NamedTuple):
    """A feed with the float model's rows; a chain of steps starts here, or the state goes on."""

    starts: bool
    ends: bool
    feed: Feed
    rows: dict[str, Array]


class Judge:
    """Holds samples and the float model's answers to them, and compares other models."""

    def __init__(
        self,
        floats: Model,
        feeds: Iterable[Feed],
        demand: Demand | None = None,
        *,
        real: bool = True,
        most: int = MOST_SAMPLES,
        custom_ops: Sequence[str] = (),
        ignored: Iterable[str] = (),
    ) -> None:
        """Run `floats` on at most `most` of the feeds, which are `real` or made up.

        `ignored` are outputs that cannot be compared, as they differ from run to run.
        """
        self.demand = demand or Demand()
        self.real = real
        self._feeds = feeds
        self._custom_ops = tuple(custom_ops)
        skipped = set(ignored)
        self._names = [name for name in floats.graph.outputs if name not in skipped]
        session = Session(floats, custom_ops=self._custom_ops)
        first, answers, seconds = self._first(session)
        self._most = _affordable(most, len(first), seconds)
        self._pairs = state_pairs(first[0], answers[0]) if first else {}
        self.kinds = self._kinds(floats, answers)
        del first, answers
        steps = self._float_steps(session)
        # A state goes from step to step; else the first few samples are to be of all kinds.
        ordered = _as_they_come if self._pairs else _spread_out
        self._steps: Iterable[_Step] = _Scratch(steps, ordered) if real else list(steps)
        self._score = self._float_score(session)

    # -- the floats

    def _first(self, session: Session) -> tuple[list[Feed], list[dict[str, Array]], float]:
        """The first feeds with the answers to them, and the seconds that these took."""
        first: list[Feed] = []
        answers: list[dict[str, Array]] = []
        started = time.thread_time()  # which other programs do not add to
        for feed in islice(self._feeds, _LOOKED_AT):
            first.append(feed)
            answers.append(self._run(session, feed))
            if len(first) >= _AFTER and time.thread_time() - started > _LOOKED_AT_FOR:
                break
        return first, answers, time.thread_time() - started

    def _kinds(self, floats: Model, answers: Sequence[dict[str, Array]]) -> dict[str, OutputKind]:
        states = self._pairs.values()
        found: dict[str, OutputKind] = {}
        for name in self._names:
            values = [answer[name] for answer in answers if answer[name].size]
            if values:
                found[name] = infer_kind(floats.graph, name, values, states)
        return found

    def _float_steps(self, session: Session) -> Iterator[_Step]:
        for chain in chains(self._selected(), bool(self._pairs)):
            state: Feed = {}
            for at, feed in enumerate(chain):
                answer = self._run(session, {**feed, **state})
                state = self._carried(answer)
                rows = {
                    name: _chosen(kind, answer[name], feed) for name, kind in self.kinds.items()
                }
                yield _Step(at == 0, at == len(chain) - 1, feed, rows)

    def _selected(self) -> Iterator[Feed]:
        """Feeds from all over the data, which may be sorted; the first ones where order counts."""
        count: Any = getattr(self._feeds, "count", None)
        total = count() if callable(count) and not isinstance(self._feeds, list) else None
        if self._pairs or not isinstance(total, int) or total <= self._most:
            return islice(self._feeds, self._most)
        wanted = {index * total // self._most for index in range(self._most)}
        return (feed for index, feed in enumerate(self._feeds) if index in wanted)

    def _float_score(self, session: Session) -> float | None:
        if not isinstance(self.demand.metric, Score):
            return None
        score = self.demand.metric(self._run(session, feed) for feed in self._feeds)
        if not np.isfinite(score):
            raise UsageError(f"metric {self.demand.metric.name} is {score} for the float model")
        return score

    def _carried(self, answer: Mapping[str, Array]) -> Feed:
        return {given: answer[made] for given, made in self._pairs.items()}

    def _run(self, session: Session, feed: Feed) -> dict[str, Array]:
        if not self._names:
            return {}  # asked for nothing, a session gives everything
        try:
            outputs = session.run(feed, self._names)
        except RuntimeRefused as refusal:
            raise RuntimeRefused(f"on a sample: {refusal}") from refusal
        return {name: _array(value) for name, value in zip(self._names, outputs, strict=True)}

    # -- others

    def verdict(
        self,
        model: Model,
        *,
        samples: int | None = None,
        deployed: bool = False,
        hopeless: float = math.inf,
    ) -> Quality:
        """How `model` answers, within the budget or not; RuntimeRefused when it does not run.

        On some `samples` only, or as many as whole chains of steps have, it is for screening,
        without a user's metric. `deployed` lets the runtime optimize the model first. Where so many
        times the budget is used as `hopeless` says, and on the first few samples twice that, the
        rest of them is not looked at.
        """
        session = Session(model, deployed, self._custom_ops)
        tallies = tallies_of(self.kinds, self.demand, self.real)
        count = 0
        state: Feed = {}
        for step in self._steps:
            answer = self._run(session, step.feed if step.starts else {**step.feed, **state})
            state = self._carried(answer)
            for name, kind in self.kinds.items():
                if kind.kind == "state" and not step.ends:
                    continue  # what counts is the error after several steps
                rows = step.rows[name]
                given = _chosen(kind, answer[name], step.feed)
                for tally in tallies[name]:
                    tally.add(rows, given if _comparable(rows, given) else None)
            count += 1
            if samples is not None and count >= samples and step.ends:
                break
            if math.isfinite(hopeless) and count >= _AFTER and count & (count - 1) == 0:
                so_far = self._quality(tallies, count)
                if not so_far.ok and so_far.used > hopeless * (1 + _AFTER / count):
                    return so_far
        found = self._quality(tallies, count)
        if isinstance(self.demand.metric, Score) and samples is None:
            scored = self._scored(session, self.demand.metric)
            return replace(found, outputs=(scored, *found.outputs))
        return found

    def _quality(self, tallies: Mapping[str, Sequence[GroupTally]], count: int) -> Quality:
        judged = [
            OutputQuality(name, self.kinds[name].kind, tuple(f for t in each for f in t.figures()))
            for name, each in tallies.items()
        ]
        noise = max((t.noise.loss() for each in tallies.values() for t in each), default=0.0)
        return Quality(tuple(judged), count, self.real, self.demand.off, noise)

    def _scored(self, session: Session, metric: Score) -> OutputQuality:
        assert self._score is not None
        score = metric(self._run(session, feed) for feed in self._feeds)
        lost = max(self._score - score, 0.0) if np.isfinite(score) else np.inf
        allowed = self.demand.allowed_score(self._score)
        figure = Figure(metric.name, "score", lost, allowed, scores=(score, self._score))
        return OutputQuality("", "score", (figure,))


def _affordable(most: int, ran: int, seconds: float) -> int:
    """How many samples to take, when so many took so long."""
    fitting = int(_SECONDS * ran / seconds) if seconds > 0 else most
    return min(most, max(fitting, _LEAST_SAMPLES))


class _Scratch:
    """Steps in a scratch folder, read one at a time, in this order."""

    def __init__(self, steps: Iterator[_Step], ordered: Callable[[int], Iterable[int]]) -> None:
        self._spool = Spool(map(_packed, steps))
        count = sum(1 for _ in self._spool)
        self._order = list(ordered(count))

    def __iter__(self) -> Iterator[_Step]:
        return map(_unpacked, map(self._spool.load, self._order))


def _as_they_come(count: int) -> Iterable[int]:
    return range(count)


def _spread_out(count: int) -> Iterable[int]:
    """An order of which each beginning is from all over: data may be sorted by what they show."""
    digits = max(count - 1, 0).bit_length()
    return sorted(range(count), key=lambda index: f"{index:0{digits}b}"[::-1])


def _packed(step: _Step) -> dict[str, Any]:
    feed = {f"feed {name}": value for name, value in step.feed.items()}
    rows = {f"rows {name}": value for name, value in step.rows.items()}
    return {"marks": np.array([step.starts, step.ends]), **feed, **rows}


def _unpacked(arrays: Mapping[str, Any]) -> _Step:
    starts, ends = map(bool, arrays["marks"])
    feed = {n.removeprefix("feed "): v for n, v in arrays.items() if n.startswith("feed ")}
    rows = {n.removeprefix("rows "): v for n, v in arrays.items() if n.startswith("rows ")}
    return _Step(starts, ends, feed, rows)


def _array(value: Any) -> Array:
    """An output as an array: of sequences and maps, the values one after the other."""
    if isinstance(value, Mapping):
        return np.array(list(cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, list):
        parts = [_array(part) for part in cast("list[Any]", value)]
        if parts and all(part.shape == parts[0].shape for part in parts):
            return np.stack(parts)
        return np.concatenate([part.reshape(-1) for part in parts]) if parts else np.zeros(0)
    return np.zeros(0) if value is None else np.asarray(value)


def _comparable(reference: Array, actual: Array) -> bool:
    """Whether the shapes are the same, and numbers are where numbers were."""
    if reference.shape != actual.shape or is_float(reference) != is_float(actual):
        return False
    if not is_float(reference):
        return True
    known = np.isfinite(reference.astype(np.float64))
    return bool(np.isfinite(actual.astype(np.float64))[known].all())


def _chosen(kind: OutputKind, value: Array, feed: Feed) -> Array:
    """The rows of an output that are compared: no padding, and not too many."""
    rows = kind.rows(value)
    real = real_rows(kind, value.shape, feed)
    if real is not None:
        rows = rows[real]
    most = max(1, _MOST_ELEMENTS // max(rows.shape[1], 1))
    if rows.shape[0] <= most:
        return rows
    # The same ones for every model: they depend on the number of rows alone.
    picked = np.random.default_rng(rows.shape[0]).choice(rows.shape[0], most, replace=False)
    return rows[np.sort(picked)]
