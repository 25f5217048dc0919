"""The front end for any model object with a method `export_onnx(example, opset_version=...)`.

The method returns a ModelProto, its bytes, or the path of a file. The reference outputs are those
of `model(*example)`: arrays are converted to the example's types, by `from_numpy` or a constructor,
and results back to arrays, by `numpy()` or `np.asarray`.
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

from toolkit.errors import UsageError
from toolkit.feeds.user_samples import Feed
from toolkit.frontends.protocol import AttemptList, Draft, ExportPlan
from toolkit.frontends.request import Axes, Request
from toolkit.frontends.signature import example_values, renamed, requested_names, with_axes
from toolkit.frontends.test_inputs import (
    accepts,
    axes_of,
    batched_inputs,
    cases_from,
    output_axes,
    resized,
    sizes_in,
)
from toolkit.ir.model import Model
from toolkit.user_code import call as call_user

Array = NDArray[Any]

_DEFAULT_OPSET = 18


class GenericFrontEnd:
    """The front end of frameworks without one of their own."""

    name = "export_onnx"
    supports = ()

    def takes(self, source: object) -> bool:
        return callable(getattr(source, "export_onnx", None))

    def plan(self, source: Any, request: Request, scratch: Path) -> ExportPlan:
        """Plan one graph, with dynamic axes if the framework supports them."""
        if request.example is None:
            raise UsageError(
                f"a {type(source).__name__} needs an example to be exported: give one, or let the "
                "factory return (model, example)"
            )
        path = _export(source, request, scratch)
        graph = Model.load(path).graph
        path = renamed(path, requested_names(request, list(graph.feeds), list(graph.outputs)))
        graph = Model.load(path).graph
        inputs = list(graph.feeds)
        example = example_values(request.example, inputs)
        call = _Call(source, example, list(graph.outputs))
        random = np.random.default_rng(request.seed)
        feed = {n: _to_array(v, random) for n, v in zip(inputs, example, strict=True)}
        return ExportPlan([AttemptList("model", list(_attempts(path, call, feed, request)))])


FRONT_END = GenericFrontEnd()


def _export(source: Any, request: Request, scratch: Path) -> Path:
    """Run the framework's exporter and return its file."""
    opset = request.opset or _DEFAULT_OPSET
    request.progress("exporting with export_onnx")
    made = call_user(
        lambda: source.export_onnx(request.example, opset_version=opset), "export_onnx"
    )
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


def _attempts(
    path: Path, call: _Call, feed: Feed, request: Request
) -> Iterator[Callable[[], Draft]]:
    """Yield drafts with the requested axes, else with the declared ones, else with and without
    a dynamic batch."""

    def draft(axes: Axes, *notes: str) -> Draft:
        file = with_axes(path, axes, output_axes(call, feed, axes)) if axes else path
        cases = cases_from(feed, axes, request.seed)
        exporter = f"{type(call.model).__name__}.export_onnx"
        return Draft(file, call, cases, exporter, axes, sizes_in(feed, axes), notes)

    asked = request.axes_of(feed, call.outputs)
    declared = axes_of(Model.load(path)) if asked is None else asked
    batch: Axes = {name: {0: "batch"} for name in batched_inputs(feed)}
    if asked is not None or declared:
        yield lambda: draft(declared)
    elif batch and accepts(call, resized(feed, batch, {"batch": 2})):
        yield lambda: draft(batch)
        yield lambda: draft({}, "the exporter fixed every size: the graph supports no other")
    else:
        yield lambda: draft({})


# Calling the framework ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """The framework's model as a function of arrays."""

    model: Any
    example: Sequence[Any]
    outputs: Sequence[str]

    def __call__(self, feed: Feed) -> dict[str, Any]:
        """Return the outputs under the graph's names: matched by key if possible, else by order."""
        pairs = zip(self.example, feed.values(), strict=True)
        result = self.model(*(_wrap(array, like) for like, array in pairs))
        if isinstance(result, Mapping):
            named = cast("Mapping[str, Any]", result)
            by_key = set(self.outputs) <= set(named)
            values = [named[n] for n in self.outputs] if by_key else list(named.values())
        else:
            several = isinstance(result, (list, tuple))
            values = list(cast("Sequence[Any]", result)) if several else [result]
        random = np.random.default_rng(0)
        return {n: _to_array(v, random) for n, v in zip(self.outputs, values, strict=False)}


def _to_array(value: Any, random: np.random.Generator) -> Array:
    """Return a framework's tensor as an array; draw one if it has a shape but no contents."""
    try:
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    except Exception:  # a framework may raise anything; there may still be a shape
        array = np.asarray(None)
    if array.dtype != object:
        return array
    try:
        shape, dtype = tuple(map(int, value.shape)), np.dtype(str(value.dtype))
    except Exception as error:
        raise UsageError(
            f"the example's {type(value).__name__} cannot be converted to an array: it has neither "
            "numpy() nor a shape and a dtype"
        ) from error
    if dtype.kind == "f":
        return np.asarray(random.standard_normal(shape)).astype(dtype)
    return np.ones(shape, dtype)


def _wrap(array: Array, like: Any) -> Any:
    """Convert an array to the type of the example's value."""
    kind = cast("Any", type(like))
    if isinstance(like, np.ndarray):
        return array
    if hasattr(kind, "from_numpy"):
        return kind.from_numpy(array)
    try:
        return kind(array)
    except Exception:  # without a constructor for arrays, pass the array itself
        return array
