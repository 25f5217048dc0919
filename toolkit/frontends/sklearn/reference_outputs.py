# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""scikit-learn's outputs in the order and form of a graph's outputs, and the rows to test on.

scikit-learn computes in 64 bits. A graph in 32 bits has to match on all rows whose result does not
depend on rounding.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from toolkit.feeds.user_samples import Feed
from toolkit.frontends.protocol import Case
from toolkit.frontends.request import Request
from toolkit.frontends.sklearn.input_columns import Array, FloatType, InputTable
from toolkit.frontends.test_inputs import BATCH_SIZES
from toolkit.ir.graph import Graph

_ROUNDING = 1e-6
"""Relative change of the inputs that may not change the result of a test row."""


def cases_of(
    model: Any, table: InputTable, kind: FloatType, dynamic: bool, request: Request
) -> list[Case]:
    """Return test inputs: rows of the example in several batch sizes, then new rows."""
    feed = table.feed(kind)
    if not dynamic:
        return [Case(feed)]
    random = np.random.default_rng(request.seed)
    stable = _stable_rows(model, table, feed, request.tolerance)
    rows = len(next(iter(stable.values())))
    cases = [
        Case({n: v[np.arange(count) % rows] for n, v in stable.items()}, {"batch": count})
        for count in dict.fromkeys((rows, *BATCH_SIZES))
    ]
    mixed = {name: _permuted(value, random) for name, value in feed.items()}
    other = _stable_rows(model, table, mixed, request.tolerance)
    cases.append(Case(other, {"batch": len(next(iter(other.values())))}, "other rows"))
    return cases


def _stable_rows(model: Any, table: InputTable, feed: Feed, tolerance: float) -> Feed:
    """Return the rows whose result does not depend on rounding; all rows if few are left.

    A value equal to a tree's threshold, or a support vector on the border of an outlier detector,
    may fall on either side in another order of operations.
    """

    def outputs(factor: float) -> list[Array]:
        values = to_float64(feed)
        moved = {n: v * factor if v.dtype.kind == "f" else v for n, v in values.items()}
        found = outputs_of(model, table.build(moved), 2)
        return [
            np.concatenate([np.asarray(each) for each in cast("list[Any]", output)], axis=1)
            if isinstance(output, list)
            else np.asarray(_dense(output))
            for output in found
        ]

    usual = outputs(1)
    same = np.ones(len(usual[0]), bool)
    for factor in (1 - _ROUNDING, 1 + _ROUNDING):
        for before, after in zip(usual, outputs(factor), strict=True):
            same &= _equal_rows(before, after, tolerance)
    return {n: v[same] for n, v in feed.items()} if 2 * same.sum() > len(same) else feed


def _equal_rows(before: Array, after: Array, tolerance: float) -> NDArray[np.bool_]:
    equal = before == after
    if before.dtype.kind == "f":
        equal = np.abs(before - after) <= tolerance * np.max(np.abs(before), initial=1e-9)
    return equal.reshape(len(before), -1).all(axis=1)


def to_float64(feed: Feed) -> Feed:
    """Convert floats to 64 bits, in which scikit-learn computes."""
    return {n: v.astype(np.float64) if v.dtype.kind == "f" else v for n, v in feed.items()}


def _permuted(values: Array, random: np.random.Generator) -> Array:
    """Return new rows by permuting each column independently."""
    if values.ndim != 2:
        return random.permutation(values)
    return np.stack([random.permutation(column) for column in values.T], axis=1)


def outputs_of(model: Any, values: Any, count: int) -> list[Any]:
    """Return scikit-learn's outputs, at most `count`, in the order of skl2onnx's graphs."""
    base: Any = importlib.import_module("sklearn.base")
    if not hasattr(model, "predict"):
        return [model.transform(values)]
    second = "predict_proba" if base.is_classifier(model) else "transform"
    methods = [name for name in (second, "decision_function") if hasattr(model, name)]
    return [getattr(model, name)(values) for name in ("predict", *methods[:1])[:count]]


def separated(outputs: Sequence[Any], count: int) -> list[Any]:
    """Split lists of arrays, one per target, into separate outputs if the graph has as many."""
    found: list[Any] = []
    for output in outputs:
        if not isinstance(output, list):
            found.append(output)
        elif len(found) + len(cast("list[Any]", output)) <= count:
            found += cast("list[Any]", output)
        else:  # forests have one output, as wide as the target with the most classes
            arrays = [np.asarray(each) for each in cast("list[Any]", output)]
            width = max(each.shape[1] for each in arrays)
            padded = [np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in arrays]
            found.append(np.stack(padded))
    return found


def _dense(value: Any) -> Any:
    return value.toarray() if hasattr(value, "toarray") else value


def as_declared(graph: Graph, name: str, value: Any) -> Array:
    """Convert an output to the type and shape of the graph's, as from [N] to [N, 1]."""
    array = np.asarray(_dense(value))
    if array.dtype.kind in "OU":
        return array.astype(object)
    array = array.astype(helper.tensor_dtype_to_np_dtype(graph.dtype(name)), copy=False)
    shape = graph.shape(name)
    if shape is None or len(shape) != array.ndim + 1:
        return array
    # for two classes scikit-learn returns one score, most graphs one per class
    return np.stack([-array, array], axis=1) if shape[-1] == 2 else array[:, None]
