"""Store equal initializers once: tied weights saved twice, scales, shapes, zero points.

Tensors are compared by type and shape, then by samples of their bytes, and in full only if those
agree. Nothing is copied: mapped files are read in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, ClassVar, TypeVar

from onnx import TensorProto, numpy_helper

from toolkit.ir import Graph, Model
from toolkit.storage.weights import Weights, is_external, nbytes, reference
from toolkit.verification.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_SAMPLES = 64
"""Samples taken of a large tensor."""
_SAMPLE_BYTES = 64
"""Bytes of a sample."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Initializer:
    """An initializer and its graph."""

    graph: Graph
    tensor: TensorProto

    @property
    def name(self) -> str:
        return self.tensor.name


@dataclass(frozen=True, slots=True)
class ShareInitializers:
    """Store equal initializers once."""

    name: ClassVar[str] = "share"
    tolerance: ClassVar[Tolerance] = EXACT
    hoist_bytes: int = field(
        default=1024,
        metadata={"help": "hoist equal tensors of sibling subgraphs of at least this many bytes"},
    )

    def run(self, model: Model, ctx: Context) -> None:
        for group in _equal_groups(model):
            self._share(model, group)

    def _share(self, model: Model, group: list[_Initializer]) -> None:
        kept: dict[int, str] = {}  # graph id -> name of the initializer it keeps
        apart: list[_Initializer] = []
        for item in group:  # outer graphs first
            known = _visible(item.graph, kept)
            if known is not None:
                _replace(model, item, known)
            else:
                kept[id(item.graph)] = item.name
                apart.append(item)
        if len(apart) > 1 and nbytes(apart[0].tensor) >= self.hoist_bytes:
            self._hoist(model, apart)

    def _hoist(self, model: Model, apart: list[_Initializer]) -> None:
        """Move an initializer of sibling subgraphs, which cannot share it, to the main graph."""
        first = apart[0]
        if not model.journal.begin("share-across-subgraphs", first.name):
            return
        moved = TensorProto()
        moved.CopyFrom(first.tensor)
        moved.name = model.fresh(first.name)
        model.graph.put_initializer(moved)
        for item in apart:
            item.graph.replace(item.name, moved.name)
            item.graph.drop_initializer(item.name)


def _visible(graph: Graph | None, kept: dict[int, str]) -> str | None:
    """Return the name of an equal tensor in this graph or an enclosing one, or None."""
    start = graph
    while graph is not None:
        name = kept.get(id(graph))
        if name is not None:
            # A graph in between may define the name, too.
            return name if start is not None and start.scope_of(name) is graph else None
        graph = graph.parent
    return None


def _replace(model: Model, item: _Initializer, name: str) -> None:
    if model.journal.begin("share", item.name):
        model.free_initializers()  # IR 3 declares every initializer as an input
        item.graph.replace(item.name, name)
        item.graph.drop_initializer(item.name)


def _equal_groups(model: Model) -> Iterator[list[_Initializer]]:
    """Yield groups of two or more initializers that hold the same bytes."""
    weights = model.weights

    def kind(item: _Initializer) -> Hashable:
        return item.tensor.data_type, *item.tensor.dims

    def sample(item: _Initializer) -> Hashable:
        return _sample(_contents(weights, item.tensor))

    def digest(item: _Initializer) -> Hashable:
        return sha256(_contents(weights, item.tensor)).digest()

    for alike in _groups(_candidates(model), kind):
        for similar in _groups(alike, sample):
            if len({_identity(item.tensor) for item in similar}) == 1:
                yield similar
            else:
                yield from _groups(similar, digest)


def _candidates(model: Model) -> Iterator[_Initializer]:
    for graph in model.graphs():
        for name, tensor in graph.initializers.items():
            # A caller may override an input, and refers to an output by its name.
            fixed = graph.is_const(name) and not graph.is_output(name)
            if fixed and not graph.is_pinned(name):
                yield _Initializer(graph, tensor)


def _groups(items: Iterable[T], key: Callable[[T], Hashable]) -> Iterator[list[T]]:
    found: defaultdict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return (group for group in found.values() if len(group) > 1)


def _contents(weights: Weights, tensor: TensorProto) -> memoryview:
    """Return the tensor's bytes in the format of `raw_data`, whatever its encoding."""
    if is_external(tensor):
        return weights.raw(tensor)
    if tensor.HasField("raw_data"):
        return memoryview(tensor.raw_data)
    if tensor.data_type == TensorProto.STRING:
        parts = (len(s).to_bytes(8, "little") + s for s in tensor.string_data)
        return memoryview(b"".join(parts))
    return memoryview(numpy_helper.from_array(weights.array(tensor)).raw_data)


def _identity(tensor: TensorProto) -> Hashable:
    """Return a key that is equal for tensors that refer to the same stored bytes."""
    return reference(tensor) if is_external(tensor) else id(tensor)


def _sample(contents: memoryview) -> bytes:
    """Return all bytes of a small tensor, evenly spaced samples of a large one."""
    if len(contents) <= _SAMPLES * _SAMPLE_BYTES:
        return bytes(contents)
    step = len(contents) // _SAMPLES
    starts = range(0, step * _SAMPLES, step)
    return b"".join(bytes(contents[at : at + _SAMPLE_BYTES]) for at in starts)
