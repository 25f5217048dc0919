"""The evaluator: compare a model's outputs on samples with the float model's, within a budget.

The float model runs once. Its outputs (a subset of positions of large ones) are kept in a temporary
file, so that neither samples nor outputs occupy memory. An evaluation is one session and one run
per sample; a few samples suffice for screening.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from toolkit.accuracy.accumulators import GroupAccumulator, accumulators_of
from toolkit.accuracy.metrics import Array
from toolkit.accuracy.output_kinds import OutputKind, infer_kind, real_rows
from toolkit.accuracy.quality_report import Figure, OutputQuality, Quality
from toolkit.accuracy.recurrent_state import chains, state_pairs
from toolkit.accuracy.requirement import Requirement, Score
from toolkit.calibrate.statistics import is_float
from toolkit.errors import RuntimeRefused, UsageError
from toolkit.feeds import Feed
from toolkit.ir.model import Model
from toolkit.runtime.session import Session
from toolkit.storage.spool import Spool

if TYPE_CHECKING:
    from toolkit.calibrate.data import CalibrationData
    from toolkit.verification.validator import Validator

MAX_SAMPLES = 128
"""The default number of samples: enough to see a few percent of changed predictions."""

_MAX_SECONDS, _MIN_SAMPLES = 12.0, 16
"""The time limit of an evaluation in seconds, which slow models meet with fewer samples, but not
fewer than _MIN_SAMPLES."""

_KIND_SAMPLES, _KIND_SECONDS = 8, 1.0
"""The number of samples whose outputs determine their kinds, or fewer after this many seconds."""

_CHECK_FROM = 4
"""The number of samples after which a failing evaluation may stop, and again at each power of 2."""

_MAX_ELEMENTS = 1 << 19
"""The largest number of elements of an output compared per sample."""


class _Step(NamedTuple):
    """A feed and the float model's rows; a recurrent state is reset where a chain starts."""

    starts: bool
    ends: bool
    feed: Feed
    rows: dict[str, Array]


class Evaluator:
    """Samples and the float model's outputs on them, to compare other models with."""

    def __init__(
        self,
        float_model: Model,
        feeds: Iterable[Feed],
        requirement: Requirement | None = None,
        *,
        real: bool = True,
        most: int = MAX_SAMPLES,
        custom_ops: Sequence[str] = (),
        ignored: Iterable[str] = (),
    ) -> None:
        """Run `float_model` on at most `most` of the feeds, which are `real` or synthetic.

        `ignored` are nondeterministic outputs, which cannot be compared.
        """
        self.requirement = requirement or Requirement()
        self.real = real
        self.feeds = feeds
        self._custom_ops = tuple(custom_ops)
        skipped = set(ignored)
        self._names = [name for name in float_model.graph.outputs if name not in skipped]
        session = Session(float_model, custom_ops=self._custom_ops)
        first, outputs, seconds = self._first(session)
        self._most = _affordable(most, len(first), seconds)
        self._pairs = state_pairs(first[0], outputs[0]) if first else {}
        self.kinds = self._kinds(float_model, outputs)
        del first, outputs
        self._steps = Spool(self._float_steps(session))
        count = sum(1 for _ in self._steps)
        # without a recurrent state, the first samples should be a cross-section of the data
        self._order = range(count) if self._pairs or not real else _spread_out(count)
        self._score = self._float_score(session)

    # -- the float model

    def _first(self, session: Session) -> tuple[list[Feed], list[dict[str, Array]], float]:
        """Return the first feeds, the outputs on them, and the CPU seconds that they took."""
        first: list[Feed] = []
        outputs: list[dict[str, Array]] = []
        started = time.thread_time()  # unaffected by other processes
        for feed in islice(self.feeds, _KIND_SAMPLES):
            first.append(feed)
            outputs.append(self._run(session, feed))
            if len(first) >= _CHECK_FROM and time.thread_time() - started > _KIND_SECONDS:
                break
        return first, outputs, time.thread_time() - started

    def _kinds(
        self, float_model: Model, outputs: Sequence[dict[str, Array]]
    ) -> dict[str, OutputKind]:
        states = self._pairs.values()
        found: dict[str, OutputKind] = {}
        for name in self._names:
            values = [output[name] for output in outputs if output[name].size]
            if values:
                found[name] = infer_kind(float_model.graph, name, values, states)
        return found

    def _float_steps(self, session: Session) -> Iterator[_Step]:
        for chain in chains(self._selected(), bool(self._pairs)):
            state: Feed = {}
            for at, feed in enumerate(chain):
                outputs = self._run(session, {**feed, **state})
                state = self._carried(outputs)
                rows = {
                    name: _compared_rows(kind, outputs[name], feed)
                    for name, kind in self.kinds.items()
                }
                yield _Step(at == 0, at == len(chain) - 1, feed, rows)

    def _selected(self) -> Iterator[Feed]:
        """Select feeds across the data, which may be sorted; recurrent ones in their order."""
        count: Any = getattr(self.feeds, "count", None)
        total = count() if callable(count) and not isinstance(self.feeds, list) else None
        if self._pairs or not isinstance(total, int) or total <= self._most:
            return islice(self.feeds, self._most)
        wanted = {index * total // self._most for index in range(self._most)}
        return (feed for index, feed in enumerate(self.feeds) if index in wanted)

    def _float_score(self, session: Session) -> float | None:
        if not isinstance(self.requirement.metric, Score):
            return None
        score = self.requirement.metric(self._run(session, feed) for feed in self.feeds)
        if not np.isfinite(score):
            raise UsageError(
                f"metric {self.requirement.metric.name} is {score} for the float model"
            )
        return score

    def _carried(self, outputs: Mapping[str, Array]) -> Feed:
        """Return the state that is fed back as inputs."""
        return {name: outputs[output] for name, output in self._pairs.items()}

    def _run(self, session: Session, feed: Feed) -> dict[str, Array]:
        if not self._names:
            return {}  # without names a session would return all outputs
        try:
            outputs = session.run(feed, self._names)
        except RuntimeRefused as refusal:
            raise RuntimeRefused(f"on a sample: {refusal}") from refusal
        return {name: _array(value) for name, value in zip(self._names, outputs, strict=True)}

    # -- other models

    def evaluate(
        self,
        model: Model,
        *,
        samples: int | None = None,
        deployed: bool = False,
        stop_above: float = math.inf,
    ) -> Quality:
        """Measure the accuracy of `model`; raises RuntimeRefused if it does not run.

        A number of `samples` (rounded up to whole chains of steps) makes a quick screening, without
        the user's metric. `deployed` turns the runtime's optimizations on. The evaluation stops
        once the loss exceeds `stop_above` times the budget (twice that after the first few
        samples).
        """
        session = Session(model, deployed, self._custom_ops)
        accumulators = accumulators_of(self.kinds, self.requirement, self.real)
        count = 0
        state: Feed = {}
        for step in map(self._steps.load, self._order):
            outputs = self._run(session, step.feed if step.starts else {**step.feed, **state})
            state = self._carried(outputs)
            for name, kind in self.kinds.items():
                if kind.kind == "state" and not step.ends:
                    continue  # only the error after several steps counts
                rows = step.rows[name]
                actual = _compared_rows(kind, outputs[name], step.feed)
                for accumulator in accumulators[name]:
                    accumulator.add(rows, actual if _comparable(rows, actual) else None)
            count += 1
            if samples is not None and count >= samples and step.ends:
                break
            if math.isfinite(stop_above) and count >= _CHECK_FROM and count & (count - 1) == 0:
                so_far = self._quality(accumulators, count)
                if not so_far.ok and so_far.used > stop_above * (1 + _CHECK_FROM / count):
                    return so_far
        found = self._quality(accumulators, count)
        if isinstance(self.requirement.metric, Score) and samples is None:
            scored = self._scored(session, self.requirement.metric)
            return replace(found, outputs=(scored, *found.outputs))
        return found

    def _quality(
        self, accumulators: Mapping[str, Sequence[GroupAccumulator]], count: int
    ) -> Quality:
        outputs = [
            OutputQuality(name, self.kinds[name].kind, tuple(f for t in each for f in t.figures()))
            for name, each in accumulators.items()
        ]
        noise = max((t.noise.loss() for each in accumulators.values() for t in each), default=0.0)
        return Quality(tuple(outputs), count, self.real, self.requirement.off, noise)

    def _scored(self, session: Session, metric: Score) -> OutputQuality:
        assert self._score is not None
        score = metric(self._run(session, feed) for feed in self.feeds)
        lost = max(self._score - score, 0.0) if np.isfinite(score) else np.inf
        allowed = self.requirement.allowed_drop(self._score)
        figure = Figure(metric.name, "score", lost, allowed, scores=(score, self._score))
        return OutputQuality("", "score", (figure,))


def evaluator_for(
    float_model: Model,
    data: CalibrationData | None,
    validator: Validator | None,
    requirement: Requirement | None = None,
    *,
    given: int = 0,
    custom_ops: Sequence[str] = (),
    most: int = MAX_SAMPLES,
) -> Evaluator | None:
    """Return an evaluator on the calibration data, or else on the validator's feeds.

    The first `given` feeds of the validator are the user's; the others are synthetic, and are used
    only without those. None without any feed.
    """
    if data is not None:
        feeds, real = data.feeds, data.real
    else:
        found = validator.feeds.feeds if validator is not None else []
        feeds, real = found[:given] or found, bool(given)
        if not feeds:
            return None
    if requirement and isinstance(requirement.metric, Score) and not real:
        raise UsageError(
            f"metric {requirement.metric.name} needs real samples, not synthetic inputs: name them "
            "with --calib"
        )
    ignored = validator.unstable if validator is not None else frozenset[str]()
    try:
        return Evaluator(
            float_model,
            feeds,
            requirement,
            real=real,
            most=most,
            custom_ops=custom_ops,
            ignored=ignored,
        )
    except RuntimeRefused as refusal:
        raise UsageError(f"the model does not run {refusal}") from refusal


def _affordable(most: int, ran: int, seconds: float) -> int:
    """Return the number of samples that fit the time limit, given that `ran` took `seconds`."""
    fitting = int(_MAX_SECONDS * ran / seconds) if seconds > 0 else most
    return min(most, max(fitting, _MIN_SAMPLES))


def _spread_out(count: int) -> Sequence[int]:
    """Return an order whose every prefix is spread over the data, which may be sorted by class."""
    digits = max(count - 1, 0).bit_length()
    return sorted(range(count), key=lambda index: f"{index:0{digits}b}"[::-1])


def _array(value: Any) -> Array:
    """Return an output as an array; the values of sequences and maps are concatenated."""
    if isinstance(value, Mapping):
        return np.array(list(cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, list):
        parts = [_array(part) for part in cast("list[Any]", value)]
        if parts and all(part.shape == parts[0].shape for part in parts):
            return np.stack(parts)
        return np.concatenate([part.reshape(-1) for part in parts]) if parts else np.zeros(0)
    return np.zeros(0) if value is None else np.asarray(value)


def _comparable(reference: Array, actual: Array) -> bool:
    """Return whether shapes match and the output is finite wherever the reference is."""
    if reference.shape != actual.shape or is_float(reference) != is_float(actual):
        return False
    if not is_float(reference):
        return True
    known = np.isfinite(reference.astype(np.float64))
    return bool(np.isfinite(actual.astype(np.float64))[known].all())


def _compared_rows(kind: OutputKind, value: Array, feed: Feed) -> Array:
    """Return the rows of an output to compare: without padding, and a subset of many."""
    rows = kind.rows(value)
    real = real_rows(kind, value.shape, feed)
    if real is not None:
        rows = rows[real]
    most = max(1, _MAX_ELEMENTS // max(rows.shape[1], 1))
    if rows.shape[0] <= most:
        return rows
    # the same rows for every model: they depend on the number of rows alone
    picked = np.random.default_rng(rows.shape[0]).choice(rows.shape[0], most, replace=False)
    return rows[np.sort(picked)]
