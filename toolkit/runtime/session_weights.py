"""How a runtime gets the bytes of a model's large tensors, without a copy of any.

Those in files are named relative to one folder that holds all of the files: the model's own, and
the scratch files of tensors that passes made. Arrays in memory are lent by name, and what cannot be
lent is put into the protobuf.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.storage.spill import Place, place_of
from toolkit.storage.weights import Array, clear_data, is_external, nbytes, reference, set_reference

_LENDABLE = "biufc"


@dataclass(frozen=True, slots=True)
class Supply:
    """The folder that references are relative to, None without any; arrays to lend, by name."""

    folder: Path | None
    lent: dict[str, Array]


def supply(model: Model, proto: ModelProto) -> Supply:
    """Let `proto`, a copy of the model's own, say where each tensor is."""
    for function in proto.functions:
        for tensor in _held_tensors(function.node):
            if is_external(tensor):
                _inline(model, tensor)
    held = [(t, _place(model, t)) for t in _held_tensors(proto.graph.node) if is_external(t)]
    outer = [(t, _place(model, t)) for t in proto.graph.initializer if is_external(t)]
    folder = _folder_of([place.path for _, place in (*outer, *held) if place is not None])
    if folder is None:  # on several drives: what is in the model's folder stays there
        folder = model.weights.folder
    lent: dict[str, Array] = {}
    read, inputs = _names_read(proto.graph), {value.name for value in proto.graph.input}
    unused: set[str] = set()
    for tensor, place in outer:
        if _put_in_folder(tensor, place, folder):
            continue
        array = model.weights.overlaid(tensor)
        if tensor.name not in read and tensor.name not in inputs:
            unused.add(tensor.name)
        elif tensor.name in read and array is not None and _can_be_lent(tensor, array):
            lent[tensor.name] = array
        else:
            _inline(model, tensor)
    for tensor, place in held:
        if not _put_in_folder(tensor, place, folder):
            _inline(model, tensor)
    # The runtime drops what nobody reads, and then does not find what it is lent.
    for index in reversed(range(len(proto.graph.initializer))):
        if proto.graph.initializer[index].name in unused:
            del proto.graph.initializer[index]
    return Supply(folder, lent)


def _place(model: Model, tensor: TensorProto) -> Place | None:
    """The file that a tensor is in; None for an array in memory, or one that is stored packed."""
    array = model.weights.overlaid(tensor)
    if array is not None:
        return place_of(array) if array.nbytes == nbytes(tensor) else None
    assert model.weights.folder is not None, tensor.name
    location, offset, _ = reference(tensor)
    return Place((model.weights.folder / location).resolve(), offset)


def _folder_of(files: Sequence[Path]) -> Path | None:
    """The innermost folder with all of these in it; None where there is none."""
    try:
        return Path(os.path.commonpath([file.parent for file in files])) if files else None
    except ValueError:
        return None


def _put_in_folder(tensor: TensorProto, place: Place | None, folder: Path | None) -> bool:
    """Refer to a place by its path from the folder, if it is in there."""
    if place is None or folder is None or not place.path.is_relative_to(folder.resolve()):
        return False
    location = place.path.relative_to(folder.resolve()).as_posix()
    set_reference(tensor, location, place.offset, nbytes(tensor))
    return True


def _can_be_lent(tensor: TensorProto, array: Array) -> bool:
    """Whether the array is the tensor as the runtime knows it: no packed bytes, no foreign type."""
    known = array.dtype.kind in _LENDABLE and array.dtype.isbuiltin == 1
    return known and array.shape == tuple(tensor.dims)


def _names_read(graph: GraphProto) -> set[str]:
    """The values that the graph's nodes, its subgraphs and its outputs read."""
    names = {value.name for value in graph.output}
    for node in graph.node:
        names.update(node.input)
        for inner in nd.graphs_of(node):
            names |= _names_read(inner)
    return names


def _held_tensors(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    """The tensors in the nodes' attributes, and all that their subgraphs store."""
    for node in nodes:
        yield from (a.t for a in node.attribute if a.HasField("t"))
        for graph in nd.graphs_of(node):
            yield from graph.initializer
            yield from _held_tensors(graph.node)


def _inline(model: Model, tensor: TensorProto) -> None:
    raw = bytes(model.weights.raw(tensor))
    clear_data(tensor)
    tensor.raw_data = raw
