"""The pass manager: run passes in order, and verify each of them and the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.errors import NotProven, UsageError
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.pass_manager.bisect import run_pass
from toolkit.pass_manager.protocol import (
    AnyPass,
    Context,
    Idempotent,
    Incomparable,
    KeepsOpset,
    Origin,
    Pass,
    Progress,
)
from toolkit.pass_manager.registry import parse_passes
from toolkit.pass_manager.result import UNCHANGED_SINCE, ModelStats, PassResult, Result
from toolkit.settings import OpsetLimit, Settings
from toolkit.targets import Target
from toolkit.targets.releases import Release, needs_of, obstacles, opset_ceiling
from toolkit.verification.tolerance import EXACT, FLOAT, QUANT

if TYPE_CHECKING:
    from toolkit.accuracy.evaluator import Evaluator
    from toolkit.accuracy.quality_report import Quality
    from toolkit.calibrate.data import CalibrationData
    from toolkit.quantization.plan import Plan
    from toolkit.rewriting.match_failure import NearMisses
    from toolkit.verification.validator import Validator, Verdict

_DECIDE = "shapes:annotate=false,branches,fold,branches"
"""The passes that remove control flow whose conditions a specialization decides."""
_UNEVALUATED = "the loss of accuracy by quantization is unknown: give samples by --calib"


class Pipeline:
    """Passes in order, each verified against the original.

    `options` are fields of `Settings`, for callers that do not have one. `misses` records the near
    misses of all rules; `progress` is called with the position of the run. With `finish`, the final
    passes of the target follow where passes have lifted the opset.
    """

    def __init__(
        self,
        passes: Sequence[AnyPass],
        settings: Settings | None = None,
        *,
        misses: NearMisses | None = None,
        progress: Callable[[Progress], None] = lambda _: None,
        finish: bool = True,
        **options: Any,
    ) -> None:
        self.settings = Settings(**options) if settings is None else replace(settings, **options)
        self.misses = misses
        self.progress = progress
        self.finish = finish
        self._at = 0, ""
        self.passes = [_checked_pass(item, self.settings) for item in passes]

    def run(self, model: Model) -> Result:
        """Apply the passes to `model`, in place; raises NotProven if verification fails."""
        from toolkit.verification.structure import check_input

        started = time.perf_counter()
        target = self.settings.find_target()
        check_input(model)
        before = ModelStats.of(model)
        results: list[PassResult] = []
        ran: list[Pass] = []
        chosen, validator = self._start(model, ran, results)
        data = self._data(model)
        reference: Model | None = None
        evaluator: Evaluator | None = None
        plans: list[Plan] = []
        settled: list[tuple[Pass, int]] = []
        opset = _OpsetGoal(model, target, self.settings.opset)
        for index, item in self._scheduled(model, opset):
            ran.append(item)
            if any(item == other and model.revision == at for other, at in settled):
                results.append(_skipped(item))
                continue
            self._at = index, item.name
            if reference is None and item.tolerance is QUANT:
                reference = model.copy()
                evaluator = self._evaluator(reference, validator, data)
            self._report(index, item.name, "running")
            ctx = Context(
                settings=self.settings,
                calibration=data,
                reference=reference,
                evaluator=evaluator,
                misses=self.misses,
                origin=Origin(max(opset.origin.opset, opset.kept), opset.origin.ir_version),
                progress=partial(self._report, *self._at),
            )
            results.append(
                run_pass(item, model, ctx, validator if self.settings.validate == "each" else None)
            )
            if validator is not None and results[-1].status == "applied":
                if self.settings.validate == "final":
                    validator.redefine(ctx.redefined)
                if item.tolerance is not QUANT:
                    validator.catch_up(model, item.name)
            opset.follow(model, item, results[-1])
            plans += ctx.report.plans if results[-1].status in ("applied", "unchanged") else []
            if isinstance(item, Idempotent) and item.idempotent:
                settled.append((item, model.revision))
        if chosen:
            from toolkit.pass_manager.specialize import narrow_outputs

            narrow_outputs(model)
        if self.settings.runtime is not None:
            _require_loads(model, target.release)
        proof, quality = self._prove_end(model, validator, ran, results)
        proof = "; ".join(filter(None, [proof, chosen, _foreign_operators(model, target)]))
        return Result(
            model=model,
            passes=results,
            before=before,
            proof=proof,
            seconds=time.perf_counter() - started,
            quality=quality,
            plans=[plan.to_json() for plan in plans],
            notes=_notes_on(data),
            loads_on=needs_of(model),
        )

    def _scheduled(self, model: Model, opset: _OpsetGoal) -> Iterator[tuple[int, Pass]]:
        """Yield the passes with their index, and around them those that the opset demands."""
        yield from ((0, item) for item in opset.conversions(model))
        yield from enumerate(self.passes)
        if not self.finish:
            return
        last = max(len(self.passes) - 1, 0)
        if self.settings.runtime is not None:
            yield from ((last, item) for item in opset.for_release(model))
        yield from ((last, item) for item in opset.final_passes(model))
        yield from ((last, item) for item in opset.conversions(model))

    # -- setup and final verification

    def _data(self, model: Model) -> CalibrationData | None:
        if self.settings.calib is None:
            return None

        def report(done: int, total: int | None, what: str) -> None:
            index, name = self._at
            self._report(index, name, what, done / total if total else 0.0)

        return self.settings.calib.open(model, self.settings.custom_ops, report)

    def _evaluator(
        self, reference: Model, validator: Validator | None, data: CalibrationData | None
    ) -> Evaluator | None:
        """Return the evaluator of quantized models, which the validator uses too."""
        from toolkit.accuracy.evaluator import evaluator_for

        self._report(*self._at, "running the float model on samples")
        given = self.settings
        evaluator = evaluator_for(
            reference,
            data,
            validator,
            given.requirement(),
            given=len(given.samples),
            custom_ops=given.custom_ops,
        )
        if validator is not None:
            validator.evaluator = evaluator
        return evaluator

    def _start(
        self, model: Model, ran: list[Pass], results: list[PassResult]
    ) -> tuple[str, Validator | None]:
        """Specialize the model; return the choices in words, and the validator.

        Control flow that the choices decide goes first, since branches that are never taken may be
        invalid now. The proof covers that too: it compares with the original.
        """
        given = self.settings
        if not (given.fix or given.freeze):
            return "", self._validator(model)
        from toolkit.pass_manager.specialize import require_runs, require_valid, specialize

        original = model.copy()
        chosen = specialize(model, given.fix, given.freeze)
        for item in parse_passes(_DECIDE):
            ran.append(item)
            results.append(run_pass(item, model, Context(settings=given), None))
        require_valid(model, chosen, original)
        validator = self._validator(model, original)
        if validator is not None:
            require_runs(validator, chosen, original, given)
            verdict = validator.check(model, FLOAT)
            _require(verdict, "specialized", results)
            validator.accept(verdict)
        return f"specialized to {chosen}", validator

    def _validator(self, model: Model, unspecialized: Model | None = None) -> Validator | None:
        if self.settings.validate == "off":
            return None
        from toolkit.verification.validator import Validator

        self._report(0, "", "running the original")
        given = self.settings
        return Validator(
            model,
            samples=given.samples,
            seed=given.seed,
            custom_ops=given.custom_ops,
            unspecialized=unspecialized,
        )

    def _prove_end(
        self,
        model: Model,
        validator: Validator | None,
        ran: Sequence[Pass],
        results: list[PassResult],
    ) -> tuple[str, Quality | None]:
        """Verify the result and summarize the proof; raises NotProven."""
        if validator is None:
            return "not validated", None
        from toolkit.runtime.session import packing_note

        self._report(len(self.passes), "", "proving the result")
        changed = [p for p, r in zip(ran, results, strict=True) if r.status == "applied"]
        loosest = max((p.tolerance for p in changed), default=EXACT)
        errors = [r.error for r in results if r.status == "applied" and r.error is not None]
        if self.settings.validate == "final":
            verdict = validator.check(model, loosest)
            _require(verdict, "as written", results)
            errors.append(verdict.error or 0.0)
        deployed = validator.check(model, loosest, deployed=True)
        _require(deployed, "as deployed, with the runtime's own optimizations on", results)
        shown = validator.summary(errors[-1] if errors else 0.0, deployed)
        unevaluated = loosest is QUANT and validator.evaluator is None
        parts = (shown, packing_note(model), _UNEVALUATED if unevaluated else "")
        return "; ".join(filter(None, parts)), deployed.quality

    def _report(self, index: int, name: str, stage: str, part: float = 0.0) -> None:
        self.progress(Progress(index, len(self.passes), name, stage, part))


class _OpsetGoal:
    """The opset that the result may have at most, and the passes that bring it there."""

    def __init__(self, model: Model, target: Target, limit: OpsetLimit) -> None:
        self.origin = Origin(model.opsets.get("", 0), model.ir_version)
        self.kept = 0
        self._limit = limit if isinstance(limit, int) else None
        self._target = target
        self._converting: Pass | None = None

    def conversions(self, model: Model) -> Iterator[Pass]:
        """Yield the pass that lowers a model above the limit, unless it was asked for by name."""
        limit = self._limit
        if limit is not None and max(_opsets_of(model)) > max(limit, self.kept):
            (self._converting,) = parse_passes(f"{self._target.opset_pass}:to={limit}")
            yield self._converting

    def final_passes(self, model: Model) -> Iterator[Pass]:
        """Yield the final passes of the target if passes have lifted the opset."""
        if 0 < max(self.origin.opset, self.kept) < model.opsets.get("", 0):
            for name in self._target.final_passes:
                yield from parse_passes(name)

    def for_release(self, model: Model) -> Iterator[Pass]:
        """Yield the passes that write what the oldest runtime lacks; its opset is a limit then."""
        for name in self._target.release_passes:
            yield from parse_passes(name)
        newest = opset_ceiling(model, self._target.release)
        self._limit = newest if self._limit is None else min(self._limit, newest)

    def follow(self, model: Model, item: Pass, result: PassResult) -> None:
        """Take note of a pass that was run; raises UsageError if the limit cannot be met."""
        if item is self._converting:
            if max(_opsets_of(model)) > max(self._limit or 0, self.kept):
                reasons = [result.reason, *map(str, result.undone), *result.notes]
                raise UsageError(
                    f"opset {self._limit} cannot be met: {'; '.join(filter(None, reasons))}"
                )
        elif isinstance(item, KeepsOpset) and item.keeps_opset and result.status == "applied":
            self.kept = model.opsets.get("", 0)


def _opsets_of(model: Model) -> list[int]:
    """Return the standard opsets of a model and of its functions, at least [0]."""
    imports = (entry for function in model.functions for entry in function.opset_import)
    own = [entry.version for entry in imports if entry.domain in nd.STANDARD_DOMAINS]
    return [model.opsets.get("", 0), *own]


def _require_loads(model: Model, release: Release) -> None:
    """Raise UsageError if a release does not load the result."""
    found = obstacles(model, release)
    if found:
        more = [f"and {len(found) - 3} more"] if len(found) > 3 else []
        listed = "; ".join([*found[:3], *more])
        raise UsageError(f"the result does not load on {release}: {listed}")


def _checked_pass(item: object, settings: Settings) -> Pass:
    """Return the object if it is a pass that the settings allow; raise UsageError otherwise."""
    if isinstance(item, type):
        raise UsageError(f"{item.__name__} is a class: write {item.__name__}()")
    if not isinstance(item, Pass):
        raise UsageError(f"{item!r} is not a pass: it needs name, tolerance and run(model, ctx)")
    if isinstance(item, Incomparable) and item.incomparable and settings.validate != "off":
        raise UsageError(f"{item.name}: {item.incomparable}: it takes --validate off")
    return item


def _foreign_operators(model: Model, target: Target) -> str:
    """Name the operators that a target of standard operators does not have, in one line."""
    if not target.standard_only:
        return ""  # custom operators come with libraries
    nodes = (node for graph in model.graphs() for node in graph.nodes)
    foreign = sorted({nd.qualified(n) for n in nodes if not target.runs(nd.domain_of(n))})
    return f"not standard ONNX: {', '.join(foreign)}" if foreign else ""


def _notes_on(data: CalibrationData | None) -> list[str]:
    """Return notes on the calibration data for the user."""
    if data is None:
        return []
    return [*data.notes, *([] if data.used else ["no pass made use of the calibration data"])]


def _skipped(item: Pass) -> PassResult:
    return PassResult(item.name, "skipped", reason=UNCHANGED_SINCE)


def _require(verdict: Verdict, how: str, results: list[PassResult]) -> None:
    if not verdict.ok:
        raise NotProven(f"the result, {how}, differs from the original: {verdict.reason}", results)
