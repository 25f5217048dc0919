"""Models as short text: of long weights only types and shapes, their numbers come from seeds.

The format is ONNX's own text syntax, with one initializer per line and the types of results in
comments. Node names, documentation and metadata are left out. Two equal models have equal texts, on
every processor and whatever numbers the passes have given to new values.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
    parser,
    printer,
)

from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.node import graphs_of

MODELS = Path(__file__).parent / "models"

LITERAL = 16
"""Constants up to this number of elements are written out."""

# -- reading


def read_model(path: Path) -> Model:
    """Parse a model and fill its declared weights by their seeds."""
    proto = parser.parse_model(path.read_text(encoding="utf-8"))
    for declared in proto.graph.value_info:
        proto.graph.initializer.append(_seeded(declared))
    del proto.graph.value_info[:]
    return Model.from_proto(proto)


def _seeded(declared: ValueInfoProto) -> TensorProto:
    """Return a weight that depends on its name and shape alone.

    Vectors (biases, variances, scales) are in 0.5..1.5; tensors of more axes have zero mean and
    keep the variance of what they are multiplied with.
    """
    tensor = declared.type.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    random = np.random.default_rng(zlib.crc32(declared.name.encode()))
    if len(shape) < 2:
        values = random.uniform(0.5, 1.5, shape)
    else:
        values = random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
    return numpy_helper.from_array(values.astype(dtype), declared.name)


def value_names(model: Model) -> set[str]:
    """Return the name of every value of the model, subgraphs included."""
    return set(_names(model.to_proto().graph))


# -- writing


def text_of(model: Model, digits: int = 4, given: Collection[str] | None = None) -> str:
    """Return the model as text.

    Floats have that many significant `digits`; with fewer than 4 they are measured, and constants
    of several numbers are left out. `given` are the names of the model that passes started from:
    all others are numbered anew.
    """
    proto = model.to_proto()
    renamed = {} if given is None else _renumbered(proto.graph, given)
    types = {renamed.get(name, name): text for g in model.graphs() for name, text in _types(g)}
    tensors = {renamed.get(t.name, t.name): t for t in proto.graph.initializer}
    weights = [
        _initializer(tensor, name, model.graph.const(tensor.name), digits)
        for name, tensor in sorted(tensors.items())
    ]
    _strip(proto, digits)
    for node in _nodes(proto.graph):
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    counts = Counter(node.op_type for node in _nodes(proto.graph))
    listed = ", ".join(f"{op} {count}" for op, count in sorted(counts.items()))
    lines = [f"# {counts.total()} nodes: {listed}"]
    for line in printer.to_text(proto).splitlines():
        opens = line.endswith(") {") and line.strip('"').startswith(proto.graph.name)
        lines += _opened(line, weights) if opens else [_typed(line, types)]
    return "\n".join(lines) + "\n"


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for child in graphs_of(node):
            yield from _nodes(child)


def _names(graph: GraphProto) -> Iterator[str]:
    """Yield the names of all values in a stable order."""
    for node in graph.node:
        yield from node.input
        for child in graphs_of(node):
            yield from (value.name for value in child.input)
            yield from _names(child)
        yield from node.output


def _renumbered(graph: GraphProto, given: Collection[str]) -> dict[str, str]:
    """Return new names for values that passes made: the stem, and a number if it is taken.

    The passes number all their values together: one more would change the names of all that follow.
    """
    found: dict[str, str] = {}
    taken = {*given, ""}
    for name in _names(graph):
        if name in taken or name in found:
            continue
        stem = re.sub(r"_\d+$", "", name)
        for made in sorted(found, key=len, reverse=True):
            if stem.startswith(made):
                stem = found[made] + stem[len(made) :]
                break
        found[name], number = stem, 2
        while found[name] in taken:
            found[name], number = f"{stem}_{number}", number + 1
        taken.add(found[name])
    return found


def _strip(proto: ModelProto, digits: int) -> None:
    for field in ("producer_name", "producer_version", "doc_string"):
        proto.ClearField(field)
    del proto.metadata_props[:]
    del proto.graph.initializer[:]
    graphs = [proto.graph, *(g for node in _nodes(proto.graph) for g in graphs_of(node))]
    for graph in graphs:
        graph.ClearField("doc_string")
        del graph.value_info[:]
        del graph.metadata_props[:]
        for value in (*graph.input, *graph.output):
            value.ClearField("doc_string")
            del value.metadata_props[:]
    for node in _nodes(proto.graph):
        node.ClearField("name")
        node.ClearField("doc_string")
        del node.metadata_props[:]
        node.attribute.sort(key=lambda attribute: attribute.name)
        for attribute in node.attribute:
            if attribute.HasField("t"):
                attribute.t.CopyFrom(_rounded(numpy_helper.to_array(attribute.t), digits))
            if attribute.HasField("f"):
                attribute.f = float(f"{attribute.f:.{digits}g}")


def _types(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the name of each node's result and its type, if it is known."""
    for name in (name for node in graph.nodes for name in node.output if name):
        known = graph.type(name)
        if known is not None:
            dtype = TensorProto.DataType.Name(known.dtype or 0).lower()
            yield name, dtype + ("[...]" if known.shape is None else _listed(known.shape))


def _listed(shape: Iterable[Any]) -> str:
    sizes = ",".join(map(str, shape))
    return f"[{sizes}]" if sizes else ""


def _typed(line: str, types: dict[str, str]) -> str:
    """Return the line of a node with the types of its results in a comment."""
    found = re.match(r"\s+([^=<(]+) = \S", line)
    names = [name.strip().strip('"') for name in found[1].split(",")] if found else []
    known = [types[name] for name in names if name in types]
    return f"{line}  # {', '.join(known)}" if known else line


def _opened(line: str, weights: list[str]) -> list[str]:
    """Return the opening of the graph with its initializers; commas stand before comments."""
    lines: list[str] = []
    for weight in weights:
        declared, mark, comment = weight.partition("  #")
        comma = "" if weight is weights[-1] else ","
        lines.append(f"   {declared}{comma}{mark}{comment}")
    return [line.removesuffix(" {"), *(["<", *lines, ">"] if lines else []), "{"]


def _initializer(tensor: TensorProto, name: str, array: Any, digits: int) -> str:
    dtype = TensorProto.DataType.Name(tensor.data_type).lower()
    declared = f'{dtype}{_listed(array.shape)} "{name}"'
    short = array.size <= LITERAL and (digits >= 4 or array.size == 1 or array.dtype == np.int64)
    if not short:
        return f"{declared}  # std {np.std(array.astype(np.float64)):.2g}"
    values = numpy_helper.to_array(_rounded(array, digits)).reshape(-1)
    values = values.astype(int) if values.dtype.kind == "b" else values
    return f"{declared} = {{{', '.join(map(str, values))}}}"


def _rounded(array: Any, digits: int) -> TensorProto:
    """Return the constant with floats of that many digits: later ones differ between processors."""
    if array.dtype.kind == "f":
        limit = float(np.finfo(array.dtype).max)
        rounded = [float(f"{value:.{digits}g}") for value in array.reshape(-1).astype(np.float64)]
        array = np.clip(rounded, -limit, limit).astype(array.dtype).reshape(array.shape)
    return numpy_helper.from_array(array)
