"""The evaluator: compare a model's outputs on samples with the float model's, within a budget.

The float model runs once, before the first evaluation, unless a calibration sweep has recorded its
outputs. They (a subset of positions of large ones) are kept in a temporary file, so that neither
samples nor outputs occupy memory. An evaluation is one session and one run per sample; a few
samples suffice for screening.
"""

from __future__ import annotations

import math
import time
from collections import deque
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
from toolkit.verification.compare import compare

if TYPE_CHECKING:
    from toolkit.calibrate.data import CalibrationData
    from toolkit.verification.validator import Validator

MAX_SAMPLES = 128
"""The default number of samples: enough to see a few percent of changed predictions."""

_MAX_SECONDS, _MIN_SAMPLES = 12.0, 16
"""The time limit of an evaluation in seconds, which slow models meet with fewer samples, but not
fewer than _MIN_SAMPLES."""

_KIND_SAMPLES, _KIND_SECONDS = 8, 0.3
"""The number of samples whose outputs determine their kinds, or fewer after this many seconds."""

_SAME = 1e-4
"""The largest difference, relative to an output's scale, of outputs of the same float model."""

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
        """Compare on at most `most` of the feeds, which are `real` or synthetic.

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
        self._first_step = self._step(first[0], outputs[0]) if first else None
        del first, outputs
        self._steps = Spool(self._float_steps(session))
        self._score = self._float_score(session)
        self._deployed: tuple[int, Quality] | None = None
        """The last complete evaluation of a deployed model, by the version of its journal."""

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
                yield self._step(feed, outputs, at == 0, at == len(chain) - 1)

    def _step(
        self, feed: Feed, outputs: Mapping[str, Array], starts: bool = True, ends: bool = True
    ) -> _Step:
        kinds = self.kinds.items()
        rows = {name: _compared_rows(kind, outputs[name], feed) for name, kind in kinds}
        return _Step(starts, ends, feed, rows)

    def _selection(self) -> Sequence[int]:
        """Select feeds across the data, which may be sorted; recurrent ones in their order."""
        count: Any = getattr(self.feeds, "count", None)
        total = count() if callable(count) and not isinstance(self.feeds, list) else None
        if self._pairs or not isinstance(total, int) or total <= self._most:
            return range(self._most)
        return [index * total // self._most for index in range(self._most)]

    def _selected(self) -> Iterator[Feed]:
        chosen = self._selection()
        feeds = islice(self.feeds, chosen[-1] + 1)
        return (feed for index, feed in enumerate(feeds) if index in chosen)

    @property
    def awaited(self) -> Sequence[str]:
        """The outputs of the float model that `record` takes; empty if they are known."""
        pending = self._steps.count() is None and not self._pairs
        return list(self.kinds) if pending else []

    def record(self, runs: Iterable[tuple[Feed, Mapping[str, Any]]]) -> None:
        """Take the float model's outputs on all feeds, unless the first ones show another model."""
        chosen = set(self._selection())
        steps = Spool(
            self._step(feed, {name: _array(value) for name, value in outputs.items()})
            for index, (feed, outputs) in enumerate(runs)
            if index in chosen
        )
        first = next(iter(steps), None)
        if first is not None and self._first_step is not None:
            pairs = ((rows, first.rows[name]) for name, rows in self._first_step.rows.items())
            if all(compare(*pair).relative <= _SAME for pair in pairs):
                deque(steps, maxlen=0)
                self._steps = steps

    def _ordered(self) -> Iterator[_Step]:
        """Yield all steps; without a recurrent state, the first ones are a cross-section."""
        try:
            if self._steps.count() is None:
                deque(self._steps, maxlen=0)
        except RuntimeRefused as refusal:
            raise UsageError(f"the model does not run {refusal}") from refusal
        count = self._steps.count() or 0
        in_order = self._pairs or not self.real
        return map(self._steps.load, range(count) if in_order else _spread_out(count))

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
        stop_below: float = 0.0,
    ) -> Quality:
        """Measure the accuracy of `model`; raises RuntimeRefused if it does not run.

        A number of `samples` (rounded up to whole chains of steps) makes a quick screening, without
        the user's metric. `deployed` turns the runtime's optimizations on. The evaluation stops
        once the loss exceeds `stop_above` times the budget (twice that after the first few
        samples), or is at most `stop_below` times the budget after a screening's samples.
        """
        version = model.journal.version
        if deployed and samples is None and self._deployed and self._deployed[0] == version:
            return self._deployed[1]
        session = Session(model, deployed, self._custom_ops)
        accumulators = accumulators_of(self.kinds, self.requirement, self.real)
        if isinstance(self.requirement.metric, Score):
            stop_below = 0.0  # the user's metric takes all samples
        may_stop = stop_below > 0 or math.isfinite(stop_above)
        count = 0
        state: Feed = {}
        for step in self._ordered():
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
            if may_stop and count >= _CHECK_FROM and count & (count - 1) == 0:
                so_far = self._quality(accumulators, count)
                if not so_far.ok and so_far.used > stop_above * (1 + _CHECK_FROM / count):
                    return so_far
                if step.ends and count >= _MIN_SAMPLES and so_far.used <= stop_below:
                    return so_far
        found = self._quality(accumulators, count)
        if isinstance(self.requirement.metric, Score) and samples is None:
            scored = self._scored(session, self.requirement.metric)
            found = replace(found, outputs=(scored, *found.outputs))
        if deployed and samples is None:
            self._deployed = version, found
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
