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
import locale
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, helper

from toolkit.errors import UsageError, summarize
from toolkit.export.cases import BATCH_SIZES
from toolkit.export.contract import new_names, rename_values, renamed
from toolkit.export.draft import Case, Draft, ExportFailed, InOrder, Plan
from toolkit.export.request import Axes, Request, resolve_axes
from toolkit.feeds.samples import Feed
from toolkit.graph import Graph
from toolkit.model import Model

Array = NDArray[Any]

_PICKLES = (".pkl", ".pickle", ".joblib")
_INPUT = "input"
_ROWS = 8
_LAST_BITS = 1e-6
_USUAL_LOCALE, _PLAIN_LOCALE = "en_US.UTF-8", "C.UTF-8"
_ML_OPSET = 3
"""Of ai.onnx.ml: the newest that all of skl2onnx's converters write."""


class ScikitLearn:
    """The front end of scikit-learn."""

    name = "sklearn"
    answers = ()

    def takes(self, source: object) -> bool:
        if isinstance(source, Path):
            return source.suffix in _PICKLES
        modules = (each.__module__ for each in type(source).__mro__)
        return any(module.split(".")[0] == "sklearn" for module in modules)

    def plan(self, source: Any, request: Request, scratch: Path) -> Plan:
        if isinstance(source, Path):
            raise UsageError(
                f"'{source}' is a pickle, which runs code when it is read: load it in a function "
                "of your own and name that, as in ./my_model.py:load"
            )
        for package in ("sklearn", "skl2onnx"):
            _require(package)
        _require_fitted(source)
        table = _Table.of(source, request.example)
        dynamic = {name: {0: "batch"} for name in table.columns}
        if request.dynamic is not None:
            ranks = {name: value.ndim for name, value in table.feed(np.float32).items()}
            dynamic = resolve_axes(request.dynamic, ranks)
        ways = [
            _way(source, table, dynamic, request, scratch, kind)
            for kind in (np.float32, np.float64)
        ]
        return Plan([InOrder("model", ways)])


FRONT_END = ScikitLearn()


def _require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(
            f"scikit-learn models need {package}: pip install 'onnx-toolkit-passes[sklearn]'"
        ) from error


def _require_fitted(model: Any) -> None:
    validation: Any = importlib.import_module("sklearn.utils.validation")
    try:
        validation.check_is_fitted(model)
    except Exception as error:  # NotFittedError, or an object that is no estimator
        raise UsageError(f"the {type(model).__name__} cannot be exported: {error}") from error


# Inputs ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Table:
    """The example: rows of one matrix, or of columns that have types of their own."""

    columns: Mapping[str, Array]
    """By input name, each with rows first."""
    build: Callable[[Feed], Any]
    """What scikit-learn takes, of a feed."""

    @classmethod
    def of(cls, model: Any, example: Any) -> _Table:
        if isinstance(example, tuple) and len(cast("tuple[Any, ...]", example)) == 1:
            (example,) = cast("tuple[Any]", example)
        if hasattr(example, "columns") and hasattr(example, "dtypes"):
            return cls._of_frame(example)
        if isinstance(example, Mapping):
            pandas = _require("pandas")
            return cls._of_frame(pandas.DataFrame(example))
        if example is None:
            count = getattr(model, "n_features_in_", None)
            if count is None:
                raise UsageError(
                    f"the {type(model).__name__} does not say what it takes: give an example"
                )
            example = np.random.default_rng(0).standard_normal((_ROWS, count))
        values = np.asarray(example)
        if values.ndim == 1 and values.dtype.kind in "fiu":
            values = values.reshape(1, -1)
        if values.dtype == object:
            values = values.astype(str)
        return cls({_INPUT: values}, lambda feed: feed[_INPUT])

    @classmethod
    def _of_frame(cls, frame: Any) -> _Table:
        """A frame of numbers alone is a matrix; else each column is an input."""
        names = [str(name) for name in frame.columns]
        kinds = {np.asarray(frame[name]).dtype.kind for name in frame.columns}
        if kinds <= set("fiub") and len(kinds) == 1:

            def matrix(feed: Feed) -> Any:
                return type(frame)(feed[_INPUT], columns=frame.columns)

            return cls({_INPUT: np.asarray(frame)}, matrix)

        def columns(feed: Feed) -> Any:
            return type(frame)({name: feed[name].reshape(-1) for name in names})

        made = {str(name): _column(frame[name]) for name in frame.columns}
        return cls(made, columns)

    def feed(self, kind: type[np.floating[Any]]) -> Feed:
        """The example as arrays that the graph takes, floats in these."""
        return {
            name: value.astype(kind) if value.dtype.kind in "fiu" else value
            for name, value in self.columns.items()
        }


def _column(series: Any) -> Array:
    values = np.asarray(series)
    if values.dtype == object:
        values = values.astype(str)
    return values.reshape(-1, 1)


# The graph ---------------------------------------------------------------------------------------


def _way(
    model: Any,
    table: _Table,
    dynamic: Axes,
    request: Request,
    scratch: Path,
    kind: type[np.floating[Any]],
) -> Callable[[], Draft]:
    def draft() -> Draft:
        path = _written(model, table.feed(kind), dynamic, request, scratch, kind)
        graph = Model.load(path).graph
        outputs = list(graph.outputs)
        names = {
            **new_names("input", list(table.columns), request.input_names),
            **new_names("output", outputs, request.output_names),
        }
        given = {names.get(name, name): name for name in table.columns}

        def reference(feed: Feed) -> dict[str, Any]:
            values = _wide({given[name]: value for name, value in feed.items()})
            found = _one_by_one(_answers(model, table.build(values), len(outputs)), len(outputs))
            pairs = list(zip(outputs, found, strict=False))
            return {names.get(n, n): _as_declared(graph, n, value) for n, value in pairs}

        cases = [
            Case({names.get(n, n): v for n, v in case.feed.items()}, case.sizes, case.label)
            for case in _cases(model, table, kind, bool(dynamic), request)
        ]
        axes = {names.get(name, name): dims for name, dims in dynamic.items()}
        exact = np.dtype(kind).itemsize == 8
        note = ("32-bit floats do not reproduce it: it computes in 64 bits",) if exact else ()
        return Draft(renamed(path, names), reference, cases, "skl2onnx", axes, notes=note)

    return draft


def _written(
    model: Any,
    feed: Feed,
    dynamic: Axes,
    request: Request,
    scratch: Path,
    kind: type[np.floating[Any]],
) -> Path:
    skl2onnx = _require("skl2onnx")
    types: Any = importlib.import_module("skl2onnx.common.data_types")
    number = types.DoubleTensorType if np.dtype(kind).itemsize == 8 else types.FloatTensorType

    def declared(name: str, value: Array) -> Any:
        shape = [None if 0 in dynamic.get(name, {}) else value.shape[0], *value.shape[1:]]
        if value.dtype.kind == "U":
            return types.StringTensorType(shape)
        return types.BooleanTensorType(shape) if value.dtype.kind == "b" else number(shape)

    newest = int(skl2onnx.__max_supported_opset__)
    opset = {"": min(request.opset or newest, newest), "ai.onnx.ml": _ML_OPSET}
    request.progress(f"exporting with skl2onnx, {np.dtype(kind).name}")
    try:
        inputs = [(name, declared(name, value)) for name, value in feed.items()]
        made = _converted(skl2onnx, model, inputs, opset)
    except Exception as error:  # converters raise whatever their code does
        raise ExportFailed("skl2onnx", summarize(error)) from error
    _unpack(made.graph)
    _speak_here(made.graph)
    path = scratch / f"model-{np.dtype(kind).name}.onnx"
    Model.from_proto(made).save(path)
    return path


def _converted(skl2onnx: Any, model: Any, inputs: Any, opset: Mapping[str, int]) -> Any:
    base: Any = importlib.import_module("sklearn.base")
    plain = {id(model): {"zipmap": False}}  # probabilities as a tensor, not as a list of maps
    with _plain_attributes():
        if base.is_classifier(model):
            try:
                return skl2onnx.convert_sklearn(
                    model, initial_types=inputs, target_opset=opset, options=plain
                )
            except NameError:  # a converter that never writes maps does not know the option
                pass
        return skl2onnx.convert_sklearn(model, initial_types=inputs, target_opset=opset)


def _unpack(graph: GraphProto) -> None:
    """Outputs that are lists of tensors, one for each target, as outputs of their own."""
    for value in [each for each in graph.output if each.type.HasField("sequence_type")]:
        makers = [n for n in graph.node if value.name in n.output]
        if len(makers) != 1 or makers[0].op_type != "SequenceConstruct":
            continue
        kind = value.type.sequence_type.elem_type.tensor_type.elem_type
        names = {old: f"{value.name}_{place}" for place, old in enumerate(makers[0].input)}
        graph.output.remove(value)
        graph.node.remove(makers[0])
        rename_values(graph, names)
        graph.output.extend(
            helper.make_tensor_value_info(name, kind, [None, None]) for name in names.values()
        )


def _speak_here(graph: GraphProto) -> None:
    """Lowercase text by the plain locale, where the one that the graph names is not installed.

    onnxruntime loads no such graph otherwise. For letters the two are the same.
    """
    for node in graph.node:
        if node.op_type != "StringNormalizer":
            continue
        named = next((each for each in node.attribute if each.name == "locale"), None)
        if not _installed(named.s.decode() if named is not None else _USUAL_LOCALE):
            if named is not None:
                node.attribute.remove(named)
            node.attribute.append(helper.make_attribute("locale", _PLAIN_LOCALE))


def _installed(name: str) -> bool:
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, name)
    except locale.Error:
        return False
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    return True


@contextmanager
def _plain_attributes() -> Generator[None]:
    """Let converters hand numpy's integers to onnx, whose attributes take Python's own only.

    skl2onnx 1.20 does so for histogram-based gradient boosting.
    """
    container: Any = importlib.import_module("skl2onnx.common._container")
    make_node = container.make_node

    def plain(value: Any) -> Any:
        return (
            [_number(v) for v in value] if isinstance(value, (list, tuple, np.ndarray)) else value
        )

    def patched(*args: Any, **attributes: Any) -> Any:
        return make_node(*args, **{name: plain(value) for name, value in attributes.items()})

    container.make_node = patched
    try:
        yield
    finally:
        container.make_node = make_node


def _number(value: Any) -> Any:
    plain = value.item() if isinstance(value, np.generic) else value
    return int(plain) if isinstance(plain, bool) else plain


# The proof ---------------------------------------------------------------------------------------


def _cases(
    model: Any, table: _Table, kind: type[np.floating[Any]], dynamic: bool, request: Request
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


def _decided(model: Any, table: _Table, feed: Feed, tolerance: float) -> Feed:
    """The rows whose answer does not depend on the last bits of the numbers.

    A value that equals a tree's threshold, or a support vector on the border of an outlier
    detector, may end up on either side in another order of operations. All rows, where most are so.
    """

    def answers(factor: float) -> list[Array]:
        moved = {n: v * factor if v.dtype.kind == "f" else v for n, v in _wide(feed).items()}
        found = _answers(model, table.build(moved), 2)
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


def _wide(feed: Feed) -> Feed:
    """In 64 bits, as scikit-learn computes."""
    return {n: v.astype(np.float64) if v.dtype.kind == "f" else v for n, v in feed.items()}


def _mixed(values: Array, random: np.random.Generator) -> Array:
    """Rows that were not in the example: every column has values of its own, in another order."""
    if values.ndim != 2:
        return random.permutation(values)
    return np.stack([random.permutation(column) for column in values.T], axis=1)


def _answers(model: Any, values: Any, count: int) -> list[Any]:
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


def _one_by_one(answers: Sequence[Any], count: int) -> list[Any]:
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


def _as_declared(graph: Graph, name: str, value: Any) -> Array:
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
