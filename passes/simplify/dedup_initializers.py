"""Equal initializers are stored once: tied weights saved twice, scales, shapes, zero points.

Tensors are compared by their bytes, and read no more than needed: those that are alone with their
type and size not at all, the others at a few places, and in full only when these agree. Nothing is
copied: a mapped file is read where it lies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, ClassVar, TypeVar

from onnx import TensorProto, numpy_helper

from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.storage.weights import Weights, is_external, nbytes, reference
from toolkit.verification.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_SAMPLES = 64
_SAMPLE_BYTES = 64
_CHUNK = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Stored:
    """An initializer and the graph that holds it."""

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
        metadata={"help": "equal tensors of separate subgraphs move out from this size on"},
    )

    def run(self, model: Model, ctx: Context) -> None:
        for group in _equal_groups(model):
            self._share(model, group)

    def _share(self, model: Model, group: list[_Stored]) -> None:
        kept: dict[int, str] = {}  # id of a graph -> the name that it keeps
        apart: list[_Stored] = []
        for item in group:  # outer graphs first
            known = _visible(item.graph, kept)
            if known is not None:
                _replace(model, item, known)
            else:
                kept[id(item.graph)] = item.name
                apart.append(item)
        if len(apart) > 1 and nbytes(apart[0].tensor) >= self.hoist_bytes:
            self._hoist(model, apart)

    def _hoist(self, model: Model, apart: list[_Stored]) -> None:
        """Subgraphs side by side do not see each other: what both hold moves to the main graph."""
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
    """The name of an equal tensor in this graph or one around it."""
    start = graph
    while graph is not None:
        name = kept.get(id(graph))
        if name is not None:
            # A graph between may use the name for something else.
            return name if start is not None and start.scope_of(name) is graph else None
        graph = graph.parent
    return None


def _replace(model: Model, item: _Stored, name: str) -> None:
    if model.journal.begin("share", item.name):
        model.free_initializers()  # before IR 4 an initializer was declared as an input, too
        item.graph.replace(item.name, name)
        item.graph.drop_initializer(item.name)


def _equal_groups(model: Model) -> Iterator[list[_Stored]]:
    """The initializers that hold the same bytes, as groups of two and more."""
    weights = model.weights

    def kind(item: _Stored) -> Hashable:
        return item.tensor.data_type, *item.tensor.dims

    def sample(item: _Stored) -> Hashable:
        return _sample(_contents(weights, item.tensor))

    def everything(item: _Stored) -> Hashable:
        return _digest(_contents(weights, item.tensor))

    for alike in _groups(_candidates(model), kind):
        for similar in _groups(alike, sample):
            if len({_identity(item.tensor) for item in similar}) == 1:
                yield similar
            else:
                yield from _groups(similar, everything)


def _candidates(model: Model) -> Iterator[_Stored]:
    for graph in model.graphs():
        for name, tensor in graph.initializers.items():
            # A caller may set an input, and sees an output under its name.
            fixed = graph.is_const(name) and not graph.is_output(name)
            if fixed and not graph.is_pinned(name):
                yield _Stored(graph, tensor)


def _groups(items: Iterable[T], key: Callable[[T], Hashable]) -> Iterator[list[T]]:
    found: defaultdict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return (group for group in found.values() if len(group) > 1)


def _contents(weights: Weights, tensor: TensorProto) -> memoryview:
    """The tensor's bytes as `raw_data` would hold them, whatever its encoding."""
    if is_external(tensor):
        return weights.raw(tensor)
    if tensor.HasField("raw_data"):
        return memoryview(tensor.raw_data)
    if tensor.data_type == TensorProto.STRING:
        parts = (len(s).to_bytes(8, "little") + s for s in tensor.string_data)
        return memoryview(b"".join(parts))
    return memoryview(numpy_helper.from_array(weights.array(tensor)).raw_data)


def _identity(tensor: TensorProto) -> Hashable:
    """Equal for tensors that refer to the very same bytes, and otherwise unique."""
    return reference(tensor) if is_external(tensor) else id(tensor)


def _sample(contents: memoryview) -> bytes:
    """All of a small tensor, a few places all over a large one."""
    if len(contents) <= _SAMPLES * _SAMPLE_BYTES:
        return bytes(contents)
    step = len(contents) // _SAMPLES
    places = range(0, step * _SAMPLES, step)
    return b"".join(bytes(contents[at : at + _SAMPLE_BYTES]) for at in places)


def _digest(contents: memoryview) -> bytes:
    whole = sha256()
    for at in range(0, len(contents), _CHUNK):
        whole.update(contents[at : at + _CHUNK])
    return whole.digest()
