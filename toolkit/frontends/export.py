"""`toolkit.export`: export a model to ONNX and verify the graph against its framework.

A front end plans the graphs of a model and exports drafts of each; every draft is run in
onnxruntime and compared with the framework, and the first draft that matches is returned.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from toolkit.errors import NotProven, UsageError
from toolkit.frontends.exported import Exported, ExportedGraph
from toolkit.frontends.protocol import Draft, ExportFailed, Failure, GraphPlan
from toolkit.frontends.request import Axes, Exporter, Request, parse_dynamic
from toolkit.frontends.scratch import Scratch
from toolkit.frontends.select import select_front_end
from toolkit.ir.model import Model
from toolkit.storage.atomic_write import sidecar_of
from toolkit.verification.framework import prove
from toolkit.verification.tolerance import EXPORT_TOLERANCE

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Pass

_MAX_ATTEMPTS = 12
"""Attempts per graph; a safeguard against a front end that never returns None."""
_USUAL_OPSET = 18
"""The opset that exporters write by default."""


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
    tolerance: float = EXPORT_TOLERANCE,
    passes: str | Sequence[Pass | str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Exported:
    """Export a model to ONNX and prove the graph against the framework it comes from.

    `source` is a model object, a file or folder, or text as on the command line. `example` holds
    the arguments of a call: a tuple, a dict of keyword arguments, or a single argument. `dynamic`
    names the dynamic axes, as `{"x": {0: "batch"}}` or `"x:0=batch"`; by default they are detected,
    and `{}` or `"none"` makes every size static. `passes` then optimize the exported graph.

    Raises UsageError if the model cannot be exported as requested, and NotProven if the exported
    graph does not compute the same as the model.
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
    exported = export_request(source, request)
    return exported if passes is None else exported.optimize(passes)


def export_request(source: Any, request: Request) -> Exported:
    """Export a model as a Request describes."""
    started = time.perf_counter()
    chosen = select_front_end(source, request)
    scratch = Scratch()
    try:
        plan = chosen.front_end.plan(chosen.source, chosen.request, scratch.path)
        graphs = {each.name: _export_graph(each, chosen.request, scratch) for each in plan.graphs}
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


def _export_graph(plan: GraphPlan, request: Request, scratch: Scratch) -> ExportedGraph:
    """Return the first draft that matches the framework; raise if there is none."""
    started = time.perf_counter()
    failures: list[Failure] = []
    while len(failures) < _MAX_ATTEMPTS:
        try:
            draft = plan.attempt(failures)
            if draft is None:
                break
            draft = _at_opset(draft, request)
        except ExportFailed as error:
            failures.append(Failure(error.exporter, str(error), dims=error.dims))
            if error.final:
                break
            continue
        request.progress(f"{plan.name}: verifying the graph of {draft.exporter}")
        proof = prove(draft, request)
        if proof.ok:
            model = Model.load(draft.path)
            return ExportedGraph(
                name=plan.name,
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
        _discard(draft, scratch.path)
    raise _no_graph(plan.name, failures, request)


def _discard(draft: Draft, scratch: Path) -> None:
    """Delete a rejected draft, so that the weights of a large model are on disk only once."""
    if draft.path.is_relative_to(scratch):  # an exporter may return a file of the user's own
        draft.path.unlink(missing_ok=True)
        sidecar_of(draft.path).unlink(missing_ok=True)


def _no_graph(name: str, failures: Sequence[Failure], request: Request) -> UsageError | NotProven:
    """Return NotProven if onnxruntime loaded one of the graphs, else UsageError."""
    distinct = list(dict.fromkeys(f.reason for f in failures))
    reasons = "; ".join(distinct)
    if len(distinct) > 1:
        reasons = "; ".join(dict.fromkeys(f"{f.exporter}: {f.reason}" for f in failures))
    if any(f.proof is not None and f.proof.loads for f in failures):
        return NotProven(f"the exported {name} differs from the original: {reasons}")
    hint = ""
    if request.opset is not None and request.opset < _USUAL_OPSET:
        hint = f"; opset {request.opset} may be too old for it, try {_USUAL_OPSET}"
    return UsageError(f"the {name} cannot be exported: {reasons or 'nothing to try'}{hint}")


def _at_opset(draft: Draft, request: Request) -> Draft:
    """Convert the draft to the requested opset, if the exporter wrote another one."""
    if request.opset is None:
        return draft
    model = Model.load(draft.path)
    have = model.opsets.get("", request.opset)
    if have == request.opset:
        return draft
    from toolkit.api import optimize

    converted = optimize(model, f"opset:to={request.opset}", validate="off").model
    if converted.opsets.get("") != request.opset:
        reason = f"it wrote opset {have}, which cannot be converted to {request.opset}"
        raise ExportFailed(draft.exporter, reason)
    path = draft.path.with_name(f"{draft.path.stem}-{request.opset}.onnx")
    return replace(draft, path=converted.save(path))
