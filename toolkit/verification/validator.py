"""Validation: compare a model after a pass with the original in structure, interface and outputs.

The reference outputs are computed once, from the original, before any pass runs. The reference and
every check run the graph as written, with onnxruntime's own optimizations off. A `deployed` check
turns them on and allows for the error that they cause in the original too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from onnx import ModelProto

from toolkit.errors import ModelError, RuntimeRefused, ToolkitError
from toolkit.feeds import FeedSet, Sample
from toolkit.ir.model import Model
from toolkit.ir.signature import Interface
from toolkit.runtime import MAX_IR
from toolkit.runtime.session import Session
from toolkit.verification.compare import Difference, worst, worst_violation
from toolkit.verification.reference import Reference
from toolkit.verification.structure import Level, check_output, strictest_level
from toolkit.verification.tolerance import (
    AS_DEPLOYED,
    EXACT,
    FLOAT,
    MAX_SENSITIVITY,
    QUANT,
    REQUANTIZED,
    SENSITIVITY,
    Tolerance,
    epsilon_of,
)

if TYPE_CHECKING:
    from toolkit.accuracy.evaluator import Evaluator
    from toolkit.accuracy.quality_report import Quality
    from toolkit.pass_manager.protocol import Redefinition

Differences = dict[str, Difference]
"""The difference of each output, by name."""

_INVALID = ("This is an invalid model", "Type Error")
"""Marks of onnxruntime's errors for models that are invalid rather than unsupported."""

_CLEARLY = 0.5
"""Up to this fraction of the error budget, a few samples suffice for a model as written; all of
them run as deployed, which is faster."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check. `error` is relative to the outputs' scale, None when nothing ran.

    `quality` is the accuracy of a quantized model.
    """

    ok: bool
    error: float | None = None
    reason: str = ""
    quality: Quality | None = None


class Validator:
    """The interface and reference outputs of a model, to check other models against.

    With an `evaluator`, quantized models are measured by their accuracy; on synthetic inputs they
    only have to run and return finite outputs.
    """

    evaluator: Evaluator | None = None

    def __init__(
        self,
        original: Model,
        *,
        samples: Sequence[Sample] = (),
        seed: int = 0,
        custom_ops: Sequence[str] = (),
        unspecialized: Model | None = None,
    ) -> None:
        """Run the original on the samples and on synthetic feeds.

        If the original is a specialization, the outputs are those of the `unspecialized` model.
        """
        self._custom_ops = tuple(custom_ops)
        self._reference_of = partial(
            Reference.of, samples=samples, seed=seed, custom_ops=custom_ops
        )
        self._interface = Interface.of(original)
        self._level = strictest_level(original)
        self._ir_version = original.ir_version
        self._weights = original.weights
        self._original_errors: dict[bool, tuple[Reference, Differences | None]] = {}
        self._drift = 0.0
        self._noise: float | None = None
        self._redefined: set[str] = set()
        self._does_not_load = self._first_loaded = ""
        try:
            reference = self._reference_of(original, original=unspecialized)
            self._start_from(unspecialized or original, reference)
        except RuntimeRefused as refusal:
            _require_valid(original, self._level, refusal)
            self._does_not_load = _why_refused(original, self._custom_ops)
            self._start_from(original, Reference((), FeedSet(refusal=self._does_not_load)))

    def _start_from(self, model: Model, reference: Reference) -> None:
        self._epsilon = epsilon_of(model)
        self._snapshot = model.to_proto().SerializeToString()
        self._reference = self._expected = reference
        self._refusal = reference.feeds.refusal

    def catch_up(self, model: Model, pass_name: str) -> None:
        """If onnxruntime does not load the original, use the first model that it loads instead.

        `pass_name` is the pass that produced `model`.
        """
        if not self._does_not_load or self._first_loaded:
            return
        try:
            self._start_from(model, self._reference_of(model))
        except RuntimeRefused:
            return
        self._first_loaded = pass_name

    # -- reporting

    @property
    def feeds(self) -> FeedSet:
        """The feeds of every check; empty when the original does not run."""
        return self._reference.feeds

    @property
    def unstable(self) -> frozenset[str]:
        """Nondeterministic outputs, which are not compared."""
        return self._reference.unstable

    @property
    def note(self) -> str:
        """The limits of the checks and their reasons; empty when everything is checked."""
        if not len(self.feeds):
            return f"not run: {self._refusal}; structure only"
        remarks: list[str] = []
        if self._first_loaded:
            remarks.append(
                f"compared with the result of {self._first_loaded}, since the original does not "
                f"run: {self._does_not_load}"
            )
        if self._reference.unstable:
            names = ", ".join(f"'{name}'" for name in sorted(self._reference.unstable))
            remarks.append(f"not compared, since two runs of the original differ: {names}")
        if self._redefined:
            names = ", ".join(f"'{name}'" for name in sorted(self._redefined))
            remarks.append(f"redefined by a pass: {names}")
        if self._ir_version > MAX_IR:
            remarks.append(
                f"onnxruntime does not load IR version {self._ir_version} from a file; it was run "
                f"as version {MAX_IR}"
            )
        return "; ".join(remarks)

    def summary(self, error: float, deployed: Verdict) -> str:
        """Summarize the final check in one line: the error as written and as deployed."""
        accuracy = deployed.quality.summary() if deployed.quality is not None else ""
        if not len(self.feeds):
            rest = f"no other inputs were run: {self._refusal}"
            return f"{accuracy}; {rest}" if accuracy else self.note
        runs = "1 feed" if len(self.feeds) == 1 else f"{len(self.feeds)} feeds"
        sizes = [f"{s} {', '.join(map(str, found))}" for s, found in self.feeds.sizes.items()]
        where = f"{runs} ({'; '.join(sizes)})" if sizes else runs
        shown = f"error {error:.1e} as written, {deployed.error or 0:.1e} as deployed"
        if accuracy:
            shown = f"{accuracy}; runs, outputs are finite"
        return "; ".join(filter(None, [f"{shown}, on {where}", deployed.reason, self.note]))

    # -- checking

    def check(
        self,
        model: Model,
        tolerance: Tolerance,
        deployed: bool = False,
        redefined: Mapping[str, Redefinition] | None = None,
    ) -> Verdict:
        """Check that `model` is well-formed, keeps the interface and computes the same outputs.

        Outputs that the pass has `redefined` are compared with their new definition.
        """
        try:
            check_output(model, self._level)
        except ModelError as error:
            return Verdict(False, None, f"the graph is not valid: {error}")
        broken = self._interface.broken_by(model)
        if broken:
            return Verdict(False, None, broken)
        evaluated = self.evaluator is not None and (tolerance is QUANT or self._noise is not None)
        if not len(self.feeds) and not evaluated:
            return Verdict(True, None, self.note)
        try:
            expected = self._expected.redefined(redefined or {})
        except ToolkitError as error:
            return Verdict(False, None, str(error))
        try:
            found = expected.differences(Session(model, deployed, self._custom_ops))
        except RuntimeRefused as refusal:
            if deployed and self._original_error(expected, deployed=True) is None:
                return Verdict(True, None, "onnxruntime's optimizations break the original too")
            return Verdict(False, None, f"onnxruntime fails: {refusal}")
        if tolerance is QUANT and self.evaluator is not None:
            return self._evaluate(model, found, self.evaluator, deployed)
        if self._noise is not None and self.evaluator is not None:
            return self._check_requantized(model, found, expected, self.evaluator, tolerance)
        # The runtime's optimizations reorder operations.
        allowed = max(tolerance, FLOAT) if deployed else tolerance
        return self._check_errors(found, expected, allowed, deployed)

    def accept(self, verdict: Verdict) -> None:
        """Record the error of an accepted model: the next check allows for it."""
        self._drift = verdict.error or 0.0
        if verdict.quality is not None:
            self._noise = verdict.quality.noise

    def redefine(self, redefined: Mapping[str, Redefinition]) -> None:
        """Apply redefinitions to the reference outputs of all further checks."""
        self._expected = self._expected.redefined(redefined)
        self._redefined.update(redefined)

    def _evaluate(
        self, model: Model, found: Differences, evaluator: Evaluator, deployed: bool
    ) -> Verdict:
        """Measure the accuracy of a quantized model whose outputs are finite."""
        error = worst(list(found.values())).relative if found else None
        error = error if error is not None and math.isfinite(error) else None
        for name, difference in found.items():
            if not difference.finite:
                return Verdict(False, error, f"output '{name}': {difference.reason}")
        try:
            quality = None if deployed else evaluator.evaluate(model, stop_below=_CLEARLY)
            if quality is None or quality.used <= _CLEARLY:
                quality = evaluator.evaluate(model, deployed=True)
        except RuntimeRefused as refusal:
            return Verdict(False, error, f"onnxruntime fails: {refusal}")
        return Verdict(quality.ok, error, "" if quality.ok else quality.reason, quality)

    def _check_requantized(
        self,
        model: Model,
        found: Differences,
        expected: Reference,
        evaluator: Evaluator,
        tolerance: Tolerance,
    ) -> Verdict:
        """Check that a model quantized by an earlier pass is as accurate as it was then."""
        assert self._noise is not None
        verdict = self._check_errors(found, expected, tolerance, deployed=False)
        if verdict.ok and found:
            return verdict
        evaluated = self._evaluate(model, found, evaluator, deployed=False)
        if evaluated.quality is None or not evaluated.ok:
            return evaluated
        kept = evaluated.quality.noise <= REQUANTIZED * self._noise
        reason = verdict.reason or "its error against the float model grew"
        return evaluated if kept else Verdict(False, evaluated.error, reason)

    def _check_errors(
        self, found: Differences, expected: Reference, tolerance: Tolerance, deployed: bool
    ) -> Verdict:
        # A pass is held to the error it adds, not to that of earlier passes.
        margin = self._drift + EXACT.allowed(self._epsilon)
        allowed = max(tolerance.allowed(self._epsilon), margin if self._drift else 0.0)
        error = worst(list(found.values())).relative
        over = {name: d for name, d in found.items() if d.relative > allowed}
        if over and deployed:
            own = self._original_error(expected, deployed=True) or {}
            limits = {name: AS_DEPLOYED * d.relative for name, d in own.items()}
            over = {name: d for name, d in over.items() if d.relative > limits.get(name, 0)}
            if not over:
                return Verdict(True, error, "error as deployed within that of the original")
        if over and tolerance is FLOAT:
            own = self._original_error(expected, deployed=False) or {}
            most = MAX_SENSITIVITY * allowed
            limits = {name: min(most, SENSITIVITY * d.relative) for name, d in own.items()}
            over = {name: d for name, d in over.items() if not d.relative <= limits.get(name, 0)}
            if not over:
                return Verdict(True, error, "error within that of rounding the inputs")
        reason = worst_violation(over, dict.fromkeys(over, allowed))
        return Verdict(not reason, error if math.isfinite(error) else None, reason)

    def _original_error(self, expected: Reference, deployed: bool) -> Differences | None:
        """Return the error of the original itself, or None if it does not run.

        It is run with the runtime's optimizations if `deployed`, or else with inputs that are
        perturbed by one unit in the last place.
        """
        known = self._original_errors.get(deployed)
        if known is None or known[0] is not expected:
            original = Model(ModelProto.FromString(self._snapshot), self._weights)
            try:
                session = Session(original, deployed, self._custom_ops)
                found = expected.differences(session, original=True, perturbed=not deployed)
            except RuntimeRefused:
                found = None
            known = self._original_errors[deployed] = expected, found
        return known[1]


def _require_valid(model: Model, level: Level, refusal: RuntimeRefused) -> None:
    """Raise ModelError if both the runtime and onnx's checker reject the model as invalid.

    A model that only the runtime rejects (unknown operators, missing kernels) may run elsewhere.
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
    return f"{causes[0]}{more}" if causes else "onnxruntime rejects it"
