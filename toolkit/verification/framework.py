"""Every exported graph is run in onnxruntime against its framework, size by size.

Parity is max |onnxruntime - framework| relative to the output's scale. Where a graph differs at
some sizes or values only, tracing has baked something in: `findings` says what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from toolkit.errors import ModelError, RuntimeRefused, UsageError, one_line, summarize
from toolkit.frontends.protocol import Case, Draft
from toolkit.frontends.request import Request
from toolkit.ir.model import Model
from toolkit.runtime.diagnose import why_refused
from toolkit.runtime.session import Session
from toolkit.verification.compare import Difference, compare, json_number, worst
from toolkit.verification.structure import check_input

Outcome = Literal["equal", "differs", "refused", "skipped"]
"""`refused`: onnxruntime does not run it, though the framework does. `skipped`: the framework
itself does not, which nobody holds against the graph."""


_ROUNDINGS = 8
"""Steps of a half type that two orders of computing may be apart, at the output's scale."""
_SHORT = 200
"""Characters of a reason, of which there may be several in a line."""


@dataclass(frozen=True, slots=True)
class Run:
    """One case: the sizes, and how the graph's outputs compared."""

    sizes: Mapping[str, int]
    label: str
    outcome: Outcome
    error: float | None = None
    """The largest difference of any output; None when nothing was compared."""
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome in ("differs", "refused")

    def __str__(self) -> str:
        """`batch 2, sequence 8, zeros`"""
        shown = [f"{name} {size}" for name, size in self.sizes.items()]
        return ", ".join([*shown, self.label] if self.label else shown) or "the example"

    def to_json(self) -> dict[str, Any]:
        return {
            "sizes": dict(self.sizes),
            "label": self.label,
            "outcome": self.outcome,
            "error": json_number(self.error),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Proof:
    """What running a graph against its framework has shown."""

    runs: tuple[Run, ...]
    tolerance: float
    findings: tuple[str, ...] = ()
    """What is wrong with the graph, in lines; empty when it holds."""
    notes: tuple[str, ...] = ()
    loads: bool = True
    """Whether onnxruntime loads the graph at all."""

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def error(self) -> float:
        """The largest difference of all runs that were compared."""
        return max((run.error for run in self.runs if run.error is not None), default=0.0)

    @property
    def sizes(self) -> dict[str, list[int]]:
        """The sizes that each dynamic dimension was run with."""
        seen: dict[str, set[int]] = {}
        for run in self.runs:
            if run.outcome == "equal":
                for name, size in run.sizes.items():
                    seen.setdefault(name, set()).add(size)
        return {name: sorted(found) for name, found in seen.items()}

    @property
    def failing(self) -> frozenset[str]:
        """The dynamic dimensions that the failures depend on; empty when it is not the sizes."""
        named = _dimensions(self.runs)
        return frozenset(n for n in named if _blamed(n, self.runs) or _refusals(n, self.runs))

    def summary(self) -> str:
        """`equal to 1.2e-07 on 8 inputs (batch 1, 2, 5)`"""
        if not self.ok:
            return "; ".join(self.findings)
        count = sum(run.outcome == "equal" for run in self.runs)
        sizes = "; ".join(f"{n} {', '.join(map(str, s))}" for n, s in self.sizes.items())
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
    """Run the draft on all of its cases.

    Raises UsageError when the framework refuses the first case, which is the user's example.
    """
    model = Model.load(draft.path)
    try:
        check_input(model)
        session = Session(model, custom_ops=request.custom_ops)
    except (ModelError, RuntimeRefused) as error:
        reason = _not_loaded(model, error, request)
        return Proof((), request.tolerance, (reason,), loads=False)
    unstable = _unstable(draft)
    if unstable:
        return Proof((), request.tolerance, (unstable,))
    unused = [name for name in draft.cases[0].feed if name not in model.graph.inputs]
    runs = [_try(session, draft, case, unused, request) for case in draft.cases]
    del session
    if not any(run.failed for run in runs):
        runs += _deployed(model, draft, unused, request)
    notes = [f"input '{name}' is not used: the graph does not take it" for name in unused]
    skipped = [run for run in runs if run.outcome == "skipped"]
    notes += [f"the model itself refuses {run}: {run.reason}" for run in skipped]
    findings = [*_findings(draft, runs), *_untried(runs)]
    return Proof(tuple(runs), request.tolerance, tuple(findings), tuple(notes))


def _deployed(model: Model, draft: Draft, unused: Sequence[str], request: Request) -> Iterator[Run]:
    """What fails with all that the runtime does at load; the first case and the last tell."""
    how = "with the runtime's optimizations on"
    try:
        session = Session(model, optimize=True, custom_ops=request.custom_ops)
    except RuntimeRefused as refusal:
        yield Run(draft.cases[0].sizes, how, "refused", None, str(refusal))
        return
    for case in (draft.cases[0], *draft.cases[1:][-1:]):
        run = _try(session, draft, case, unused, request)
        if run.failed:
            yield replace(run, label=", ".join(filter(None, [run.label, how])))


def _not_loaded(model: Model, error: Exception, request: Request) -> str:
    """Why onnxruntime does not load it: all causes, where they can be told apart."""
    causes = [] if isinstance(error, ModelError) else why_refused(model, request.custom_ops)
    return f"onnxruntime does not load it: {'; '.join(causes) or error}"


def _try(
    session: Session, draft: Draft, case: Case, unused: Sequence[str], request: Request
) -> Run:
    """One case in the framework, then in the runtime; outputs are not kept."""
    try:
        expected = draft.reference(case.feed)
    except Exception as error:  # a framework may raise anything
        return Run(case.sizes, case.label, "skipped", None, summarize(error))
    return _run(session, _without(case, unused), expected, request)


def _without(case: Case, names: Sequence[str]) -> Case:
    """The case without inputs that the graph does not have: exporters drop what nobody reads."""
    if not names:
        return case
    return replace(case, feed={n: v for n, v in case.feed.items() if n not in names})


def _unstable(draft: Draft) -> str:
    """What to say of a model that answers otherwise each time: nothing can be shown of it."""
    feed = draft.cases[0].feed
    try:
        first, again = draft.reference(feed), draft.reference(feed)
    except Exception as error:  # as above
        message = f"the model does not run on the example: {summarize(error)}"
        raise UsageError(message) from error
    random = [name for name, value in first.items() if compare(value, again[name]).relative > 1e-3]
    if not random:
        return ""
    return (
        f"output '{random[0]}' of the model itself differs from run to run (random numbers, or "
        "dropout that does not ask for the mode), which nothing can be compared with"
    )


def _run(session: Session, case: Case, expected: Mapping[str, Any], request: Request) -> Run:
    try:
        outputs = session.run(case.feed, list(expected))
    except RuntimeRefused as refusal:
        return Run(case.sizes, case.label, "refused", None, str(refusal))
    found = {
        name: _difference(wanted, output)
        for (name, wanted), output in zip(expected.items(), outputs, strict=True)
        if not (case.tied and _are_positions(wanted))
    }
    total = worst(list(found.values()))
    over = {n: d for n, d in found.items() if d.relative > allowed(expected[n], request.tolerance)}
    if not over:
        return Run(case.sizes, case.label, "equal", total.relative)
    name, bad = max(over.items(), key=lambda item: item[1].relative)
    why = bad.reason or f"off by {bad.relative:.1e} of its scale"
    return Run(case.sizes, case.label, "differs", total.relative, f"output '{name}': {why}")


def _difference(expected: Any, actual: Any) -> Difference:
    """As `compare`, but types count too: a float64 that became float32 is not the same output."""
    found = compare(expected, actual)
    kinds = getattr(expected, "dtype", None), getattr(actual, "dtype", None)
    # strings come as objects from one side and as fixed-width text from the other
    if kinds[0] != kinds[1] and not {"O", "U"} >= {np.dtype(k).kind for k in kinds if k}:
        return Difference(math.inf, math.inf, f"{kinds[1]} instead of {kinds[0]}")
    return found


def allowed(value: Any, tolerance: float) -> float:
    """The tolerance for an output: no type is held to more digits than it has."""
    kind = np.asarray(value).dtype
    if kind.itemsize != 2 or kind.kind in "iub":
        return tolerance
    return max(tolerance, _ROUNDINGS * (2.0**-10 if kind == np.float16 else 2.0**-7))


def _are_positions(value: Any) -> bool:
    return np.asarray(value).dtype.kind in "iu"


# What tracing has baked in -----------------------------------------------------------------------


def _findings(draft: Draft, runs: Sequence[Run]) -> Iterable[str]:
    runs = [run for run in runs if run.outcome != "skipped"]
    failed = [run for run in runs if run.failed]
    if not failed:
        return
    first = failed[0]
    if len(failed) == len(runs):
        yield f"it {_verb(first)} on every input, as with {first}: {one_line(first.reason, _SHORT)}"
        return
    blamed = [name for name in _dimensions(runs) if _blamed(name, runs)]
    for name in blamed:
        yield _baked_size(name, runs, draft)
    if not blamed:
        labels = list(dict.fromkeys(run.label or str(run) for run in failed))
        yield (
            f"baked in by tracing: it {_verb(first)} for other values, not for other sizes "
            f"({'; '.join(labels)}), as when a branch of the model was taken once and for all: "
            f"{one_line(first.reason, _SHORT)}"
        )


def _untried(runs: Sequence[Run]) -> Iterable[str]:
    """Dimensions that are called dynamic, though the model itself takes one size of them only."""
    for name in _dimensions(runs):
        refusals = _refusals(name, runs)
        if refusals:
            size = next(run.sizes[name] for run in runs if run.outcome != "skipped")
            reason = refusals[0].reason
            yield f"dimension '{name}': the model itself takes no size but {size} ({reason})"


def _refusals(name: str, runs: Sequence[Run]) -> list[Run]:
    """The runs at other sizes that the framework refused, if there is one size that it takes."""
    taken = {run.sizes.get(name) for run in runs if run.outcome != "skipped"}
    others = [r for r in runs if r.outcome == "skipped" and r.sizes.get(name) not in taken]
    return others if len(taken) == 1 else []


def _dimensions(runs: Iterable[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.sizes))


def _blamed(name: str, runs: Sequence[Run]) -> bool:
    """Whether the size of this dimension tells the failures: no size both holds and fails."""
    runs = [run for run in runs if run.outcome != "skipped" and name in run.sizes]
    held = {run.sizes[name] for run in runs if not run.failed}
    failed = {run.sizes[name] for run in runs if run.failed}
    return bool(failed) and bool(held) and not held & failed


def _baked_size(name: str, runs: Sequence[Run], draft: Draft) -> str:
    runs = [run for run in runs if name in run.sizes]
    held = sorted({run.sizes[name] for run in runs if not run.failed})
    failed = sorted({run.sizes[name] for run in runs if run.failed})
    worst_run = next(run for run in runs if run.failed)
    if len(held) == 1 and held[0] == draft.traced.get(name, held[0]):
        what = f"it {_verb(worst_run)} for any but {held[0]}, the size that was traced"
    elif failed[0] > held[-1]:
        what = f"it {_verb(worst_run)} from size {failed[0]} on, and holds up to {held[-1]}"
    elif failed[-1] < held[0]:
        what = f"it {_verb(worst_run)} up to size {failed[-1]}, and holds from {held[0]} on"
    else:
        what = f"it {_verb(worst_run)} at {_listed(failed)}, and holds at {_listed(held)}"
    return f"baked in by tracing: dimension '{name}': {what} ({one_line(worst_run.reason, _SHORT)})"


def _verb(run: Run) -> str:
    return "refuses to run" if run.outcome == "refused" else "differs"


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
