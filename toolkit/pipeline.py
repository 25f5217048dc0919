"""The pass manager: run a pass, prove it, keep it or undo it.

When a pass does not hold, its journal is bisected for the first rewrite that breaks the model. That
rewrite is vetoed and the pass runs again, so a bad rewrite costs itself and not the pass.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from toolkit import nodes as nd
from toolkit.choices import OpsetLimit, Prefer, Target, Validate, require_choice
from toolkit.errors import NotProven, ToolkitError, UsageError, summarize
from toolkit.journal import Rewrite
from toolkit.model import Model
from toolkit.result import ModelStats, PassResult, Result, Status, Undone
from toolkit.tolerance import EXACT, QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.calibrate.data import Calib, CalibrationData
    from toolkit.feeds import Sample
    from toolkit.misses import Misses
    from toolkit.quality.demand import Demand, Function
    from toolkit.quality.figures import Quality
    from toolkit.quality.judge import Judge
    from toolkit.validate import Validator, Verdict

_STANDARD = ("", "ai.onnx.ml")
_MOST_VETOES = 12
_RULE_LOST_AFTER = 3
"""A rule that breaks the model at this many sites is wrong as such: it is dropped as a whole."""


@runtime_checkable
class Pass(Protocol):
    """What the pipeline runs. Built-in passes are frozen dataclasses whose fields are options.

    A pass that finds nothing more to do when it runs twice may say so with a class variable
    `idempotent = True`: it is then skipped where nothing has changed since it last ran. One that
    fuses may say with `cores` what it is after, for `toolkit explain` (see `toolkit.cores`).
    """

    @property
    def name(self) -> str:
        """How the report calls it."""
        ...

    @property
    def tolerance(self) -> Tolerance:
        """How far it may move the outputs."""
        ...

    def run(self, model: Model, ctx: Context) -> None:
        """Edit the model through its graphs."""
        ...


@dataclass(slots=True)
class Context:
    """What a pass may know beside the model.

    `misses` records where rules nearly matched. `opset` bounds how far a pass may lift the model
    where the user did not name an opset to that pass itself. `calibration` are the user's samples,
    None without any. `floats` is the model as it was before the first pass that quantizes, and
    `judge` says what others are worth beside it (None when there is nothing to judge by).

    `prefer` and `measure` are for passes that choose by speed: whether a smaller model may be
    slower, and whether to time it on this machine. Plans that passes have applied go into `plans`.
    A pass that takes long says what it does with `tell`: in words, and which part of it is done.
    """

    target: str = "ort-cpu"
    custom_ops: tuple[str, ...] = ()
    misses: Misses | None = None
    opset: OpsetLimit = None
    calibration: CalibrationData | None = None
    floats: Model | None = None
    judge: Judge | None = None
    prefer: Prefer = "speed"
    measure: bool = True
    tell: Callable[[str, float], None] = lambda stage, part: None
    plans: list[Written] = field(default_factory=list["Written"])
    notes: list[str] = field(default_factory=list[str])

    def note(self, text: str) -> None:
        """Say something about this run of the pass; it ends up in the report."""
        if text not in self.notes:
            self.notes.append(text)


class Written(Protocol):
    """What a pass has decided, and can write down: a plan of quantization is one."""

    def to_json(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the pipeline is: pass `index` of `total`, `stage` in words, `part` of it done."""

    index: int
    total: int
    name: str
    stage: str
    part: float = 0.0


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
            self._demand()
        for item in self.passes:
            if isinstance(item, type):
                raise UsageError(f"{item.__name__} is a class: write {item.__name__}()")
            if not isinstance(item, Pass):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(
                    f"{item!r} is no pass: it needs name, tolerance and run(model, ctx)"
                )

    def run(self, model: Model) -> Result:
        """Apply the passes to `model`, in place. Raises NotProven when the end does not hold."""
        from toolkit.check import check_input

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
            ctx = Context(
                target=self.target,
                custom_ops=self.custom_ops,
                misses=self.misses,
                opset=self.opset,
                calibration=data,
                floats=floats,
                judge=judge,
                prefer=self.prefer,
                measure=self.measure,
                tell=partial(self._tell, index, item.name),
            )
            results.append(self._run_pass(index, item, model, validator, ctx))
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

    # -- one pass

    def _run_pass(
        self, index: int, item: Pass, model: Model, validator: Validator | None, ctx: Context
    ) -> PassResult:
        started = time.perf_counter()
        undone: list[Undone] = []
        given_up: list[str] = []
        status: Status = "unchanged"
        error, reason, quality = None, "", None
        places: dict[str, list[str]] = {}
        while True:
            failure = _attempt(item, model, ctx)
            if failure is not None:
                model.rollback()
                status, reason = "reverted", failure
                break
            if not len(model.journal):
                break
            places = model.journal.places_by_rule()
            if validator is None or self.validate != "each":
                status = "applied"
                break
            self._tell(index, item.name, "proving")
            verdict = validator.check(model, item.tolerance)
            error, quality = verdict.error, verdict.quality
            if verdict.ok:
                validator.accept(verdict)
                status = "applied"
                break
            self._tell(index, item.name, "finding the rewrite that breaks it")
            culprit, of_it = _first_bad(model, validator, item.tolerance, verdict)
            model.rollback()
            found = Undone(culprit.rule, culprit.site, of_it.error, of_it.reason)
            known = any((u.rule, u.site) == (found.rule, found.site) for u in undone)
            if culprit.implicit or known or len(undone) >= _MOST_VETOES:
                # Nothing that a veto would keep from happening again.
                status, reason = "reverted", of_it.reason
                undone.clear()
                break
            undone.append(found)
            model.journal.veto(culprit)
            if sum(u.rule == culprit.rule for u in undone) >= _RULE_LOST_AFTER:
                model.journal.veto_rule(culprit.rule)
                given_up.append(
                    f"{culprit.rule} given up after {_RULE_LOST_AFTER} that did not hold"
                )
        if status == "unchanged" and undone:
            status, error, reason = "reverted", None, "none of its rewrites held"
        if status != "applied":
            places.clear()
            quality = None
        model.journal.clear_vetoes()
        model.commit()
        return PassResult(
            name=item.name,
            status=status,
            rewrites=sum(map(len, places.values())),
            rules={rule: len(sites) for rule, sites in places.items()},
            seconds=time.perf_counter() - started,
            error=error,
            reason=reason,
            undone=undone,
            notes=[*given_up, *ctx.notes],
            places=places,
            quality=quality,
        )

    # -- the ends

    def _demand(self) -> Demand:
        from toolkit.quality.demand import Demand

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
        from toolkit.quality.samples import samples_of

        self._tell(*self._at, "running the floats on samples")
        samples = samples_of(data, validator, len(self.samples))
        judge = samples.judge(floats, self._demand(), self.custom_ops)
        if validator is not None:
            validator.judge = judge
        return judge

    def _validator(self, model: Model) -> Validator | None:
        if self.validate == "off":
            return None
        from toolkit.validate import Validator

        self._tell(0, "", "running the original")
        return Validator(model, samples=self.samples, seed=self.seed, custom_ops=self.custom_ops)

    def _prove_end(
        self, model: Model, validator: Validator | None, results: list[PassResult]
    ) -> tuple[str, Quality | None]:
        """What the end result was shown to be, in one line; raises when it does not hold."""
        if validator is None:
            return "not validated", None
        from toolkit.runtime import said_of_packing

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
        return "; ".join(filter(None, [shown, said_of_packing(model)])), deployed.quality

    def _tell(self, index: int, name: str, stage: str, part: float = 0.0) -> None:
        self.progress(Progress(index, len(self.passes), name, stage, part))


def _require_opset(limit: OpsetLimit) -> None:
    from toolkit.runtime import MAX_OPSET

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


def _attempt(item: Pass, model: Model, ctx: Context) -> str | None:
    """Run the pass; what went wrong in one line, or None.

    A user's pass may raise anything, and must not take the model down with it. A UsageError is
    not the pass failing but the user asking for something that cannot be: it goes through.
    """
    ctx.notes.clear()
    ctx.plans.clear()
    try:
        with _collector_paused():
            item.run(model, ctx)
            if len(model.journal):
                for graph in model.graphs():
                    graph.require_sound()
    except UsageError:
        raise
    except ToolkitError as error:
        return str(error)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{summarize(error)} ({Path(frame.filename).name}, line {frame.lineno})"
    return None


@contextmanager
def _collector_paused() -> Generator[None]:
    """Python's cycle collector at rest: a graph is many objects, all of them alive.

    Looking through them again and again takes more than linear time, 14 % of it at 40,000 nodes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _first_bad(
    model: Model, validator: Validator, tolerance: Tolerance, verdict: Verdict
) -> tuple[Rewrite, Verdict]:
    """The first rewrite in the journal after which the model does not hold, and its verdict.

    Binary search over prefixes: the model held before the pass and does not after it, as
    `verdict` says.
    """
    journal = model.journal
    rewrites = journal.rewrites
    ends = [r.start for r in rewrites[1:]] + [len(journal)]
    good, bad = -1, len(rewrites) - 1  # the model holds after `good`, and not after `bad`
    while bad - good > 1:
        middle = (good + bad) // 2
        journal.seek(ends[middle])
        found = validator.check(model, tolerance)
        if found.ok:
            good = middle
        else:
            bad, verdict = middle, found
    return rewrites[bad], verdict


def _require(verdict: Verdict, how: str, results: list[PassResult]) -> None:
    if not verdict.ok:
        raise NotProven(f"the result, {how}, differs from the original: {verdict.reason}", results)
