"""From a framework to a proven ONNX graph: `toolkit.export(source, ...)`.

One function for all front ends. A front end plans the graphs of a model and drafts each one; every
draft is run in onnxruntime against the framework, and only what holds is handed back. The module
itself is callable, since `toolkit.export` names both it and the function.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from toolkit.errors import NotProven, UsageError
from toolkit.frontends.exported import Exported, ExportedGraph
from toolkit.frontends.protocol import (
    Case,
    Draft,
    ExportFailed,
    Failure,
    FrontEnd,
    InOrder,
    Part,
    Plan,
)
from toolkit.frontends.request import Axes, Exporter, Request, parse_dynamic
from toolkit.frontends.scratch import Scratch
from toolkit.ir.model import Model
from toolkit.storage.atomic_write import sidecar_of
from toolkit.verification.framework import Proof, Run, prove

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Pass

__all__ = [
    "Axes",
    "Case",
    "Draft",
    "ExportFailed",
    "Exported",
    "ExportedGraph",
    "Failure",
    "FrontEnd",
    "InOrder",
    "Part",
    "Plan",
    "Proof",
    "Request",
    "Run",
    "export",
    "prove",
]

_MOST_ATTEMPTS = 12
_USUAL_OPSET = 18
"""What exporters write on their own."""


def export(
    source: Any,
    example: Any = None,
    *,
    task: str | None = None,
    framework: str | None = None,
    exporter: Exporter = "auto",
    opset: int | None = None,
    input_names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    dynamic: Axes | str | Iterable[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    translations: Mapping[Any, Any] | None = None,
    custom_ops: Sequence[str] = (),
    trust_remote_code: bool = False,
    seed: int = 0,
    tolerance: float = 1e-4,
    passes: str | Sequence[Pass | str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Exported:
    """Export a model to ONNX and prove the graph against the framework it comes from.

    `source` is a model object, a file or folder, or text as on the command line. `example` is what
    the model is called with: a tuple of arguments, a dict of keyword arguments, or one argument.
    `dynamic` names axes whose size may change, as `{"x": {0: "batch"}}` or `"x:0=batch"`; without
    it they are found out, and `{}` or `"none"` fixes every size. `passes` go on into the optimizer.

    Raises UsageError for what cannot be exported as asked, and NotProven when there is a graph but
    it differs from the model.
    """
    request = Request(
        task=task,
        framework=framework,
        exporter=exporter,
        opset=opset,
        input_names=tuple(input_names),
        output_names=tuple(output_names),
        dynamic=_axes(dynamic),
        example=example,
        weights=weights,
        translations=dict(translations or {}),
        custom_ops=tuple(custom_ops),
        trust_remote_code=trust_remote_code,
        seed=seed,
        tolerance=tolerance,
        progress=progress or (lambda _: None),
    )
    exported = export_as(source, request)
    return exported if passes is None else exported.optimize(passes)


def export_as(source: Any, request: Request) -> Exported:
    """The same for a request that is already made."""
    from toolkit.frontends.select import choose

    started = time.perf_counter()
    chosen = choose(source, request)
    scratch = Scratch()
    try:
        plan = chosen.front_end.plan(chosen.source, chosen.request, scratch.path)
        graphs = {part.name: _settle(part, chosen.request, scratch.path) for part in plan.parts}
    except BaseException:
        scratch.remove()
        raise
    for graph in graphs.values():
        graph.model.weights.depend_on(scratch)
    return Exported(
        graphs=graphs,
        framework=chosen.front_end.name,
        request=chosen.request,
        companions=plan.companions,
        notes=plan.notes,
        seconds=time.perf_counter() - started,
        scratch=scratch,
    )


def _axes(given: Axes | str | Iterable[str] | None) -> Axes | None:
    if given is None or isinstance(given, Mapping):
        return cast("Axes | None", given)
    return parse_dynamic([given] if isinstance(given, str) else given)


# One graph ---------------------------------------------------------------------------------------


def _settle(part: Part, request: Request, scratch: Path) -> ExportedGraph:
    """The first draft of a part that holds; raises when none does."""
    started = time.perf_counter()
    failures: list[Failure] = []
    while len(failures) < _MOST_ATTEMPTS:
        try:
            draft = part.attempt(failures)
            if draft is None:
                break
            draft = _at_opset(draft, request)
        except ExportFailed as error:
            failures.append(Failure(error.exporter, str(error), dims=error.dims))
            if error.final:
                break
            continue
        request.progress(f"{part.name}: proving what {draft.exporter} wrote")
        proof = prove(draft, request)
        if proof.ok:
            model = Model.load(draft.path)
            return ExportedGraph(
                name=part.name,
                model=model,
                proof=proof,
                exporter=draft.exporter,
                dynamic={n: dims for n, dims in draft.dynamic.items() if n in model.graph.inputs},
                cases=tuple(draft.cases),
                failures=tuple(failures),
                notes=draft.notes,
                seconds=time.perf_counter() - started,
            )
        failures.append(Failure(draft.exporter, proof.summary(), proof, proof.failing))
        _discard(draft, scratch)
    raise _none_holds(part, failures, request)


def _discard(draft: Draft, scratch: Path) -> None:
    """Make room: a large model's weights are on the disk once, not once for each attempt."""
    if draft.path.is_relative_to(scratch):  # an exporter may have named a file of the user's own
        draft.path.unlink(missing_ok=True)
        sidecar_of(draft.path).unlink(missing_ok=True)


def _none_holds(
    part: Part, failures: Sequence[Failure], request: Request
) -> UsageError | NotProven:
    """Why there is no graph: not proven if there was one at all, else bad input."""
    distinct = list(dict.fromkeys(f.reason for f in failures))
    reasons = "; ".join(distinct)
    if len(distinct) > 1:
        reasons = "; ".join(dict.fromkeys(f"{f.exporter}: {f.reason}" for f in failures))
    if any(f.proof is not None and f.proof.loads for f in failures):
        return NotProven(f"the exported {part.name} is not the same as the original: {reasons}")
    hint = ""
    if request.opset is not None and request.opset < _USUAL_OPSET:
        hint = f"; opset {request.opset} may lack what it needs, {_USUAL_OPSET} is usual"
    return UsageError(f"the {part.name} cannot be exported: {reasons or 'no way is known'}{hint}")


def _at_opset(draft: Draft, request: Request) -> Draft:
    """The draft in the opset that was asked for: lifted where the exporter stopped below it."""
    if request.opset is None:
        return draft
    model = Model.load(draft.path)
    have = model.opsets.get("", request.opset)
    if have == request.opset:
        return draft
    if have > request.opset:
        raise ExportFailed(draft.exporter, f"it wrote opset {have}, not {request.opset}")
    from toolkit.api import optimize

    lifted = optimize(model, f"opset:to={request.opset}", validate="off").model
    if lifted.opsets.get("") != request.opset:
        reason = f"it wrote opset {have}, which cannot be lifted to {request.opset}"
        raise ExportFailed(draft.exporter, reason)
    path = draft.path.with_name(f"{draft.path.stem}-{request.opset}.onnx")
    return replace(draft, path=lifted.save(path))


class _Callable(ModuleType):
    """`toolkit.export` is this package and the function in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Exported:
        return export(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
