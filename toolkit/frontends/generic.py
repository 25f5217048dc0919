"""Any framework whose model objects offer `export_onnx(example, opset_version=...)`.

The method returns a ModelProto, its bytes, or the path of a file. The model is called as
`model(*example)` for the reference. Arrays reach it as what the example is made of, through
`from_numpy` or the type's own constructor; what comes back is read with `numpy()` or as an array.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from toolkit.errors import ToolkitError, UsageError, summarize
from toolkit.feeds.user_samples import Feed
from toolkit.frontends.protocol import AttemptList, Draft, ExportPlan
from toolkit.frontends.request import Axes, Request, resolve_axes
from toolkit.frontends.signature import new_names, opened, renamed
from toolkit.frontends.test_inputs import axes_of, cases_from, resized, sizes_in
from toolkit.ir.model import Model

Array = NDArray[Any]

_DEFAULT_OPSET = 18


class GenericFrontEnd:
    """The front end of all frameworks that nobody wrote one for."""

    name = "export_onnx"
    supports = ()

    def takes(self, source: object) -> bool:
        return callable(getattr(source, "export_onnx", None))

    def plan(self, source: Any, request: Request, scratch: Path) -> ExportPlan:
        """One graph: with open sizes where the framework takes them, else as it was written."""
        if request.example is None:
            raise UsageError(
                f"a {type(source).__name__} needs an example to be exported with: give one, or let "
                "the factory return (model, example)"
            )
        path, exporter = _written(source, request, scratch), f"{type(source).__name__}.export_onnx"
        model = Model.load(path)
        names = {
            **new_names("input", model.graph.feeds, request.input_names),
            **new_names("output", model.graph.outputs, request.output_names),
        }
        path = renamed(path, names)
        model = Model.load(path)
        inputs, outputs = list(model.graph.feeds), list(model.graph.outputs)
        call = _Call(source, _example_list(request.example, inputs), outputs)
        graph = _Graph(path, exporter, call, inputs, request)
        return ExportPlan([AttemptList("model", list(graph.ways()))])


FRONT_END = GenericFrontEnd()


def _written(source: Any, request: Request, scratch: Path) -> Path:
    """What the framework's own exporter makes, as a file."""
    opset = request.opset or _DEFAULT_OPSET
    request.progress("exporting with export_onnx")
    try:
        made = source.export_onnx(request.example, opset_version=opset)
    except ToolkitError:
        raise
    except Exception as error:
        raise UsageError(f"export_onnx failed: {summarize(error)}") from error
    path = scratch / "model.onnx"
    if isinstance(made, ModelProto):
        Model.from_proto(made).save(path)
    elif isinstance(made, (bytes, bytearray)):
        path.write_bytes(made)
    elif isinstance(made, (str, os.PathLike)):
        return Path(cast("str", made))
    else:
        wanted = "a ModelProto, bytes or a path"
        raise UsageError(f"export_onnx returned a {type(made).__name__}, not {wanted}")
    return path


@dataclass(frozen=True, slots=True)
class _Graph:
    """The file that the framework wrote, and what may be said of its sizes."""

    path: Path
    exporter: str
    call: _Call
    inputs: Sequence[str]
    request: Request

    def ways(self) -> Iterator[Callable[[], Draft]]:
        """With the axes that were asked for; else with those declared; else with an open batch
        where the framework takes one, and then as it was written."""
        feed = self.call.feed(self.inputs, np.random.default_rng(self.request.seed))
        declared = axes_of(Model.load(self.path))
        if self.request.dynamic is not None:
            ranks = {name: value.ndim for name, value in feed.items()}
            asked = resolve_axes(self.request.dynamic, ranks, self.call.outputs)
            yield lambda: self._draft(feed, asked)
            return
        if declared:
            yield lambda: self._draft(feed, declared)
            return
        batch = _batch_axes(feed)
        if not batch or not self.call.takes(resized(feed, batch, {"batch": 2})):
            yield lambda: self._draft(feed, {})
            return
        note = "the exporter fixed every size, and the graph holds for no other"
        yield lambda: self._draft(feed, batch)
        yield lambda: self._draft(feed, {}, (note,))

    def _draft(self, feed: Feed, axes: Axes, notes: tuple[str, ...] = ()) -> Draft:
        outputs = self.call.output_axes(feed, axes)
        path = opened(self.path, axes, outputs) if axes else self.path
        cases = cases_from(feed, axes, self.request.seed)
        return Draft(path, self.call, cases, self.exporter, axes, sizes_in(feed, axes), notes)


def _batch_axes(feed: Feed) -> dict[str, dict[int, str]]:
    """Axis 0 of every input whose first size is that of the first input."""
    ranked = {name: value for name, value in feed.items() if value.ndim}
    first = next((value.shape[0] for value in ranked.values()), None)
    return {name: {0: "batch"} for name, value in ranked.items() if value.shape[0] == first}


# Calling the framework ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """The framework's model as a function of arrays."""

    model: Any
    example: Sequence[Any]
    outputs: Sequence[str]

    def __call__(self, feed: Feed) -> dict[str, Any]:
        pairs = zip(self.example, feed.values(), strict=True)
        result = self.model(*(wrap(array, like) for like, array in pairs))
        return named_outputs(result, self.outputs)

    def takes(self, feed: Feed) -> bool:
        try:
            self(feed)
        except Exception:  # a framework may raise anything
            return False
        return True

    def feed(self, names: Sequence[str], random: np.random.Generator) -> Feed:
        """The example as arrays; one that has a shape but no contents is drawn."""
        if len(names) != len(self.example):
            raise UsageError(
                f"the example has {len(self.example)} values, but the graph takes "
                f"{len(names)} inputs: {', '.join(names)}"
            )
        return {n: to_array(v, random) for n, v in zip(names, self.example, strict=True)}

    def output_axes(self, feed: Feed, axes: Axes) -> dict[str, dict[int, str]]:
        """The axes of the outputs that follow a dynamic dimension, seen by changing it."""
        return follow(self, feed, axes)


def follow(
    call: Callable[[Feed], Mapping[str, Any]], feed: Feed, axes: Axes
) -> dict[str, dict[int, str]]:
    """Axes of the outputs that follow a dynamic dimension, seen by changing one at a time.

    An axis that changes with a dimension, but not to its size, gets a name of its own.
    """
    base = call(feed)
    sizes = sizes_in(feed, axes)
    found: dict[str, dict[int, str]] = {}
    for dim, size in sizes.items():
        other = size + 3
        try:
            changed = call(resized(feed, axes, {dim: other}))
        except Exception:  # as above; the proof says more of it
            continue
        for name, value in base.items():
            before, after = np.shape(value), np.shape(changed[name])
            if len(before) != len(after):
                continue
            for axis, (a, b) in enumerate(zip(before, after, strict=True)):
                if a != b:
                    same = (a, b) == (size, other)
                    found.setdefault(name, {})[axis] = dim if same else f"{name}_{axis}"
    return found


def to_array(value: Any, random: np.random.Generator) -> Array:
    """A framework's tensor as an array; drawn where it has a shape but no contents."""
    try:
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except Exception:  # a framework may raise anything; it may still have a shape
        array = np.asarray(None)
    if array.dtype != object:
        return array
    try:
        shape, dtype = tuple(map(int, value.shape)), np.dtype(str(value.dtype))
    except Exception as error:
        raise UsageError(
            f"the example's {type(value).__name__} is no array: it has no numpy(), and no shape "
            "and dtype to draw one by"
        ) from error
    if dtype.kind == "f":
        return np.asarray(random.standard_normal(shape)).astype(dtype)
    return np.ones(shape, dtype)


def wrap(array: Array, like: Any) -> Any:
    """The array as what the example's value is."""
    kind = cast("Any", type(like))
    if isinstance(like, np.ndarray):
        return array
    if hasattr(kind, "from_numpy"):
        return kind.from_numpy(array)
    try:
        return kind(array)
    except Exception:  # no constructor of arrays: many models take plain ones
        return array


def named_outputs(result: Any, names: Sequence[str]) -> dict[str, Any]:
    """What a model returned, under the graph's output names: by key, else in order."""
    if isinstance(result, Mapping):
        answers = cast("Mapping[str, Any]", result)
        values = [answers[n] for n in names] if set(names) <= set(answers) else [*answers.values()]
    elif isinstance(result, (list, tuple)):
        values = list(cast("Sequence[Any]", result))
    else:
        values = [result]
    random = np.random.default_rng(0)
    return {n: to_array(v, random) for n, v in zip(names, values, strict=False)}


def _example_list(example: Any, names: Sequence[str]) -> list[Any]:
    if isinstance(example, Mapping):
        given = cast("Mapping[str, Any]", example)
        unknown = [name for name in given if name not in names]
        if unknown:
            known = ", ".join(names)
            raise UsageError(f"the example has '{unknown[0]}', which is no input; inputs: {known}")
        return [given[name] for name in names if name in given]
    if isinstance(example, tuple):
        return list(cast("tuple[Any, ...]", example))
    return [example]
