"""Share a model's large tensors with a session without copying them.

Tensors in files are referenced relative to one folder that contains all of the files: the model's
own, and the scratch files of tensors that passes made. Arrays in memory are lent by name; other
tensors are written into the protobuf.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.storage.spill import FileRange, file_range
from toolkit.storage.weights import Array, clear_data, is_external, nbytes, reference, set_reference

_LENDABLE = "biufc"
"""The kinds of numpy types that a session accepts."""


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """The folder of references, if there are any, and the arrays to lend by name."""

    folder: Path | None
    lent: dict[str, Array]


def share_weights(model: Model, proto: ModelProto) -> SharedWeights:
    """Update the references in `proto`, a snapshot of the model, for a session."""
    for function in proto.functions:
        for tensor in _held_tensors(function.node):
            if is_external(tensor):
                _inline(model, tensor)
    held = [(t, _locate(model, t)) for t in _held_tensors(proto.graph.node) if is_external(t)]
    outer = [(t, _locate(model, t)) for t in proto.graph.initializer if is_external(t)]
    folder = _common_folder([found.path for _, found in (*outer, *held) if found is not None])
    if folder is None:  # the files are on several drives
        folder = model.weights.folder
    lent: dict[str, Array] = {}
    used, inputs = _used_names(proto.graph), {value.name for value in proto.graph.input}
    unused: set[str] = set()
    for tensor, found in outer:
        if _refer(tensor, found, folder):
            continue
        array = model.weights.overlaid(tensor)
        if tensor.name not in used and tensor.name not in inputs:
            unused.add(tensor.name)
        elif tensor.name in used and array is not None and _can_be_lent(tensor, array):
            lent[tensor.name] = array
        else:
            _inline(model, tensor)
    for tensor, found in held:
        if not _refer(tensor, found, folder):
            _inline(model, tensor)
    # The runtime removes unused initializers, and fails if one of them is lent.
    for index in reversed(range(len(proto.graph.initializer))):
        if proto.graph.initializer[index].name in unused:
            del proto.graph.initializer[index]
    return SharedWeights(folder, lent)


def _locate(model: Model, tensor: TensorProto) -> FileRange | None:
    """Return the location of a tensor; None for an array in memory, or one to be packed."""
    array = model.weights.overlaid(tensor)
    if array is not None:
        return file_range(array) if array.nbytes == nbytes(tensor) else None
    assert model.weights.folder is not None, tensor.name
    location, offset, _ = reference(tensor)
    return FileRange((model.weights.folder / location).resolve(), offset)


def _common_folder(files: Sequence[Path]) -> Path | None:
    """Return the innermost folder that contains all of these files, or None."""
    try:
        return Path(os.path.commonpath([file.parent for file in files])) if files else None
    except ValueError:
        return None


def _refer(tensor: TensorProto, found: FileRange | None, folder: Path | None) -> bool:
    """Make the tensor refer to a file in the folder; return whether the file is in it."""
    if found is None or folder is None or not found.path.is_relative_to(folder.resolve()):
        return False
    location = found.path.relative_to(folder.resolve()).as_posix()
    set_reference(tensor, location, found.offset, nbytes(tensor))
    return True


def _can_be_lent(tensor: TensorProto, array: Array) -> bool:
    """Return whether the array has the shape of the tensor, and a type that the runtime accepts."""
    known = array.dtype.kind in _LENDABLE and array.dtype.isbuiltin == 1
    return known and array.shape == tuple(tensor.dims)


def _used_names(graph: GraphProto) -> set[str]:
    """Return the values that the graph's nodes, subgraphs and outputs use."""
    names = {value.name for value in graph.output}
    for node in graph.node:
        names.update(node.input)
        for inner in nd.graphs_of(node):
            names |= _used_names(inner)
    return names


def _held_tensors(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    """Yield the tensors in attributes of nodes, and the initializers of their subgraphs."""
    for node in nodes:
        yield from (a.t for a in node.attribute if a.HasField("t"))
        for graph in nd.graphs_of(node):
            yield from graph.initializer
            yield from _held_tensors(graph.node)


def _inline(model: Model, tensor: TensorProto) -> None:
    raw = bytes(model.weights.raw(tensor))
    clear_data(tensor)
    tensor.raw_data = raw
