"""Validation: a model after a pass against the original, in structure, interface and numbers.

The reference outputs come from the original, once, before any pass touches it. They are computed
with onnxruntime's own optimizations off, and so is every check: the graph as it is written. A
`deployed` check turns them on; what the runtime's optimizations do to the original as well is then
not held against the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from onnx import ModelProto

from toolkit.errors import ModelError, RuntimeRefused, ToolkitError
from toolkit.feeds import Feeds, Sample
from toolkit.ir.model import Model
from toolkit.ir.signature import Interface
from toolkit.runtime.session import MAX_IR, Session
from toolkit.verification.compare import Difference, worst
from toolkit.verification.reference import Reference
from toolkit.verification.structure import Level, check_output, strictest_level
from toolkit.verification.tolerance import EXACT, FLOAT, QUANT, Tolerance, epsilon_of

if TYPE_CHECKING:
    from toolkit.accuracy.evaluator import Judge
    from toolkit.accuracy.quality_report import Quality
    from toolkit.pass_manager.protocol import Redefinition

_INVALID = ("This is an invalid model", "Type Error")
"""What onnxruntime says of a model that is wrong, not just beyond it."""

_OWN_ERROR = 2.0
"""As deployed, a result may be this many times as far off as the original is as deployed."""

_SENSITIVE, _MOST_SENSITIVE = 2.0, 10.0
"""Another order of operations may move an output by so many times what rounding the inputs of the
original once more does, up to so many times the tolerance: some feeds meet a model where it is
steep."""

_ROUNDED_ANEW = 1.25
"""A quantized model may get this many times as far off when it is rewritten: what lies between two
integers may fall to the other side."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a model holds. `error` is relative to the outputs' scale, None when nothing ran.

    `quality` is what the judge says of a model that was quantized.
    """

    ok: bool
    error: float | None = None
    reason: str = ""
    quality: Quality | None = None


class Validator:
    """Holds a model's interface and reference outputs, and checks others against them.

    With a `judge`, what a pass that quantizes may do to the numbers is for that to say: on made-up
    inputs such a model must run and give numbers, no more.
    """

    judge: Judge | None = None

    def __init__(
        self,
        original: Model,
        *,
        samples: Sequence[Sample] = (),
        seed: int = 0,
        custom_ops: Sequence[str] = (),
        count: int | None = None,
    ) -> None:
        """Run the original; `count` is the number of feeds to make up (by default 2 or 3)."""
        self._custom_ops = tuple(custom_ops)
        self._answers_of = partial(
            Reference.of, samples=samples, seed=seed, count=count, custom_ops=custom_ops
        )
        self._interface = Interface.of(original)
        self._level = strictest_level(original)
        self._ir_version = original.ir_version
        self._weights = original.weights
        self._as_deployed: _Own | None = None
        self._sensitivity: _Own | None = None
        self._drift = 0.0
        self._noise: float | None = None
        self._redefined: set[str] = set()
        self._does_not_load = self._starts_behind = ""
        try:
            self._start_from(original, self._answers_of(original))
        except RuntimeRefused as refusal:
            _require_valid(original, self._level, refusal)
            self._does_not_load = _why_refused(original, self._custom_ops)
            self._start_from(original, Reference((), Feeds(refusal=self._does_not_load)))

    def _start_from(self, model: Model, reference: Reference) -> None:
        self._epsilon = epsilon_of(model)
        self._snapshot = model.to_proto().SerializeToString()
        self._reference = self._expected = reference
        self._refusal = reference.feeds.refusal

    def catch_up(self, model: Model, behind: str) -> None:
        """Where onnxruntime does not load the original, compare with the first model that it does.

        `behind` is the pass that made this one.
        """
        if not self._does_not_load or self._starts_behind:
            return
        try:
            self._start_from(model, self._answers_of(model))
        except RuntimeRefused:
            return
        self._starts_behind = behind

    # -- what can be shown

    @property
    def feeds(self) -> Feeds:
        """The feeds that checks run on; empty when the original does not run."""
        return self._reference.feeds

    @property
    def unstable(self) -> frozenset[str]:
        """Outputs that cannot be compared: two runs of the original differ in them."""
        return self._reference.unstable

    @property
    def note(self) -> str:
        """What cannot be checked and why; empty when everything can."""
        if not len(self.feeds):
            return f"not run: {self._refusal}; structure only"
        remarks: list[str] = []
        if self._starts_behind:
            remarks.append(
                f"compared from behind {self._starts_behind} on, since the original does not run: "
                f"{self._does_not_load}"
            )
        if self._reference.unstable:
            names = ", ".join(f"'{name}'" for name in sorted(self._reference.unstable))
            remarks.append(f"not compared, since two runs of the original differ: {names}")
        if self._redefined:
            names = ", ".join(f"'{name}'" for name in sorted(self._redefined))
            remarks.append(f"compared with what a pass has made of it: {names}")
        if self._ir_version > MAX_IR:
            remarks.append(
                f"onnxruntime does not load IR version {self._ir_version} from a file, it was run "
                f"under {MAX_IR}"
            )
        return "; ".join(remarks)

    def summary(self, error: float, deployed: Verdict) -> str:
        """What was shown, in one line: the error as written, and what came out as deployed."""
        weighed = deployed.quality.summary() if deployed.quality is not None else ""
        if not len(self.feeds):
            rest = f"no other inputs were run: {self._refusal}"
            return f"{weighed}; {rest}" if weighed else self.note
        runs = "1 feed" if len(self.feeds) == 1 else f"{len(self.feeds)} feeds"
        sizes = [f"{s} {', '.join(map(str, found))}" for s, found in self.feeds.sizes.items()]
        where = f"{runs} ({'; '.join(sizes)})" if sizes else runs
        shown = f"error {error:.1e} as written, {deployed.error or 0:.1e} as deployed"
        if weighed:
            shown = f"{weighed}; runs and gives numbers"
        return "; ".join(filter(None, [f"{shown}, on {where}", deployed.reason, self.note]))

    # -- checking

    def check(
        self,
        model: Model,
        tolerance: Tolerance,
        deployed: bool = False,
        redefined: Mapping[str, Redefinition] | None = None,
    ) -> Verdict:
        """Whether `model` is well-formed, keeps the interface, and computes the same.

        That is: what it is to compute, beside what was accepted, where outputs are `redefined`.
        """
        try:
            check_output(model, self._level)
        except ModelError as error:
            return Verdict(False, None, f"the graph is not valid: {error}")
        broken = self._interface.broken_by(model)
        if broken:
            return Verdict(False, None, broken)
        judged = self.judge is not None and (tolerance is QUANT or self._noise is not None)
        if not len(self.feeds) and not judged:
            return Verdict(True, None, self.note)
        try:
            expected = self._expected.redefined(redefined or {})
        except ToolkitError as error:
            return Verdict(False, None, str(error))
        try:
            found = expected.differences(Session(model, deployed, self._custom_ops))
        except RuntimeRefused as refusal:
            if deployed and self._original_as_deployed(expected) is None:
                return Verdict(True, None, "onnxruntime's optimizations break the original too")
            return Verdict(False, None, f"onnxruntime refuses it: {refusal}")
        if tolerance is QUANT and self.judge is not None:
            return self._weigh(model, found, self.judge, deployed)
        if self._noise is not None and self.judge is not None:
            return self._still(model, found, expected, self.judge, tolerance)
        # The runtime's optimizations compute in another order, whatever the passes did.
        allowed = max(tolerance, FLOAT) if deployed else tolerance
        return self._judge(found, expected, allowed, deployed)

    def accept(self, verdict: Verdict) -> None:
        """The model is kept as it was checked: the next check starts from how far off it is."""
        self._drift = verdict.error or 0.0
        if verdict.quality is not None:
            self._noise = verdict.quality.noise

    def redefine(self, redefined: Mapping[str, Redefinition]) -> None:
        """From now on these outputs are to be something else than what the original gives."""
        self._expected = self._expected.redefined(redefined)
        self._redefined.update(redefined)

    def _weigh(
        self, model: Model, found: dict[str, Difference], judge: Judge, deployed: bool
    ) -> Verdict:
        """What the judge says of a quantized model that runs and gives numbers."""
        error = worst(list(found.values())).relative if found else None
        error = error if error is not None and math.isfinite(error) else None
        for name, difference in found.items():
            if not difference.finite:
                return Verdict(False, error, f"output '{name}': {difference.reason}")
        try:
            quality = judge.verdict(model, deployed=deployed)
        except RuntimeRefused as refusal:
            return Verdict(False, error, f"onnxruntime refuses it: {refusal}")
        return Verdict(quality.ok, error, "" if quality.ok else quality.reason, quality)

    def _still(
        self,
        model: Model,
        found: dict[str, Difference],
        expected: Reference,
        judge: Judge,
        tolerance: Tolerance,
    ) -> Verdict:
        """Whether a model that was quantized by an earlier pass is as good as it was then."""
        assert self._noise is not None
        verdict = self._judge(found, expected, tolerance, deployed=False)
        if verdict.ok and found:
            return verdict
        weighed = self._weigh(model, found, judge, deployed=False)
        if weighed.quality is None or not weighed.ok:
            return weighed
        kept = weighed.quality.noise <= _ROUNDED_ANEW * self._noise
        reason = verdict.reason or "it is further from the floats than before"
        return weighed if kept else Verdict(False, weighed.error, reason)

    def _judge(
        self,
        found: dict[str, Difference],
        expected: Reference,
        tolerance: Tolerance,
        deployed: bool,
    ) -> Verdict:
        # A pass answers for what it adds, not for what those before it were allowed.
        margin = self._drift + EXACT.allowed(self._epsilon)
        allowed = max(tolerance.allowed(self._epsilon), margin if self._drift else 0.0)
        error = worst(list(found.values())).relative
        over = {name: d for name, d in found.items() if d.relative > allowed}
        if over and deployed:
            own = self._original_as_deployed(expected) or {}
            limits = {name: _OWN_ERROR * own[name].relative if name in own else 0 for name in over}
            over = {name: d for name, d in over.items() if d.relative > limits[name]}
            if not over:
                return Verdict(True, error, "no further off than the original, as deployed")
        if over and tolerance is FLOAT:
            own = self._original_rounded_anew(expected)
            most = _MOST_SENSITIVE * allowed
            limits = {name: min(most, _SENSITIVE * own[name].relative) for name in over}
            over = {name: d for name, d in over.items() if not d.relative <= limits[name]}
            if not over:
                return Verdict(True, error, "no further off than its inputs' rounding")
        if not over:
            return Verdict(True, error)
        name, difference = max(over.items(), key=lambda item: item[1].relative)
        figures = f"off by {difference.relative:.1e} of its scale, {allowed:.0e} is allowed"
        reason = f"output '{name}': {difference.reason or figures}"
        return Verdict(False, error if math.isfinite(error) else None, reason)

    def _original_as_deployed(self, expected: Reference) -> dict[str, Difference] | None:
        """What the runtime's optimizations do to the original itself; None when they break it."""
        if self._as_deployed is None or self._as_deployed.expected is not expected:
            try:
                found = expected.differences(self._original(deployed=True), original=True)
            except RuntimeRefused:
                return None
            self._as_deployed = _Own(expected, found)
        return self._as_deployed.found

    def _original_rounded_anew(self, expected: Reference) -> dict[str, Difference]:
        """What a unit in the last place of its inputs does to the original."""
        if self._sensitivity is None or self._sensitivity.expected is not expected:
            found = expected.sensitivity(self._original(deployed=False))
            self._sensitivity = _Own(expected, found)
        return self._sensitivity.found

    def _original(self, deployed: bool) -> Session:
        original = Model(ModelProto.FromString(self._snapshot), self._weights)
        return Session(original, deployed, self._custom_ops)


@dataclass(frozen=True, slots=True)
class _Own:
    """How far the original itself is from what is expected, in other circumstances."""

    expected: Reference
    found: dict[str, Difference]


def _require_valid(model: Model, level: Level, refusal: RuntimeRefused) -> None:
    """Raise ModelError where the runtime and onnx's checker agree that a model is invalid.

    Everything else that the runtime refuses may run elsewhere: unknown operators, missing kernels.
    """
    if level is Level.FULL or not any(text in str(refusal) for text in _INVALID):
        return
    try:
        check_output(model, Level.FULL)
    except ModelError as error:
        if "No Op registered" not in str(error):
            raise ModelError(f"the model is invalid: {error}") from refusal


def _why_refused(model: Model, custom_ops: Sequence[str]) -> str:
    from toolkit.runtime.diagnose import why_refused

    causes = why_refused(model, custom_ops)
    more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    return f"{causes[0]}{more}" if causes else "onnxruntime refuses it"
