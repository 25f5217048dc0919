# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The scikit-learn front end, by skl2onnx: estimators, transformers and pipelines of them.

    model                       outputs
    classifier                  label, probabilities (or scores, one per class)
    ... of several targets      label, probabilities_0, probabilities_1, ...
    regressor                   variable
    clustering                  label, scores
    transformer                 variable

The input is one matrix, `input`; a table with columns of different types has one input per column.
Graphs compute in 32-bit floats, or in 64 bits like scikit-learn if that is not precise enough (a
tree's threshold may lie between two 32-bit floats).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.errors import UsageError
from toolkit.feeds.user_samples import Feed
from toolkit.frontends.protocol import AttemptList, Case, Draft, ExportPlan
from toolkit.frontends.request import Axes, Request
from toolkit.frontends.signature import renamed, requested_names
from toolkit.frontends.sklearn.converter import convert
from toolkit.frontends.sklearn.input_columns import FloatType, InputTable, installed
from toolkit.frontends.sklearn.reference_outputs import (
    as_declared,
    cases_of,
    outputs_of,
    separated,
    to_float64,
)
from toolkit.ir.model import Model

_PICKLES = (".pkl", ".pickle", ".joblib")


class SklearnFrontEnd:
    """Exports fitted scikit-learn models."""

    name = "sklearn"
    supports = ()

    def takes(self, source: object) -> bool:
        if isinstance(source, Path):
            return source.suffix in _PICKLES
        modules = (each.__module__ for each in type(source).__mro__)
        return any(module.split(".")[0] == "sklearn" for module in modules)

    def plan(self, source: Any, request: Request, scratch: Path) -> ExportPlan:
        """Plan one graph, in 32-bit floats, or else in 64 bits."""
        if isinstance(source, Path):
            raise UsageError(
                f"'{source}' is a pickle, which runs code when it is read: load it in a function "
                "of your own and export that, as in ./my_model.py:load"
            )
        for package in ("sklearn", "skl2onnx"):
            installed(package)
        _require_fitted(source)
        table = InputTable.of(source, request.example)
        dynamic = request.axes_of(table.feed(np.float32))
        if dynamic is None:
            dynamic = {name: {0: "batch"} for name in table.columns}
        attempts = [
            _attempt(source, table, dynamic, request, scratch, kind)
            for kind in (np.float32, np.float64)
        ]
        return ExportPlan([AttemptList("model", attempts)])


FRONT_END = SklearnFrontEnd()


def _require_fitted(model: Any) -> None:
    validation: Any = importlib.import_module("sklearn.utils.validation")
    try:
        validation.check_is_fitted(model)
    except Exception as error:  # NotFittedError, or not an estimator at all
        raise UsageError(f"the {type(model).__name__} cannot be exported: {error}") from error


def _attempt(
    model: Any,
    table: InputTable,
    dynamic: Axes,
    request: Request,
    scratch: Path,
    kind: FloatType,
) -> Callable[[], Draft]:
    def draft() -> Draft:
        path = convert(model, table.feed(kind), dynamic, request, scratch, kind)
        graph = Model.load(path).graph
        outputs = list(graph.outputs)
        names = requested_names(request, list(table.columns), outputs)
        columns = {names.get(name, name): name for name in table.columns}

        def reference(feed: Feed) -> dict[str, Any]:
            values = to_float64({columns[name]: value for name, value in feed.items()})
            found = separated(outputs_of(model, table.build(values), len(outputs)), len(outputs))
            pairs = list(zip(outputs, found, strict=False))
            return {names.get(n, n): as_declared(graph, n, value) for n, value in pairs}

        cases = [
            Case({names.get(n, n): v for n, v in case.feed.items()}, case.sizes, case.label)
            for case in cases_of(model, table, kind, bool(dynamic), request)
        ]
        axes = {names.get(name, name): dims for name, dims in dynamic.items()}
        exact = np.dtype(kind).itemsize == 8
        note = ("computes in 64 bits: 32-bit floats do not reproduce the model",) if exact else ()
        return Draft(renamed(path, names), reference, cases, "skl2onnx", axes, notes=note)

    return draft
