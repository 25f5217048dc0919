"""What an exported file promises its callers, put as the user asked: names, and open sizes.

For exporters that write their own names or fix the example's sizes. Opening a size claims that the
graph takes others: the proof tells whether it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from onnx import GraphProto, TensorShapeProto, ValueInfoProto

from toolkit.errors import UsageError
from toolkit.frontends.request import Axes
from toolkit.ir import node as nd
from toolkit.ir.model import Model


def new_names(kind: str, have: Sequence[str], asked: Sequence[str]) -> dict[str, str]:
    """Old names to the ones asked for, in order; raises UsageError when the counts differ."""
    if not asked:
        return {}
    if len(asked) != len(have):
        raise UsageError(
            f"{len(asked)} {kind} names are given, but there are {len(have)} {kind}s: "
            f"{', '.join(have)}"
        )
    return {old: new for old, new in zip(have, asked, strict=True) if old != new}


def renamed(path: Path, names: Mapping[str, str]) -> Path:
    """The model with values of its main graph under other names, in a file beside it."""
    if not names:
        return path
    model = Model.load(path)
    proto = model.to_proto()
    taken = set(_names_in(proto.graph))
    clash = next((new for new in names.values() if new in taken and new not in names), None)
    # a value inside the graph may have the name: it makes way
    full = dict(names) if clash is None else {**names, clash: model.fresh(clash)}
    rename_values(proto.graph, full)
    return Model(proto, model.weights).save(path.with_name(f"{path.stem}-named.onnx"))


def opened(path: Path, inputs: Axes, outputs: Axes) -> Path:
    """The model with these axes declared dynamic, in a file beside it."""
    model = Model.load(path)
    proto = model.to_proto()
    del proto.graph.value_info[:]  # what was inferred from the fixed sizes
    for values, axes in ((proto.graph.input, inputs), (proto.graph.output, outputs)):
        for value in values:
            _open(value, axes.get(value.name, {}))
    return Model(proto, model.weights).save(path.with_name(f"{path.stem}-open.onnx"))


def _open(value: ValueInfoProto, axes: Mapping[int, str]) -> None:
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
    """Rename in a graph and in what its subgraphs read of it."""
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for values in (node.input, node.output):
            for index, name in enumerate(values):
                if name in names:
                    values[index] = names[name]
        for inner in nd.graphs_of(node):
            rename_values(inner, names)
