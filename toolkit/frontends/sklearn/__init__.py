# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""scikit-learn, through skl2onnx: classifiers, regressors, transformers, and pipelines of them.

    model                   inputs              outputs
    classifier              input, or columns   label, probabilities (or scores, one for each class)
    ... of several targets  the same            label, probabilities_0, probabilities_1, ...
    regressor               the same            variable
    clustering              the same            label, scores
    transformer             the same            variable

A table with named columns of several types becomes one input for each column. Graphs compute in
32-bit floats; where that is not enough (a threshold in a tree falls between two of them), they
compute in 64 bits, as scikit-learn does.
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
from toolkit.frontends.request import Axes, Request, resolve_axes
from toolkit.frontends.signature import new_names, renamed
from toolkit.frontends.sklearn.converter import written
from toolkit.frontends.sklearn.input_columns import InputTable, Kind, installed
from toolkit.frontends.sklearn.reference_outputs import (
    answers_of,
    as_declared,
    cases_of,
    one_by_one,
    wide,
)
from toolkit.ir.model import Model

_PICKLES = (".pkl", ".pickle", ".joblib")


class SklearnFrontEnd:
    """The front end of scikit-learn."""

    name = "sklearn"
    supports = ()

    def takes(self, source: object) -> bool:
        if isinstance(source, Path):
            return source.suffix in _PICKLES
        modules = (each.__module__ for each in type(source).__mro__)
        return any(module.split(".")[0] == "sklearn" for module in modules)

    def plan(self, source: Any, request: Request, scratch: Path) -> ExportPlan:
        if isinstance(source, Path):
            raise UsageError(
                f"'{source}' is a pickle, which runs code when it is read: load it in a function "
                "of your own and name that, as in ./my_model.py:load"
            )
        for package in ("sklearn", "skl2onnx"):
            installed(package)
        _require_fitted(source)
        table = InputTable.of(source, request.example)
        dynamic = {name: {0: "batch"} for name in table.columns}
        if request.dynamic is not None:
            ranks = {name: value.ndim for name, value in table.feed(np.float32).items()}
            dynamic = resolve_axes(request.dynamic, ranks)
        ways = [
            _way(source, table, dynamic, request, scratch, kind)
            for kind in (np.float32, np.float64)
        ]
        return ExportPlan([AttemptList("model", ways)])


FRONT_END = SklearnFrontEnd()


def _require_fitted(model: Any) -> None:
    validation: Any = importlib.import_module("sklearn.utils.validation")
    try:
        validation.check_is_fitted(model)
    except Exception as error:  # NotFittedError, or an object that is no estimator
        raise UsageError(f"the {type(model).__name__} cannot be exported: {error}") from error


def _way(
    model: Any,
    table: InputTable,
    dynamic: Axes,
    request: Request,
    scratch: Path,
    kind: Kind,
) -> Callable[[], Draft]:
    def draft() -> Draft:
        path = written(model, table.feed(kind), dynamic, request, scratch, kind)
        graph = Model.load(path).graph
        outputs = list(graph.outputs)
        names = {
            **new_names("input", list(table.columns), request.input_names),
            **new_names("output", outputs, request.output_names),
        }
        given = {names.get(name, name): name for name in table.columns}

        def reference(feed: Feed) -> dict[str, Any]:
            values = wide({given[name]: value for name, value in feed.items()})
            found = one_by_one(answers_of(model, table.build(values), len(outputs)), len(outputs))
            pairs = list(zip(outputs, found, strict=False))
            return {names.get(n, n): as_declared(graph, n, value) for n, value in pairs}

        cases = [
            Case({names.get(n, n): v for n, v in case.feed.items()}, case.sizes, case.label)
            for case in cases_of(model, table, kind, bool(dynamic), request)
        ]
        axes = {names.get(name, name): dims for name, dims in dynamic.items()}
        exact = np.dtype(kind).itemsize == 8
        note = ("32-bit floats do not reproduce it: it computes in 64 bits",) if exact else ()
        return Draft(renamed(path, names), reference, cases, "skl2onnx", axes, notes=note)

    return draft
