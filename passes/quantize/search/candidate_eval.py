"""Plans tried on drafts of a model: what they are worth, and how fast they are."""

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
from toolkit.quantization.plan import Plan
from toolkit.runtime.latency import Effort, Timing

if TYPE_CHECKING:
    from toolkit.accuracy.evaluator import Evaluator
    from toolkit.accuracy.quality_report import Quality
    from toolkit.feeds import Feed

Write: TypeAlias = "Callable[[Model, Plan, Context], None]"
"""How a plan is applied to a model."""

MOST_BYTES = 1 << 29
"""Models of more weights are not timed: the runtime copies the weights of each it times."""

FEW = 8
"""Samples that tell two plans apart."""
_CLOSE = 0.7
"""The share of the budget from which on it is close."""
STOP_ABOVE, _FAILED = 3.0, 1.5
"""How many times the budget a plan may use and still be worth a look at all samples: when more than
whether it holds is asked, and when it is not."""
_LOOK = 1.0
"""Seconds that a look at a plan may take, if it is at `FEW` samples or more."""
_TIMED_FEEDS, _LONG = 2, 0.1
"""Feeds to time with, and the seconds of a run from which on one will do."""
_COLLAPSED = float("inf")
_SLIGHT = 1e-12
"""The noise that stands for all of the budget, where outputs are integers."""


@dataclass(slots=True)
class Trials:
    """A model that is not touched, and what was found out about plans for it."""

    model: Model
    ctx: Context
    write: Write
    threads: int = 1
    corrections: Corrections = field(default_factory=Corrections)
    _feeds: list[Feed] | None = None
    _known: dict[Plan, Quality] = field(default_factory=dict["Plan", "Quality"])
    _looked: dict[Plan, bool] = field(default_factory=dict["Plan", bool])
    _proven: dict[Plan, bool] = field(default_factory=dict["Plan", bool])
    _corrected: dict[Plan, bool] = field(default_factory=dict["Plan", bool])
    _run: float = 0.0
    """Seconds that a model takes on a sample, about."""

    def draft(self, plan: Plan) -> Model:
        """The model with the plan applied, and what there was to say of it dropped."""
        # The collector is at rest while a pass runs, and drafts are cycles: those before this one
        # are young, and soon found.
        gc.collect(1)
        made = self.model.draft()
        self.write(made, plan, self._unheard())
        return made

    def _unheard(self) -> Context:
        return replace(self.ctx, report=PassReport())

    def quality(self, plan: Plan) -> Quality | None:
        """What the evaluator says of the model as it will run; RuntimeRefused when it does not.

        None without a evaluator, and for a plan that quantizes nothing.
        """
        if self.ctx.evaluator is None or not plan.quantized():
            return None
        if plan not in self._known:
            self._known[plan] = self._evaluated(self.draft(plan), STOP_ABOVE)
        return self._known[plan]

    def _evaluated(self, made: Model, stop_above: float, samples: int | None = None) -> Quality:
        """As it will run; the time that it takes is kept in mind."""
        assert self.ctx.evaluator is not None
        started = time.thread_time()  # which other programs do not add to
        found = self.ctx.evaluator.evaluate(
            made, samples=samples, deployed=True, stop_above=stop_above
        )
        self._run = (time.thread_time() - started) / max(found.samples, 1)
        return found

    def seems_to_hold(self, plan: Plan) -> bool:
        """Whether the budget holds on as many samples as a look is worth; `holds` asks for all."""
        evaluator = self.ctx.evaluator
        if plan in self._known or evaluator is None or not plan.quantized():
            return self.holds(plan)
        if isinstance(evaluator.requirement.metric, Score):  # which takes all samples
            return self.holds(plan)
        if plan not in self._looked:
            self._looked[plan] = self._looks_good(plan)
        return self._looked[plan]

    def _looks_good(self, plan: Plan) -> bool:
        samples = self.affordable(_LOOK)
        try:
            found = self._evaluated(self.draft(plan), _FAILED, samples)
        except RuntimeRefused:
            return False
        if found.ok and found.samples < samples:  # these were all
            self._known[plan] = found
        return found.ok

    def affordable(self, seconds: float) -> int:
        """How many samples can be looked at in so many seconds; `FEW` at least."""
        return max(FEW, int(seconds / self._run)) if self._run else FEW

    def known(self, plan: Plan) -> Quality | None:
        """What the evaluator has said of a plan, if it was asked."""
        return self._known.get(plan)

    def holds(self, plan: Plan, times: float = 1.0) -> bool:
        """Whether so many times the budget holds; without a evaluator nobody asks."""
        try:
            found = self.quality(plan)
        except RuntimeRefused:
            return False
        return found is None or found.ok or found.used <= times

    def used(self, plan: Plan) -> float:
        """The share of the budget that a plan uses up; without end where it does not run."""
        try:
            found = self.quality(plan)
        except RuntimeRefused:
            return _COLLAPSED
        return found.used if found is not None else 0.0

    def is_proven(self, plan: Plan) -> bool:
        """Whether a plan that holds does so as written too, where that is close.

        It takes many times as long as what the runtime makes of it: to be asked at last.
        """
        found = self.quality(plan)
        if found is None or found.off or found.used <= _CLOSE:
            return True
        if plan not in self._proven:
            self._proven[plan] = self._holds_as_written(plan)
        return self._proven[plan]

    def _holds_as_written(self, plan: Plan) -> bool:
        assert self.ctx.evaluator is not None
        try:
            return self.ctx.evaluator.evaluate(self.draft(plan), stop_above=_FAILED).ok
        except RuntimeRefused:
            return False

    def holds_corrected(self, plan: Plan) -> bool:
        """Whether the budget holds once the biases of static layers are corrected."""
        if self.ctx.evaluator is None or not is_correctable(plan, self.ctx):
            return False
        if plan not in self._corrected:
            self._corrected[plan] = self._holds_once_corrected(plan, self.ctx.evaluator)
        return self._corrected[plan]

    def _holds_once_corrected(self, plan: Plan, evaluator: Evaluator) -> bool:
        try:
            made = self.draft(plan)
            self.corrections.make(made, self._unheard())
        except RuntimeRefused:
            return False
        return keeps_budget(made, evaluator)

    def noise(self, plan: Plan, samples: int = FEW) -> float:
        """The noise on some samples; without end where the model does not run.

        Integers have no noise: of those, the share of the budget in use, as far less than any.
        """
        if self.ctx.evaluator is None:
            return 0.0
        known = self._known.get(plan)
        if known is not None and known.ok and known.samples <= samples:
            return _noise_of(known)  # on all that there are
        try:
            return _noise_of(self._evaluated(self.draft(plan), math.inf, samples))
        except RuntimeRefused:
            return _COLLAPSED

    @property
    def timed(self) -> bool:
        """Whether models are to be timed here, and can be."""
        wanted = self.ctx.settings.measure and self.ctx.target.has_costs
        return wanted and self.model.nbytes() <= MOST_BYTES and bool(self.feeds())

    def times(self, plans: Mapping[str, Plan], effort: Effort) -> dict[str, Timing]:
        """Paired timings against the model in floats; a plan that does not run is left out."""
        models = {name: self.draft(plan) for name, plan in plans.items()}
        try:
            return self._timed(models, effort)
        except RuntimeRefused:
            return self._timed({n: m for n, m in models.items() if self._runs(m)}, effort)

    def _timed(self, models: Mapping[str, Model], effort: Effort) -> dict[str, Timing]:
        all_ = {"float": self.model, **models}
        feeds = self.feeds()[:1] if self._run > _LONG else self.feeds()
        found = self.ctx.target.latency(
            all_, feeds, self.threads, effort, self.ctx.settings.custom_ops
        )
        return {name: found[name] for name in models}

    def _runs(self, model: Model) -> bool:
        try:
            session = self.ctx.target.open_session(model, True, self.ctx.settings.custom_ops)
            for feed in self.feeds():
                session.run(feed)
        except RuntimeRefused:
            return False
        return True

    def feeds(self) -> Sequence[Feed]:
        """Feeds to time with: the user's, else made up."""
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


def _noise_of(quality: Quality) -> float:
    return quality.noise or _SLIGHT * quality.used


def keeps_budget(model: Model, evaluator: Evaluator) -> bool:
    """Whether a model keeps the budget as it will run, and as written too where that is close."""
    try:
        found = evaluator.evaluate(model, deployed=True, stop_above=_FAILED)
        if not found.ok or found.off or found.used <= _CLOSE:
            return found.ok
        return evaluator.evaluate(model, stop_above=_FAILED).ok
    except RuntimeRefused:
        return False
