"""Evaluate and time candidate plans on copies of the model."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from passes.quantize.bias_correction.correct_bias import Corrections, is_correctable
from toolkit.accuracy.requirement import Score
from toolkit.errors import RuntimeRefused
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context, PassReport
from toolkit.quantization.plan import Entry, Plan
from toolkit.runtime.latency import Effort, Timing

if TYPE_CHECKING:
    from toolkit.accuracy.evaluator import Evaluator
    from toolkit.accuracy.quality_report import Quality
    from toolkit.feeds import Feed

Write: TypeAlias = "Callable[[Model, Plan, Context], None]"
"""A function that applies a plan to a model."""

FEW = 8
"""The number of samples that suffices to compare the noise of two plans."""
STOP_ABOVE, _FAILED = 1.5, 1.25
"""Multiples of the error budget above which an evaluation stops before its last sample: where the
used fraction of the budget matters, and where only the verdict does."""
_MOST_BYTES = 1 << 29
"""Models with more bytes of weights are not timed: each session copies its weights."""
_CLOSE = 0.7
"""Fraction of the error budget above which a plan is evaluated as written, too."""
_SCREENING_SECONDS = 1.0
"""CPU seconds of a screening, which takes at least `FEW` samples."""
_TIMED_FEEDS, _SLOW = 2, 0.02
"""The number of feeds to time with; a single one for models that take _SLOW seconds per run."""
_INTEGER_NOISE = 1e-12
"""The noise that stands for the whole error budget where outputs are integers."""


@dataclass(slots=True)
class Trials:
    """A model, which stays unchanged, and cached verdicts on candidate plans for it."""

    model: Model
    ctx: Context
    write: Write
    threads: int = 1
    corrections: Corrections = field(default_factory=Corrections)
    _feeds: list[Feed] | None = None
    _known: dict[Plan, Quality] = field(default_factory=dict["Plan", "Quality"])
    _verdicts: dict[tuple[str, Plan], bool] = field(
        default_factory=dict["tuple[str, Plan]", "bool"]
    )
    _timings: dict[frozenset[Entry], Timing] = field(
        default_factory=dict["frozenset[Entry]", "Timing"]
    )
    """Timings of plans, by the entries that they quantize."""
    _run_seconds: float = 0.0
    """CPU seconds per sample in the last evaluation."""

    def draft(self, plan: Plan) -> Model:
        """Return a copy of the model with the plan applied, without notes."""
        # Drafts are reference cycles, and automatic collection is off while a pass runs.
        gc.collect(1)
        copy = self.model.draft()
        self.write(copy, plan, self._silent())
        return copy

    def _silent(self) -> Context:
        return replace(self.ctx, report=PassReport())

    # -- accuracy

    def quality(self, plan: Plan) -> Quality | None:
        """Return the quality of the model as deployed; raises RuntimeRefused if it does not run.

        None without an evaluator, and for a plan that quantizes nothing.
        """
        if self.ctx.evaluator is None or not plan.quantized():
            return None
        if plan not in self._known:
            self._known[plan] = self._evaluated(self.draft(plan), STOP_ABOVE)
        return self._known[plan]

    def _evaluated(self, model: Model, stop_above: float, samples: int | None = None) -> Quality:
        assert self.ctx.evaluator is not None
        started = time.thread_time()  # unaffected by other processes
        found = self.ctx.evaluator.evaluate(
            model, samples=samples, deployed=True, stop_above=stop_above
        )
        self._run_seconds = (time.thread_time() - started) / max(found.samples, 1)
        return found

    def known(self, plan: Plan) -> Quality | None:
        """Return the quality of a plan that was evaluated before, else None."""
        return self._known.get(plan)

    def used(self, plan: Plan) -> float:
        """Return the fraction of the error budget that a plan uses; infinite if it does not run."""
        try:
            found = self.quality(plan)
        except RuntimeRefused:
            return math.inf
        return found.used if found is not None else 0.0

    def holds(self, plan: Plan, times: float = 1.0) -> bool:
        """Return whether a plan is within `times` the error budget; true without an evaluator."""
        try:
            found = self.quality(plan)
        except RuntimeRefused:
            return False
        return found is None or found.ok or found.used <= times

    def seems_to_hold(self, plan: Plan) -> bool:
        """Return whether the plan is within the budget on the samples of a screening."""
        evaluator = self.ctx.evaluator
        if plan in self._known or evaluator is None or not plan.quantized():
            return self.holds(plan)
        if isinstance(evaluator.requirement.metric, Score):  # needs all samples
            return self.holds(plan)

        def screen() -> bool:
            samples = self.affordable(_SCREENING_SECONDS)
            found = self._evaluated(self.draft(plan), _FAILED, samples)
            if found.ok and found.samples < samples:  # there are no other samples
                self._known[plan] = found
            return found.ok

        return self._verdict("screening", plan, screen)

    def affordable(self, seconds: float) -> int:
        """Return the number of samples that take so many CPU seconds; at least `FEW`."""
        return max(FEW, int(seconds / self._run_seconds)) if self._run_seconds else FEW

    def is_proven(self, plan: Plan) -> bool:
        """Return whether a plan within the budget is so as written, too, if it is close to it.

        A model as written takes many times as long as the runtime's optimized one.
        """
        evaluator, found = self.ctx.evaluator, self.quality(plan)
        if evaluator is None or found is None or not _is_close(found):
            return True
        return self._verdict(
            "as written",
            plan,
            lambda: evaluator.evaluate(self.draft(plan), stop_above=_FAILED).ok,
        )

    def holds_corrected(self, plan: Plan) -> bool:
        """Return whether the plan is within the budget with corrected biases of static layers."""
        evaluator = self.ctx.evaluator
        if evaluator is None or not is_correctable(plan, self.ctx):
            return False

        def correct() -> bool:
            draft = self.draft(plan)
            self.corrections.make(draft, self._silent())
            return keeps_budget(draft, evaluator)

        return self._verdict("corrected", plan, correct)

    def _verdict(self, question: str, plan: Plan, answer: Callable[[], bool]) -> bool:
        """Return the cached answer to a question; false if the runtime refuses the model."""
        key = question, plan
        if key not in self._verdicts:
            try:
                self._verdicts[key] = answer()
            except RuntimeRefused:
                self._verdicts[key] = False
        return self._verdicts[key]

    def noise(self, plan: Plan, samples: int = FEW) -> float:
        """Return the noise on a few samples; infinite if the model does not run.

        Integer outputs have no noise: the used fraction of the budget stands for it.
        """
        if self.ctx.evaluator is None:
            return 0.0
        found = self._known.get(plan)
        try:
            if found is None or not found.ok or found.samples > samples:
                found = self._evaluated(self.draft(plan), math.inf, samples)
        except RuntimeRefused:
            return math.inf
        return found.noise or _INTEGER_NOISE * found.used

    # -- speed

    @property
    def timed(self) -> bool:
        """Whether the settings ask for timing, and this machine can time the model."""
        wanted = self.ctx.settings.measure and self.ctx.target.has_costs
        return wanted and self.model.nbytes() <= _MOST_BYTES and bool(self.feeds())

    def times(self, plans: Mapping[str, Plan], effort: Effort) -> dict[str, Timing]:
        """Return timings relative to the float model, without plans that the runtime refuses.

        A plan that was timed before, with the rounds that `effort` needs, is not timed again.
        """
        keys = {name: frozenset(plan.quantized()) for name, plan in plans.items()}
        known = {key for key, seen in self._timings.items() if seen.rounds >= effort.least}
        models = {keys[n]: self.draft(p) for n, p in plans.items() if keys[n] not in known}
        if models:
            try:
                self._time(models, effort)
            except RuntimeRefused:
                self._time({key: m for key, m in models.items() if self._runs(m)}, effort)
        return {n: self._timings[key] for n, key in keys.items() if key in self._timings}

    def _time(self, models: Mapping[frozenset[Entry], Model], effort: Effort) -> None:
        feeds = self.feeds()[:1] if self._run_seconds > _SLOW else self.feeds()
        named = {str(at): model for at, model in enumerate(models.values())}
        found = self.ctx.target.latency(
            {"float": self.model, **named},
            feeds,
            self.threads,
            effort,
            self.ctx.settings.custom_ops,
        )
        self._timings.update((key, found[name]) for key, name in zip(models, named, strict=True))

    def _runs(self, model: Model) -> bool:
        try:
            session = self.ctx.target.open_session(model, True, self.ctx.settings.custom_ops)
            for feed in self.feeds():
                session.run(feed)
        except RuntimeRefused:
            return False
        return True

    def feeds(self) -> Sequence[Feed]:
        """Return the feeds to time with: the user's, or else synthetic ones."""
        if self._feeds is None:
            self._feeds = list(islice(self._all_feeds(), _TIMED_FEEDS))
        return self._feeds

    def _all_feeds(self) -> Iterable[Feed]:
        if self.ctx.calibration is not None:
            return self.ctx.calibration.feeds
        from toolkit.feeds import make_feeds

        try:
            return make_feeds(
                self.model, count=_TIMED_FEEDS, custom_ops=self.ctx.settings.custom_ops
            ).feeds
        except RuntimeRefused:
            return []


def _is_close(quality: Quality) -> bool:
    """Return whether there is a budget, and most of it is used."""
    return not quality.off and quality.used > _CLOSE


def keeps_budget(model: Model, evaluator: Evaluator) -> bool:
    """Return whether a model is within the budget as deployed, and if close, also as written."""
    try:
        found = evaluator.evaluate(model, deployed=True, stop_above=_FAILED)
        if not found.ok or not _is_close(found):
            return found.ok
        return evaluator.evaluate(model, stop_above=_FAILED).ok
    except RuntimeRefused:
        return False
