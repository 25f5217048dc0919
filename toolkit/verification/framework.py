"""The export proof: run an exported graph in onnxruntime and compare it with its framework.

The error is max |onnxruntime - framework| relative to the output's scale, over test inputs at
several sizes of each dynamic dimension. If only some sizes or values fail, tracing has specialized
the graph to the example: `Proof.findings` names the dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from toolkit.errors import ModelError, RuntimeRefused, UsageError, one_line, summarize
from toolkit.feeds import distinct_sizes
from toolkit.frontends.protocol import Case, Draft
from toolkit.frontends.request import Request
from toolkit.ir.model import Model
from toolkit.runtime.diagnose import why_refused
from toolkit.runtime.session import Session
from toolkit.verification.compare import compare_typed, json_number, worst, worst_violation
from toolkit.verification.reference import unstable_outputs
from toolkit.verification.structure import check_input
from toolkit.verification.tolerance import UNSTABLE, allowed_for

Outcome = Literal["equal", "differs", "refused", "skipped"]
"""`refused`: onnxruntime fails where the framework does not. `skipped`: the framework fails, which
does not count against the graph."""

_REASON_LENGTH = 200
"""Characters of an error message quoted inside a finding."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The outcome of one test input."""

    sizes: Mapping[str, int]
    label: str
    outcome: Outcome
    error: float | None = None
    """The largest relative error of any output; None if nothing was compared."""
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome in ("differs", "refused")

    def __str__(self) -> str:
        """Describe the input, as `batch 2, sequence 8, zeros`."""
        shown = [f"{name} {size}" for name, size in self.sizes.items()]
        return ", ".join([*shown, self.label] if self.label else shown) or "the example"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"error": json_number(self.error)}


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of running a graph against its framework."""

    runs: tuple[CaseResult, ...]
    tolerance: float
    findings: tuple[str, ...] = ()
    """Defects of the graph, one per line; empty if it matches the framework."""
    notes: tuple[str, ...] = ()
    loads: bool = True
    """Whether onnxruntime loads the graph."""

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def error(self) -> float:
        """The largest relative error over all runs."""
        return max((run.error for run in self.runs if run.error is not None), default=0.0)

    @property
    def sizes(self) -> dict[str, list[int]]:
        """The sizes verified for each dynamic dimension, in ascending order."""
        return distinct_sizes(run.sizes for run in self.runs if run.outcome == "equal")

    @property
    def failing(self) -> frozenset[str]:
        """The dynamic dimensions whose size decides between success and failure."""
        dims = _dimensions(self.runs)
        return frozenset(d for d in dims if _decides(d, self.runs) or _unsupported(d, self.runs))

    def summary(self) -> str:
        """Summarize the proof, as `equal to 1.2e-07 on 8 inputs (batch 1, 2, 5)`."""
        if not self.ok:
            return "; ".join(self.findings)
        count = sum(run.outcome == "equal" for run in self.runs)
        sizes = "; ".join(f"{n} {_listed(s)}" for n, s in self.sizes.items())
        inputs = "1 input" if count == 1 else f"{count} inputs"
        return f"equal to {self.error:.1e} on {inputs}" + (f" ({sizes})" if sizes else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "error": json_number(self.error),
            "tolerance": self.tolerance,
            "findings": list(self.findings),
            "notes": list(self.notes),
            "runs": [run.to_json() for run in self.runs],
        }


def prove(draft: Draft, request: Request) -> Proof:
    """Run the draft on all of its test inputs and compare it with the framework.

    Raises UsageError if the framework fails on the first one, which is the user's example.
    """
    model = Model.load(draft.path)
    try:
        check_input(model)
        session = Session(model, custom_ops=request.custom_ops)
    except (ModelError, RuntimeRefused) as error:
        causes = [] if isinstance(error, ModelError) else why_refused(model, request.custom_ops)
        reason = f"onnxruntime does not load it: {'; '.join(causes) or error}"
        return Proof((), request.tolerance, (reason,), loads=False)
    random = _nondeterminism(draft)
    if random:
        return Proof((), request.tolerance, (random,))
    inputs = frozenset(model.graph.inputs)
    runs = [_run(session, inputs, draft, case, request) for case in draft.cases]
    del session
    if not any(run.failed for run in runs):
        runs += _failures_as_deployed(model, draft, request)
    unused = [name for name in draft.cases[0].feed if name not in inputs]
    notes = [f"input '{name}' is unused and was dropped from the graph" for name in unused]
    skipped = [run for run in runs if run.outcome == "skipped"]
    notes += [f"the model itself fails for {run}: {run.reason}" for run in skipped]
    findings = [*_findings(draft, runs), *_static_dimensions(runs)]
    return Proof(tuple(runs), request.tolerance, tuple(findings), tuple(notes))


def _nondeterminism(draft: Draft) -> str:
    """Return why the framework's outputs cannot be compared: it fails, or two runs differ."""
    feed = draft.cases[0].feed
    try:
        first, again = draft.reference(feed), draft.reference(feed)
    except Exception as error:  # a framework may raise anything
        message = f"the model does not run on the example: {summarize(error)}"
        raise UsageError(message) from error
    random = unstable_outputs(first, again, UNSTABLE["framework"])
    if not random:
        return ""
    return (
        f"output '{random[0]}' of the model itself differs from run to run (random numbers, or "
        "dropout that ignores eval mode): nothing can be compared with it"
    )


def _failures_as_deployed(model: Model, draft: Draft, request: Request) -> Iterator[CaseResult]:
    """Run the first and the last case with the runtime's optimizations on; yield failures."""
    how = "with the runtime's optimizations on"
    try:
        session = Session(model, optimize=True, custom_ops=request.custom_ops)
    except RuntimeRefused as refusal:
        yield CaseResult(draft.cases[0].sizes, how, "refused", None, str(refusal))
        return
    for case in (draft.cases[0], *draft.cases[1:][-1:]):
        run = _run(session, frozenset(model.graph.inputs), draft, case, request)
        if run.failed:
            yield replace(run, label=", ".join(filter(None, [run.label, how])))


def _run(
    session: Session, inputs: frozenset[str], draft: Draft, case: Case, request: Request
) -> CaseResult:
    """Run one case in the framework and in the runtime; the outputs are not kept."""
    result = CaseResult(case.sizes, case.label, "equal")
    try:
        expected = draft.reference(case.feed)
    except Exception as error:  # a framework may raise anything
        return replace(result, outcome="skipped", reason=summarize(error))
    # exporters drop unused inputs
    feed = {name: value for name, value in case.feed.items() if name in inputs}
    try:
        outputs = session.run(feed, list(expected))
    except RuntimeRefused as refusal:
        return replace(result, outcome="refused", reason=str(refusal))
    found = {
        name: compare_typed(wanted, output)
        for (name, wanted), output in zip(expected.items(), outputs, strict=True)
        if not (case.tied and getattr(wanted, "dtype", None) and wanted.dtype.kind in "iu")
    }
    limits = {name: allowed_for(expected[name], request.tolerance) for name in found}
    violation = worst_violation(found, limits)
    outcome = "differs" if violation else "equal"
    error = worst(list(found.values())).relative
    return replace(result, outcome=outcome, error=error, reason=violation)


# Specialization by tracing -----------------------------------------------------------------------


def _findings(draft: Draft, runs: Sequence[CaseResult]) -> Iterable[str]:
    runs = [run for run in runs if run.outcome != "skipped"]
    failed = [run for run in runs if run.failed]
    if not failed:
        return
    first = failed[0]
    reason = one_line(first.reason, _REASON_LENGTH)
    if len(failed) == len(runs):
        yield f"it {_verb(first)} on every input, as with {first}: {reason}"
        return
    dims = [name for name in _dimensions(runs) if _decides(name, runs)]
    for name in dims:
        yield _specialized_size(name, runs, draft)
    if not dims:
        labels = list(dict.fromkeys(run.label or str(run) for run in failed))
        yield (
            f"specialized by tracing: it {_verb(first)} for other values, not for other sizes "
            f"({'; '.join(labels)}), as when tracing recorded only one branch of the model: "
            f"{reason}"
        )


def _static_dimensions(runs: Sequence[CaseResult]) -> Iterable[str]:
    """Yield a finding for each dynamic dimension that the model supports at one size only."""
    for name in _dimensions(runs):
        unsupported = _unsupported(name, runs)
        if unsupported:
            size = next(run.sizes[name] for run in runs if run.outcome != "skipped")
            reason = unsupported[0].reason
            yield f"dimension '{name}': the model itself supports only size {size} ({reason})"


def _unsupported(name: str, runs: Sequence[CaseResult]) -> list[CaseResult]:
    """Return the skipped runs at other sizes, if the framework supports exactly one size."""
    taken = {run.sizes.get(name) for run in runs if run.outcome != "skipped"}
    others = [r for r in runs if r.outcome == "skipped" and r.sizes.get(name) not in taken]
    return others if len(taken) == 1 else []


def _dimensions(runs: Iterable[CaseResult]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.sizes))


def _sizes_by_outcome(name: str, runs: Sequence[CaseResult]) -> tuple[list[int], list[int]]:
    """Return the sizes of a dimension that passed, and those that failed, in ascending order."""
    tried = [run for run in runs if run.outcome != "skipped" and name in run.sizes]
    passed = sorted({run.sizes[name] for run in tried if not run.failed})
    return passed, sorted({run.sizes[name] for run in tried if run.failed})


def _decides(name: str, runs: Sequence[CaseResult]) -> bool:
    """Return whether the size decides between success and failure: none has both outcomes."""
    passed, failed = _sizes_by_outcome(name, runs)
    return bool(failed) and bool(passed) and not set(passed) & set(failed)


def _specialized_size(name: str, runs: Sequence[CaseResult], draft: Draft) -> str:
    passed, failed = _sizes_by_outcome(name, runs)
    first = next(run for run in runs if run.failed and name in run.sizes)
    if len(passed) == 1 and passed[0] == draft.traced.get(name, passed[0]):
        where = f"for any size but {passed[0]}, which was traced"
    elif failed[0] > passed[-1]:
        where = f"from size {failed[0]} on, and is correct up to {passed[-1]}"
    elif failed[-1] < passed[0]:
        where = f"up to size {failed[-1]}, and is correct from {passed[0]} on"
    else:
        where = f"at {_listed(failed)}, and is correct at {_listed(passed)}"
    reason = one_line(first.reason, _REASON_LENGTH)
    return f"specialized by tracing: dimension '{name}': it {_verb(first)} {where} ({reason})"


def _verb(run: CaseResult) -> str:
    return "fails" if run.outcome == "refused" else "differs"


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
