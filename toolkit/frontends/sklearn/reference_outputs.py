# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What scikit-learn says, in the order and the form of a graph's outputs, and to which rows.

In 64 bits, as it computes; a graph of fewer has to say the same of all rows whose answer does not
hang on the last bits.
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
from toolkit.frontends.sklearn.input_columns import Array, InputTable, Kind
from toolkit.frontends.test_inputs import BATCH_SIZES
from toolkit.ir.graph import Graph

_LAST_BITS = 1e-6


def cases_of(
    model: Any, table: InputTable, kind: Kind, dynamic: bool, request: Request
) -> list[Case]:
    """Rows of the example, in batches of several sizes; then rows that were not in it."""
    feed = table.feed(kind)
    if not dynamic:
        return [Case(feed)]
    random = np.random.default_rng(request.seed)
    decided = _decided(model, table, feed, request.tolerance)
    rows = len(next(iter(decided.values())))

    def taken(count: int) -> Feed:
        return {name: value[np.arange(count) % rows] for name, value in decided.items()}

    cases = [Case(taken(count), {"batch": count}) for count in dict.fromkeys((rows, *BATCH_SIZES))]
    mixed = {name: _mixed(value, random) for name, value in feed.items()}
    other = _decided(model, table, mixed, request.tolerance)
    cases.append(Case(other, {"batch": len(next(iter(other.values())))}, "other rows"))
    return cases


def _decided(model: Any, table: InputTable, feed: Feed, tolerance: float) -> Feed:
    """The rows whose answer does not depend on the last bits of the numbers.

    A value that equals a tree's threshold, or a support vector on the border of an outlier
    detector, may end up on either side in another order of operations. All rows, where most are so.
    """

    def answers(factor: float) -> list[Array]:
        moved = {n: v * factor if v.dtype.kind == "f" else v for n, v in wide(feed).items()}
        found = answers_of(model, table.build(moved), 2)
        return [_by_row(a) if isinstance(a, list) else np.asarray(_dense(a)) for a in found]

    usual = answers(1)
    same = np.ones(len(usual[0]), bool)
    for factor in (1 - _LAST_BITS, 1 + _LAST_BITS):
        for before, after in zip(usual, answers(factor), strict=True):
            same &= _rows_alike(before, after, tolerance)
    return {n: v[same] for n, v in feed.items()} if 2 * same.sum() > len(same) else feed


def _rows_alike(before: Array, after: Array, tolerance: float) -> NDArray[np.bool_]:
    alike = before == after
    if before.dtype.kind == "f":
        alike = np.abs(before - after) <= tolerance * np.max(np.abs(before), initial=1e-9)
    return alike.reshape(len(before), -1).all(axis=1)


def wide(feed: Feed) -> Feed:
    """In 64 bits, as scikit-learn computes."""
    return {n: v.astype(np.float64) if v.dtype.kind == "f" else v for n, v in feed.items()}


def _mixed(values: Array, random: np.random.Generator) -> Array:
    """Rows that were not in the example: every column has values of its own, in another order."""
    if values.ndim != 2:
        return random.permutation(values)
    return np.stack([random.permutation(column) for column in values.T], axis=1)


def answers_of(model: Any, values: Any, count: int) -> list[Any]:
    """What scikit-learn says, output by output, in the order of skl2onnx's graphs."""
    base: Any = importlib.import_module("sklearn.base")
    if base.is_classifier(model):
        found = [model.predict(values)]
        if count > 1:
            found.append(_scores(model, values))
    elif hasattr(model, "predict"):
        found = [model.predict(values)]
        if count > 1 and hasattr(model, "transform"):
            found.append(model.transform(values))
        elif count > 1 and hasattr(model, "decision_function"):
            found.append(model.decision_function(values))
    else:
        found = [model.transform(values)]
    return found


def one_by_one(answers: Sequence[Any], count: int) -> list[Any]:
    """Probabilities of several targets, which come as a list, in as many outputs as there are."""
    found: list[Any] = []
    for answer in answers:
        if not isinstance(answer, list):
            found.append(answer)
        elif len(found) + len(cast("list[Any]", answer)) <= count:
            found += cast("list[Any]", answer)
        else:  # forests put all into one, as wide as the target with the most classes
            arrays = [np.asarray(each) for each in cast("list[Any]", answer)]
            width = max(each.shape[1] for each in arrays)
            found.append(np.stack([_padded(each, width) for each in arrays]))
    return found


def _padded(array: Array, width: int) -> Array:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])))


def _by_row(answer: list[Any]) -> Array:
    return np.concatenate([np.asarray(each) for each in answer], axis=1)


def _scores(model: Any, values: Any) -> Any:
    if hasattr(model, "predict_proba"):
        return model.predict_proba(values)
    return model.decision_function(values)


def _dense(value: Any) -> Any:
    return value.toarray() if hasattr(value, "toarray") else value


def as_declared(graph: Graph, name: str, value: Any) -> Array:
    """An answer in the type and shape of the graph's output: [N, 1] where scikit-learn has [N]."""
    array = np.asarray(_dense(value))
    if array.dtype.kind in "OU":
        return array.astype(object)
    array = array.astype(helper.tensor_dtype_to_np_dtype(graph.dtype(name)), copy=False)
    shape = graph.shape(name)
    if shape is None or len(shape) != array.ndim + 1:
        return array
    # of two classes, scikit-learn gives one score, and most graphs one for each
    return np.stack([-array, array], axis=1) if shape[-1] == 2 else array[:, None]
