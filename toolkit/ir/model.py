"""Model: a ModelProto without its weights, and the Weights beside it; load and save."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from toolkit.errors import ModelError, UsageError
from toolkit.ir import node as nd
from toolkit.ir.edits import SetModel
from toolkit.ir.graph import Graph
from toolkit.ir.journal import Journal
from toolkit.ir.unshadow import without_shadows
from toolkit.storage import serialize
from toolkit.storage.weights import Weights, is_external, map_readonly, nbytes, reference
from toolkit.storage.wire import WireError
from toolkit.verification.structure import check_proto


class Model:
    """A model whose large tensors stay in files or in the overlay of its weights."""

    def __init__(self, proto: ModelProto, weights: Weights, path: Path | None = None) -> None:
        """Take over `proto`, whose large tensors must already be references into `weights`."""
        self.weights = weights
        self.path = path
        self.journal = Journal()
        self.revision = 0
        self.frozen: dict[str, Any] = {}
        """Inputs that `specialize` turned into initializers, and their values."""
        self._names: set[str] = set()
        self._made: list[str] = []
        self._serial = self._committed_serial = 0
        self._adopt(proto)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Model:
        """Map the file and parse its structure; weights are read on demand."""
        path = Path(path)
        if path.is_dir():
            raise ModelError(f"'{path}' is a folder; name the .onnx file in it")
        if not path.is_file():
            raise ModelError(f"'{path}' does not exist")
        try:
            view = map_readonly(path)
        except OSError as error:
            raise ModelError(f"'{path}' cannot be read: {error.strerror}") from error
        if not len(view):
            raise ModelError(f"'{path}' is empty; an ONNX model was expected")
        # A link, as in the cache of a hub, leaves its folder: the runtime needs the real file.
        real = path.resolve() if path.is_symlink() else path
        try:
            proto = ModelProto.FromString(serialize.strip(view, real.name))
        except (WireError, DecodeError) as error:
            raise ModelError(f"'{path}' is not an ONNX model, or it is truncated") from error
        proto = without_shadows(proto)
        _require_model(proto, f"'{path}'")
        stored = filter(is_external, proto.graph.initializer)
        elsewhere = any(reference(tensor)[0] != real.name for tensor in stored)
        weights = Weights(path.parent if elsewhere else real.parent)
        weights.map_file(real.name, view)
        return cls(proto, weights, path)

    @classmethod
    def from_proto(cls, proto: ModelProto, folder: str | os.PathLike[str] | None = None) -> Model:
        """Return a model from a protobuf in memory, which is not modified."""
        proto = without_shadows(proto)
        _require_model(proto, "the model")
        weights = Weights(Path(folder) if folder is not None else None)
        return cls(serialize.strip_proto(proto, weights), weights)

    @classmethod
    def of(cls, source: Source) -> Model:
        """Return a model from a path, a protobuf, or itself."""
        if isinstance(source, cls):
            return source
        if isinstance(source, ModelProto):
            return cls.from_proto(source)
        if isinstance(source, (str, os.PathLike)):
            return cls.load(source)
        wanted = "a path, a ModelProto or a Model"
        raise UsageError(f"{wanted} was expected, not {type(source).__name__}")

    # -- queries

    def graphs(self) -> Iterator[Graph]:
        """Yield the main graph and all subgraphs, outer before inner."""
        return self.graph.walk()

    def nodes(self) -> Iterator[NodeProto]:
        """Yield the nodes of all graphs."""
        return (node for _, node in self.places())

    def places(self) -> Iterator[tuple[Graph, NodeProto]]:
        """Yield the nodes of all graphs with their graphs."""
        return ((graph, node) for graph in self.graphs() for node in graph.nodes)

    def node_count(self) -> int:
        """Return the number of nodes in the main graph, all subgraphs and all functions."""
        return sum(map(len, self.graphs())) + sum(len(f.node) for f in self.functions)

    def tensors(self) -> Iterator[TensorProto]:
        """Yield every stored tensor: initializers and constants of all graphs and functions."""
        for graph in self.graphs():
            yield from graph.initializers.values()
            yield from _tensors_of(graph.nodes)
        for function in self.functions:
            yield from _tensors_of(function.node)

    def nbytes(self) -> int:
        """Return the size of all stored tensors in bytes."""
        return sum(map(nbytes, self.tensors()))

    @property
    def functions(self) -> list[FunctionProto]:
        return self._functions

    def fresh(self, hint: str) -> str:
        """Return a name that is unique in the model."""
        base = hint.rstrip("0123456789").rstrip("_") or "v"
        while True:
            self._serial += 1
            name = f"{base}_{self._serial}"
            if name not in self._names:
                self._names.add(name)
                self._made.append(name)
                return name

    def copy(self) -> Model:
        """Return an independent model on the same weights, which are immutable."""
        return Model(self.to_proto(), self.weights, self.path)

    def draft(self) -> Model:
        """Return a copy whose new weights are freed with it, to try edits on."""
        return Model(self.to_proto(), self.weights.fork(), self.path)

    # -- editing

    def commit(self) -> None:
        """Make all edits since the last commit final."""
        self.revision += bool(len(self.journal))
        self.journal.commit()
        self._made.clear()
        self._committed_serial = self._serial

    def rollback(self) -> None:
        """Undo all edits since the last commit.

        Fresh names are reset too: a pass that runs again makes the same ones, so that vetoes, which
        name a site, apply.
        """
        self.journal.rollback()
        for graph in self.graphs():
            graph.forget(self._made)
        self._names.difference_update(self._made)
        self._made.clear()
        self._serial = self._committed_serial

    def require_opset(self, domain: str, version: int = 1) -> None:
        """Import an operator domain unless it is imported."""
        if domain not in self.opsets:
            self.set_opset(domain, version)

    def set_opset(self, domain: str, version: int | None) -> None:
        """Set the imported version of a domain; None removes the import."""
        opsets = {name: at for name, at in self.opsets.items() if name != domain or version}
        if version:
            opsets[domain] = version
        if opsets != self.opsets:
            self._set(opsets=opsets)

    def set_ir_version(self, version: int) -> None:
        """Set the IR version."""
        self._set(ir_version=version)

    def set_functions(self, functions: list[FunctionProto]) -> None:
        """Replace the model-local functions."""
        self._set(_functions=functions)

    def free_initializers(self) -> None:
        """Raise IR versions below 4, where every initializer must be an input, to 4."""
        if self.ir_version >= 4:
            return
        kept: list[ValueInfoProto] = self.graph.interface_inputs(feeds_only=True)
        self.graph.set_interface(inputs=kept)
        self.set_ir_version(4)

    def replace(self, proto: ModelProto) -> None:
        """Replace the whole model by a protobuf, as one edit."""
        old, names = self._state(), self._names
        self._adopt(serialize.strip_proto(proto, self.weights, known=self.tensors()))
        new = self._state()
        self._names |= names
        self.__dict__.update(old)
        self._set(**new)

    def perform(self, edit: SetModel) -> None:
        """Carry out an edit without recording it; the journal calls this."""
        self.__dict__.update(edit.after)

    # -- writing

    def to_proto(self) -> ModelProto:
        """Return a snapshot whose large tensors are references."""
        proto = ModelProto()
        proto.CopyFrom(self._shell)
        proto.ir_version = self.ir_version
        for domain, version in self.opsets.items():
            proto.opset_import.append(helper.make_opsetid(domain, version))
        proto.functions.extend(self._functions)
        self.graph.write(proto.graph)
        return proto

    def inlined_proto(self) -> ModelProto:
        """Return a snapshot that contains all weights, for other tools."""
        proto = self.to_proto()
        chunks = serialize.inflate(proto, self.weights)
        if serialize.size_of(chunks) >= serialize.PROTOBUF_LIMIT:
            raise ModelError("the model is over 2 GiB: it does not fit into one protobuf message")
        return ModelProto.FromString(b"".join(chunks))

    def save(self, path: str | os.PathLike[str], external_data: bool = False) -> Path:
        """Write the model atomically, and never over a file that it is read from."""
        return serialize.save(self.to_proto(), self.weights, Path(path), external_data)

    # -- internals

    def _adopt(self, proto: ModelProto) -> None:
        self.ir_version: int = proto.ir_version
        self.opsets: dict[str, int] = {}
        for entry in proto.opset_import:
            self.opsets[nd.plain_domain(entry.domain)] = entry.version
        self._functions: list[FunctionProto] = list(proto.functions)
        self._names = set(_names_in(proto))
        self.trained: frozenset[str] = frozenset(_trained_names(proto))
        self.graph = Graph(self, proto.graph)
        shell = ModelProto()
        for name in ("graph", "functions", "opset_import", "ir_version"):
            proto.ClearField(name)
        shell.CopyFrom(proto)
        self._shell = shell

    def _state(self) -> dict[str, object]:
        names = ("ir_version", "opsets", "_functions", "graph", "trained", "_shell")
        return {name: getattr(self, name) for name in names}

    def _set(self, **after: object) -> None:
        before = {name: getattr(self, name) for name in after}
        self.journal.apply(SetModel(self, before, after))


Source = str | os.PathLike[str] | ModelProto | Model
"""A model, or a path or protobuf to load it from."""


def _require_model(proto: ModelProto, what: str) -> None:
    if not proto.HasField("graph") or proto.ir_version <= 0:
        raise ModelError(f"{what} is not an ONNX model: it holds no graph")
    check_proto(proto)  # before indexing, which keeps only one of two equal names


def _tensors_of(nodes: Iterable[NodeProto]) -> Iterator[TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def _trained_names(proto: ModelProto) -> Iterator[str]:
    """Yield the initializers of the main graph that the training info uses or updates."""
    for info in proto.training_info:
        for binding in (*info.initialization_binding, *info.update_binding):
            yield from (binding.key, binding.value)
        for graph in (info.initialization, info.algorithm):
            yield from (name for node in graph.node for name in node.input)


def _names_in(proto: ModelProto) -> Iterator[str]:
    """Yield every value and node name of the graphs; functions have scopes of their own."""
    pending = [proto.graph]
    while pending:
        graph = pending.pop()
        yield from (v.name for v in graph.input)
        yield from (t.name for t in graph.initializer)
        yield from (s.values.name for s in graph.sparse_initializer)
        for node in graph.node:
            yield node.name
            yield from node.output
            pending.extend(nd.graphs_of(node))
