"""How far a factor by channel travels: from the layer that can make it to those that can take it.

A positive factor s_c on channel c of a value passes through what is linear or positively
homogeneous (Relu, pools, Transpose, the values of an attention, a product with something else), and
is taken back by the weights of a linear layer or convolution that reads the channel. Where anything
else reads a channel (another operator, an output of the graph, a subgraph), that channel is frozen:
its factor must be 1. The others stay free, as the values of a packed Q, K, V do.

Which channel an element belongs to is said by an array of numbers, `index`, laid along the last
axes of the value as in broadcasting: [[0], [1], [2]] is a column of channels. -1: of no channel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from passes.quantize.layers.channel_weights import Kernel, kernel_of
from passes.quantize.rescale.channel_flow import PASSERS, Flow, Index, along
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """A layer whose weights take a factor back. `index`: the channel of each of its inputs."""

    kernel: Kernel
    index: Index

    @property
    def node(self) -> NodeProto:
        return self.kernel.node

    def by_channel(self, numbers: Array, count: int) -> Array:
        """The largest of these numbers by input of the layer, for each channel; 0 without any."""
        found = np.zeros(count)
        there = self.index >= 0
        np.maximum.at(found, self.index[there], numbers[there])
        return found

    def factors(self, by_channel: Array) -> Array:
        """The factor of each input of the layer."""
        return np.where(self.index >= 0, by_channel[self.index], 1.0)


@dataclass(slots=True, eq=False)
class Spread:
    """Where a factor gets to: what is frozen, who takes it, which constants get it too."""

    frozen: NDArray[np.bool_]
    sinks: list[Sink] = field(default_factory=list[Sink])
    terms: list[tuple[NodeProto, int, Index]] = field(
        default_factory=list[tuple[NodeProto, int, Index]]
    )
    """Constants that are added on the way, by node and slot, and the channels along them."""

    @property
    def count(self) -> int:
        return self.frozen.size

    @property
    def free(self) -> NDArray[np.bool_]:
        """The channels that a factor may be given to, and that some layer takes back."""
        taken = np.zeros(self.count, bool)
        for sink in self.sinks:
            taken[sink.index[sink.index >= 0]] = True
        return taken & ~self.frozen


def spread(g: Graph, value: str, index: Index) -> Spread:
    """Follow a factor on the channels of `value`."""
    frozen: NDArray[np.bool_] = np.zeros(int(index.max(initial=-1)) + 1, np.bool_)
    while True:
        found = _Search(g, frozen)
        found.follow(value, index)
        if not (found.result.frozen != frozen).any():
            # Last, since what is frozen by others is not followed: a gate is not a second way.
            found.freeze_meetings()
        if not (found.result.frozen != frozen).any():
            return found.result
        frozen = found.result.frozen


class _Search:
    """One walk; it does not follow what is frozen when it starts."""

    def __init__(self, g: Graph, frozen: NDArray[np.bool_]) -> None:
        self.g = g
        self.known = frozen
        self.result = Spread(np.array(frozen, np.bool_))
        self._met: dict[int, list[Index]] = {}

    def follow(self, value: str, index: Index) -> None:
        pending = [(value, index)]
        while pending:
            value, index = pending.pop()
            channels = index[index >= 0]
            if self.known[channels].all():
                continue
            g = self.g
            if g.is_output(value) or g.is_captured(value):
                self._freeze(index)
                continue
            for node in g.users(value):
                pending.extend(self._read(node, value, index))

    def freeze_meetings(self) -> None:
        """Freeze what reaches one node in two ways: its factors would multiply."""
        for ways in self._met.values():
            if len(ways) > 1:
                for index in ways:
                    self._freeze(index)

    def _read(self, node: NodeProto, value: str, index: Index) -> list[Flow]:
        slots = [slot for slot, name in enumerate(node.input) if name == value]
        if nd.is_op(node, "Shape", "Size"):
            return []
        if len(slots) != 1:
            self._freeze(index)
            return []
        self._met.setdefault(id(node), []).append(index)
        sink = _sink(self.g, node, slots[0], index)
        if sink is not None:
            self.result.sinks.append(sink)
            return []
        passer = PASSERS.get(nd.qualified(node))
        flows = passer(self.g, node, slots[0], index) if passer is not None else None
        if flows is None:
            self._freeze(index)
            return []
        if nd.is_op(node, "Add", "Sum", "Sub"):
            others = (slot for slot in range(len(node.input)) if slot != slots[0])
            self.result.terms.extend((node, slot, index) for slot in others)
        return flows

    def _freeze(self, index: Index) -> None:
        self.result.frozen[index[index >= 0]] = True


def _sink(g: Graph, node: NodeProto, slot: int, index: Index) -> Sink | None:
    kernel = kernel_of(g, node) if slot == 0 else None
    if kernel is None or not kernel.reads_channels:
        return None
    found = along(index, -1 if kernel.is_matrix else 1 - kernel.rank)
    return Sink(kernel, found) if found is not None and found.size == kernel.inputs else None
