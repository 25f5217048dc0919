"""Run one pass, verify the result, and keep or undo it.

If a pass fails verification, its journal is bisected for the first rewrite that breaks the model.
That rewrite is vetoed, and the pass runs again to keep the others.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import PreconditionFailed, ToolkitError, UsageError, summarize
from toolkit.ir.journal import Journal, Rewrite
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Checked, Context, Guarded, Pass
from toolkit.pass_manager.result import PassResult, Undone
from toolkit.verification.tolerance import Tolerance

if TYPE_CHECKING:
    from toolkit.verification.validator import Validator, Verdict

_MOST_VETOES = 12
"""From this many vetoed rewrites on, the whole pass is undone."""
_TOO_LATE = "it redefines outputs, which must happen before anything is quantized"
_RULE_VETO_AFTER = 3
"""From this many vetoed rewrites on, their rule is vetoed."""


def run_pass(item: Pass, model: Model, ctx: Context, validator: Validator | None) -> PassResult:
    """Run the pass on `model` in place until its remaining rewrites pass verification.

    Without a validator, all rewrites are kept.
    """
    started = time.perf_counter()
    vetoes = _Vetoes()
    outcome = None
    if validator is not None and len(validator.feeds):
        ctx.holds = lambda trial: validator.check(trial, item.tolerance).ok
    while outcome is None:
        outcome = _run_once(item, model, ctx, validator, vetoes)
    if outcome.status == "unchanged" and vetoes.undone:
        outcome = PassResult(item.name, "reverted", reason="all its rewrites failed verification")
    model.journal.clear_vetoes()
    model.commit()
    return replace(
        outcome,
        rewrites=sum(map(len, outcome.places.values())),
        rules={rule: len(sites) for rule, sites in outcome.places.items()},
        seconds=time.perf_counter() - started,
        undone=vetoes.undone,
        notes=[*vetoes.given_up, *ctx.notes],
    )


def _run_once(
    item: Pass, model: Model, ctx: Context, validator: Validator | None, vetoes: _Vetoes
) -> PassResult | None:
    """Run the pass; return None if a rewrite was vetoed and the pass must run again."""
    failure = _failure(item, model, ctx)
    if failure is not None:
        model.rollback()
        return failure
    if not len(model.journal):
        return PassResult(item.name, "unchanged")
    if ctx.redefined and ctx.evaluator is not None:
        return _undone_whole(item, model, ctx, _TOO_LATE)
    places = model.journal.places_by_rule()
    if validator is None:
        return PassResult(item.name, "applied", places=places)
    ctx.progress("proving", 0.0)
    verdict = validator.check(model, item.tolerance, redefined=ctx.redefined)
    if verdict.ok:
        validator.accept(verdict)
        validator.redefine(ctx.redefined)
        return PassResult(
            item.name, "applied", error=verdict.error, quality=verdict.quality, places=places
        )
    if ctx.redefined:  # half of the rewrites would compute neither definition
        return _undone_whole(item, model, ctx, verdict.reason, verdict.error)
    ctx.progress("finding the rewrite that breaks it", 0.0)
    culprit, its_verdict = _first_bad(model, validator, item.tolerance, verdict)
    model.rollback()
    if vetoes.add(model.journal, culprit, its_verdict):
        return None
    return PassResult(item.name, "reverted", error=verdict.error, reason=its_verdict.reason)


def _undone_whole(
    item: Pass, model: Model, ctx: Context, reason: str, error: float | None = None
) -> PassResult:
    """Undo a pass that redefines outputs, and drop its notes."""
    model.rollback()
    ctx.notes.clear()
    return PassResult(item.name, "reverted", error=error, reason=reason)


@dataclass(slots=True)
class _Vetoes:
    """The rewrites of a pass that were undone individually, and notes on vetoed rules."""

    undone: list[Undone] = field(default_factory=list[Undone])
    given_up: list[str] = field(default_factory=list[str])

    def add(self, journal: Journal, culprit: Rewrite, verdict: Verdict) -> bool:
        """Veto a rewrite; return False if a veto cannot prevent it or there are too many."""
        found = Undone(culprit.rule, culprit.site, verdict.error, verdict.reason)
        known = any((u.rule, u.site) == (found.rule, found.site) for u in self.undone)
        if culprit.implicit or known or len(self.undone) >= _MOST_VETOES:
            self.undone.clear()
            return False
        self.undone.append(found)
        journal.veto(culprit)
        if sum(u.rule == culprit.rule for u in self.undone) >= _RULE_VETO_AFTER:
            journal.veto_rule(culprit.rule)
            self.given_up.append(
                f"{culprit.rule} disabled after {_RULE_VETO_AFTER} failed rewrites"
            )
        return True


def _failure(item: Pass, model: Model, ctx: Context) -> PassResult | None:
    """Run the pass with its conditions; return its failure, or None.

    A user's pass may raise anything. A UsageError is the user's, and is passed on.
    """
    ctx.notes.clear()
    ctx.report.plans.clear()
    ctx.redefined.clear()
    try:
        with _collector_paused():
            if isinstance(item, Guarded):
                item.requires(model, ctx)
            item.run(model, ctx)
            if isinstance(item, Checked):
                item.ensures(model, ctx)
            if len(model.journal):
                for graph in model.graphs():
                    graph.require_sound()
    except UsageError:
        raise
    except PreconditionFailed as error:
        return PassResult(item.name, "skipped", reason=str(error))
    except ToolkitError as error:
        return PassResult(item.name, "reverted", reason=str(error))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}, line {frame.lineno}"
        return PassResult(item.name, "reverted", reason=f"{summarize(error)} ({where})")
    return None


@contextmanager
def _collector_paused() -> Generator[None]:
    """Pause Python's cycle collector, which would traverse a graph's many live objects repeatedly.

    Measured at 40,000 nodes: 14 % of the time.
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
    """Return the first rewrite after which verification fails, and the verdict.

    Binary search over prefixes of the journal; `verdict` is that of the whole.
    """
    journal = model.journal
    rewrites = journal.rewrites
    ends = [r.start for r in rewrites[1:]] + [len(journal)]
    good, bad = -1, len(rewrites) - 1  # verification passes after `good` and fails after `bad`
    while bad - good > 1:
        middle = (good + bad) // 2
        journal.seek(ends[middle])
        found = validator.check(model, tolerance)
        if found.ok:
            good = middle
        else:
            bad, verdict = middle, found
    return rewrites[bad], verdict
