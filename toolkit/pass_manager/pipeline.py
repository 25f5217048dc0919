"""The pass manager: passes in order, with a proof behind each one and behind the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from toolkit.errors import NotProven, UsageError
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.pass_manager.bisect import run_pass
from toolkit.pass_manager.protocol import Context, Pass, Progress, Written
from toolkit.pass_manager.result import ModelStats, PassResult, Result
from toolkit.settings import OpsetLimit, Prefer, Target, Validate, require_choice
from toolkit.verification.tolerance import EXACT, QUANT

if TYPE_CHECKING:
    from toolkit.accuracy.evaluator import Judge
    from toolkit.accuracy.quality_report import Quality
    from toolkit.accuracy.requirement import Demand, Function
    from toolkit.calibrate.data import Calib, CalibrationData
    from toolkit.feeds import Sample
    from toolkit.rewriting.match_failure import Misses
    from toolkit.verification.validator import Validator, Verdict

_STANDARD = ("", "ai.onnx.ml")
_UNJUDGED = "what quantizing costs is not known: name samples that it runs on by --calib"


@dataclass(slots=True)
class Pipeline:
    """Passes in order, with a proof behind each one.

    `opset` bounds how far the model may be lifted; `misses` gets the near misses of all rules;
    `calib` says where calibration data come from, for passes that quantize by them. `max_drop` and
    `metric` say what quantizing may cost (see `toolkit.quality.demand`); `prefer` and `measure` are
    what the context tells the passes.
    """

    passes: Sequence[Pass]
    validate: Validate = "each"
    target: str = "ort-cpu"
    samples: Sequence[Sample] = ()
    seed: int = 0
    custom_ops: tuple[str, ...] = ()
    progress: Callable[[Progress], None] = lambda _: None
    opset: OpsetLimit = None
    misses: Misses | None = None
    calib: Calib | None = None
    max_drop: float | str | None = None
    metric: str | Function | None = None
    prefer: Prefer = "speed"
    measure: bool = True
    _at: tuple[int, str] = field(default=(0, ""), init=False)

    def __post_init__(self) -> None:
        require_choice("validate", self.validate, Validate)
        require_choice("prefer", self.prefer, Prefer)
        require_choice("target", self.target, Target)
        _require_opset(self.opset)
        if self.max_drop is not None or self.metric is not None:
            asked = not self._demand().off
            if asked and self.validate == "off" and self.calib is None:
                raise UsageError(
                    "--max-drop and --metric are of no use with --validate off and without --calib"
                )
        for item in self.passes:
            if isinstance(item, type):
                raise UsageError(f"{item.__name__} is a class: write {item.__name__}()")
            if not isinstance(item, Pass):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(
                    f"{item!r} is no pass: it needs name, tolerance and run(model, ctx)"
                )
            reason = getattr(item, "incomparable", "")
            if reason and self.validate != "off":
                raise UsageError(f"{item.name}: {reason}: it takes --validate off")

    def run(self, model: Model) -> Result:
        """Apply the passes to `model`, in place. Raises NotProven when the end does not hold."""
        from toolkit.verification.structure import check_input

        started = time.perf_counter()
        check_input(model)
        before = ModelStats.of(model)
        validator = self._validator(model)
        data = self._data(model)
        floats: Model | None = None
        judge: Judge | None = None
        results: list[PassResult] = []
        plans: list[Written] = []
        settled: list[tuple[Pass, int]] = []
        for index, item in enumerate(self.passes):
            if any(item == other and model.revision == at for other, at in settled):
                results.append(_skipped(item))
                continue
            self._at = index, item.name
            if floats is None and item.tolerance is QUANT:
                floats = model.copy()
                judge = self._judge(floats, validator, data)
            self._tell(index, item.name, "running")
            ctx = self._context(data, floats, judge)
            results.append(
                run_pass(item, model, ctx, validator if self.validate == "each" else None)
            )
            if validator is not None and results[-1].status == "applied":
                if self.validate == "final":
                    validator.redefine(ctx.redefined)
                if item.tolerance is not QUANT:
                    validator.catch_up(model, item.name)
            plans += ctx.plans if results[-1].status in ("applied", "unchanged") else []
            if getattr(item, "idempotent", False):
                settled.append((item, model.revision))
        proof, quality = self._prove_end(model, validator, results)
        if self.target == "onnx":
            proof = "; ".join(filter(None, [proof, _not_standard(model)]))
        return Result(
            model=model,
            passes=results,
            before=before,
            proof=proof,
            seconds=time.perf_counter() - started,
            quality=quality,
            plans=[plan.to_json() for plan in plans],
            notes=_notes_on(data),
        )

    def _context(
        self, data: CalibrationData | None, floats: Model | None, judge: Judge | None
    ) -> Context:
        """What the pass that it is at is told."""
        return Context(
            target=self.target,
            custom_ops=self.custom_ops,
            misses=self.misses,
            opset=self.opset,
            calibration=data,
            floats=floats,
            judge=judge,
            prefer=self.prefer,
            measure=self.measure,
            tell=partial(self._tell, *self._at),
        )

    # -- the ends

    def _demand(self) -> Demand:
        from toolkit.accuracy.requirement import Demand

        return Demand.of(self.max_drop, self.metric)

    def _data(self, model: Model) -> CalibrationData | None:
        if self.calib is None:
            return None

        def tell(done: int, total: int | None, what: str) -> None:
            index, name = self._at
            self._tell(index, name, what, done / total if total else 0.0)

        return self.calib.open(model, self.custom_ops, tell)

    def _judge(
        self, floats: Model, validator: Validator | None, data: CalibrationData | None
    ) -> Judge | None:
        """What the model is compared by once it is quantized; the validator goes by it too."""
        from toolkit.accuracy.samples import samples_of

        self._tell(*self._at, "running the floats on samples")
        samples = samples_of(data, validator, len(self.samples))
        judge = samples.judge(floats, self._demand(), self.custom_ops)
        if validator is not None:
            validator.judge = judge
        return judge

    def _validator(self, model: Model) -> Validator | None:
        if self.validate == "off":
            return None
        from toolkit.verification.validator import Validator

        self._tell(0, "", "running the original")
        return Validator(model, samples=self.samples, seed=self.seed, custom_ops=self.custom_ops)

    def _prove_end(
        self, model: Model, validator: Validator | None, results: list[PassResult]
    ) -> tuple[str, Quality | None]:
        """What the end result was shown to be, in one line; raises when it does not hold."""
        if validator is None:
            return "not validated", None
        from toolkit.runtime.session import said_of_packing

        self._tell(len(self.passes), "", "proving the result")
        changed = [p for p, r in zip(self.passes, results, strict=True) if r.status == "applied"]
        loosest = max((p.tolerance for p in changed), default=EXACT)
        errors = [r.error for r in results if r.status == "applied" and r.error is not None]
        if self.validate == "final":
            verdict = validator.check(model, loosest)
            _require(verdict, "as written", results)
            errors.append(verdict.error or 0.0)
        deployed = validator.check(model, loosest, deployed=True)
        _require(deployed, "as deployed, with the runtime's own optimizations on", results)
        shown = validator.summary(errors[-1] if errors else 0.0, deployed)
        unjudged = loosest is QUANT and validator.judge is None
        parts = (shown, said_of_packing(model), _UNJUDGED if unjudged else "")
        return "; ".join(filter(None, parts)), deployed.quality

    def _tell(self, index: int, name: str, stage: str, part: float = 0.0) -> None:
        self.progress(Progress(index, len(self.passes), name, stage, part))


def _require_opset(limit: OpsetLimit) -> None:
    from toolkit.runtime.session import MAX_OPSET

    if limit is None or limit == "keep":
        return
    if not isinstance(limit, int) or isinstance(limit, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"opset {limit!r} is not valid: give a number, or 'keep' for no lift")
    if not 1 <= limit <= MAX_OPSET:
        raise UsageError(
            f"opset {limit} is out of range: onnxruntime loads opsets from 1 to {MAX_OPSET}"
        )


def _not_standard(model: Model) -> str:
    """What a runtime of standard operators would not know: the model had it when it came."""
    nodes = (node for graph in model.graphs() for node in graph.nodes)
    foreign = sorted({nd.qualified(n) for n in nodes if nd.domain_of(n) not in _STANDARD})
    return f"not standard ONNX: {', '.join(foreign)}" if foreign else ""


def _notes_on(data: CalibrationData | None) -> list[str]:
    """What the user should know of the calibration data."""
    if data is None:
        return []
    return [*data.notes, *([] if data.used else ["no pass made use of the calibration data"])]


def _skipped(item: Pass) -> PassResult:
    return PassResult(item.name, "skipped", reason="nothing has changed since it last ran")


def _require(verdict: Verdict, how: str, results: list[PassResult]) -> None:
    if not verdict.ok:
        raise NotProven(f"the result, {how}, differs from the original: {verdict.reason}", results)
