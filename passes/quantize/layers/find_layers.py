"""Find the layers with constant weights in a model, and those that a plan quantizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from onnx import NodeProto

from passes.quantize.layers.layers import Layer, Linear, Table, layer_of, users_of
from passes.quantize.layers.packed_attention import PackedAttention, packed_attention_of
from passes.quantize.layers.recurrent import Recurrent, recurrent_of
from passes.quantize.schemes.dynamic.conv import Convolution, convolution_of
from toolkit.errors import UsageError
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.quantization.plan import Entry, Plan, Scheme
from toolkit.rewriting.match_failure import MatchFailure

AnyLayer: TypeAlias = Layer | Recurrent | PackedAttention | Convolution
LayerT = TypeVar("LayerT")


@dataclass(frozen=True, slots=True, eq=False)
class Weighted(Generic[LayerT]):
    """A node with weights, or the reason why it cannot be quantized."""

    graph: Graph
    node: NodeProto
    layer: LayerT | None
    reason: str = ""


def weighted_in(model: Model, convolutions: bool = False) -> Iterator[Weighted[AnyLayer]]:
    """Yield linear layers, tables, LSTMs and packed attention of all graphs; Conv on request."""
    for graph in list(model.graphs()):
        for node in list(graph.nodes):
            try:
                layer = layer_of(graph, node) or recurrent_of(graph, node)
                layer = layer or packed_attention_of(graph, node)
                if layer is None and convolutions:
                    layer = convolution_of(graph, node)
            except MatchFailure as failure:
                yield Weighted(graph, node, None, str(failure))
            else:
                if layer is not None:
                    yield Weighted(graph, node, layer)


def matrices_in(model: Model) -> Iterator[Weighted[Layer]]:
    """Yield linear layers and tables; other layers come with a reason."""
    for item in weighted_in(model):
        if item.layer is None or isinstance(item.layer, Linear | Table):
            yield Weighted(item.graph, item.node, item.layer, item.reason)
        else:
            yield Weighted(item.graph, item.node, None, item.layer.kind)


def leave_float_tables(found: Iterable[Weighted[LayerT]], entries: dict[int, Entry]) -> None:
    """Set tables with float users to float: an int8 copy would only add to the size.

    `entries` holds the entries of all these nodes by id.
    """
    for item in found:
        if not isinstance(item.layer, Table) or entries[id(item.node)].scheme == "float":
            continue
        users = users_of(item.layer.weight)
        if users is None or any(
            id(n) not in entries or entries[id(n)].scheme == "float" for n in users
        ):
            reason = "a table with float users"
            entries[id(item.node)] = Entry.of(item.node, reason=reason)


def planned(
    found: Iterable[Weighted[LayerT]], plan: Plan, scheme: Scheme, kinds: str
) -> list[tuple[Weighted[LayerT], LayerT, Entry]]:
    """Return the layers with this scheme in the plan; raise UsageError if one cannot have it."""
    chosen: list[tuple[Weighted[LayerT], LayerT, Entry]] = []
    waiting = {id(entry): entry for entry in plan.entries if entry.scheme == scheme}
    for item in found:
        entry = plan.find(item.node)
        if entry is None or entry.scheme != scheme:
            continue
        waiting.pop(id(entry), None)
        if item.layer is None:
            raise UsageError(f"{entry.label} cannot be {scheme}: it has {item.reason}")
        chosen.append((item, item.layer, entry))
    for entry in waiting.values():
        raise UsageError(f"{entry.label} cannot be {scheme}: it is not a {kinds}")
    return chosen
