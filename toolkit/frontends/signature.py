"""Declare the requested names and dynamic axes of inputs and outputs in an exported file.

For exporters that choose their own names or fix the example's sizes. Declaring an axis dynamic
claims that the graph supports other sizes; the proof verifies that claim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from onnx import GraphProto, TensorShapeProto, ValueInfoProto

from toolkit.errors import UsageError
from toolkit.frontends.request import Axes, Request
from toolkit.ir import node as nd
from toolkit.ir.model import Model


def example_values(example: Any, names: Sequence[str]) -> list[Any]:
    """Return the example's values in the order of the inputs; raise UsageError if they differ."""
    if example is None:
        return []
    if isinstance(example, Mapping):
        given = cast("Mapping[str, Any]", example)
        unknown = next((name for name in given if name not in names), None)
        if unknown is not None:
            raise UsageError(
                f"the example has '{unknown}', which is not an input; inputs: {', '.join(names)}"
            )
        values = [given[name] for name in names if name in given]
    elif isinstance(example, tuple):
        values = list(cast("tuple[Any, ...]", example))
    else:
        values = [example]
    if len(values) != len(names):
        raise UsageError(
            f"the example has {len(values)} values, but the model has {len(names)} inputs: "
            f"{', '.join(names)}"
        )
    return values


def new_names(kind: str, have: Sequence[str], asked: Sequence[str]) -> dict[str, str]:
    """Map names to the requested ones, in order; raise UsageError if their numbers differ."""
    if not asked:
        return {}
    if len(asked) != len(have):
        raise UsageError(
            f"{len(asked)} {kind} names are given, but there are {len(have)} {kind}s: "
            f"{', '.join(have)}"
        )
    return {old: new for old, new in zip(have, asked, strict=True) if old != new}


def requested_names(
    request: Request, inputs: Sequence[str], outputs: Sequence[str]
) -> dict[str, str]:
    """Map the names of inputs and outputs to those that the user asked for."""
    return {
        **new_names("input", inputs, request.input_names),
        **new_names("output", outputs, request.output_names),
    }


def renamed(path: Path, names: Mapping[str, str]) -> Path:
    """Write the model with values of its main graph renamed, beside the original."""
    if not names:
        return path
    model = Model.load(path)
    proto = model.to_proto()
    taken = set(_names_in(proto.graph))
    # an inner value of the same name is renamed in turn
    inner = (new for new in names.values() if new in taken and new not in names)
    rename_values(proto.graph, {**names, **{name: model.fresh(name) for name in inner}})
    return Model(proto, model.weights).save(path.with_name(f"{path.stem}-named.onnx"))


def with_axes(path: Path, inputs: Axes, outputs: Axes) -> Path:
    """Write the model with these axes declared dynamic, beside the original."""
    model = Model.load(path)
    proto = model.to_proto()
    del proto.graph.value_info[:]  # inferred from the fixed sizes
    for values, axes in ((proto.graph.input, inputs), (proto.graph.output, outputs)):
        for value in values:
            _declare_dynamic(value, axes.get(value.name, {}))
    return Model(proto, model.weights).save(path.with_name(f"{path.stem}-open.onnx"))


def _declare_dynamic(value: ValueInfoProto, axes: Mapping[int, str]) -> None:
    shape: TensorShapeProto = value.type.tensor_type.shape
    for axis, dim in axes.items():
        if axis < len(shape.dim):
            shape.dim[axis].dim_param = dim


def _names_in(graph: GraphProto) -> Iterable[str]:
    yield from (value.name for value in (*graph.input, *graph.initializer))
    for node in graph.node:
        yield from node.output
        for inner in nd.graphs_of(node):
            yield from _names_in(inner)


def rename_values(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Rename values of a graph, including their captures in subgraphs."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for values in (node.input, node.output):
            for index, name in enumerate(values):
                if name in names:
                    values[index] = names[name]
        for inner in nd.graphs_of(node):
            rename_values(inner, names)
