"""Propagate a channel factor from its producer to the layers that compensate it.

A positive factor s_c on channel c of a value passes through linear and positively homogeneous
operators (Relu, pools, Transpose, attention values, products with another operand). The weights of
a linear layer or convolution that uses the channel compensate it. Any other user (another operator,
a graph output, a subgraph) freezes the channel: its factor must be 1. The other channels stay free,
such as the values of a packed Q, K, V.

The integer array `index` gives the channel of each element, aligned with the last axes of the value
as in broadcasting: [[0], [1], [2]] is a column of channels. -1 means no channel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from passes.quantize.layers.channel_weights import Kernel, kernel_of
from passes.quantize.rescale.channel_flow import PASSERS, Flow, Index, along
from toolkit.ir import Array, Graph, node as nd


@dataclass(frozen=True, slots=True, eq=False)
class CompensatingLayer:
    """A layer whose weights compensate a factor; `index` has the channel of each of its inputs."""

    kernel: Kernel
    index: Index

    @property
    def node(self) -> NodeProto:
        return self.kernel.node

    def by_channel(self, numbers: Array, count: int) -> Array:
        """Return the maximum per channel of numbers per input of the layer; 0 without any."""
        found = np.zeros(count)
        present = self.index >= 0
        np.maximum.at(found, self.index[present], numbers[present])
        return found

    def factors(self, by_channel: Array) -> Array:
        """Return the factor of each input of the layer."""
        return np.where(self.index >= 0, by_channel[self.index], 1.0)


@dataclass(slots=True, eq=False)
class FactorSpread:
    """The frozen channels of a factor, its compensating layers, and the constants it scales."""

    frozen: NDArray[np.bool_]
    sinks: list[CompensatingLayer] = field(default_factory=list[CompensatingLayer])
    terms: list[tuple[NodeProto, int, Index]] = field(
        default_factory=list[tuple[NodeProto, int, Index]]
    )
    """Constants added to scaled values: node, slot, and the channels of the elements."""

    @property
    def count(self) -> int:
        return self.frozen.size

    @property
    def free(self) -> NDArray[np.bool_]:
        """The channels that are not frozen and that some layer compensates."""
        taken = np.zeros(self.count, bool)
        for sink in self.sinks:
            taken[sink.index[sink.index >= 0]] = True
        return taken & ~self.frozen


def spread(g: Graph, value: str, index: Index) -> FactorSpread:
    """Propagate a factor on the channels of `value`."""
    frozen: NDArray[np.bool_] = np.zeros(int(index.max(initial=-1)) + 1, np.bool_)
    while True:
        found = _Propagation(g, frozen)
        found.follow(value, index)
        if not (found.result.frozen != frozen).any():
            # Last: a frozen gate is not a second path to its product.
            found.freeze_joined_paths()
        if not (found.result.frozen != frozen).any():
            return found.result
        frozen = found.result.frozen


class _Propagation:
    """One traversal of the users of a value, without the channels that are frozen at its start."""

    def __init__(self, g: Graph, frozen: NDArray[np.bool_]) -> None:
        self.g = g
        self.known = frozen
        self.result = FactorSpread(np.array(frozen, np.bool_))
        self._paths: dict[int, list[Index]] = {}

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
                pending.extend(self._enter(node, value, index))

    def freeze_joined_paths(self) -> None:
        """Freeze channels that reach one node on two paths: their factors would multiply."""
        for paths in self._paths.values():
            if len(paths) > 1:
                for index in paths:
                    self._freeze(index)

    def _enter(self, node: NodeProto, value: str, index: Index) -> list[Flow]:
        slots = [slot for slot, name in enumerate(node.input) if name == value]
        if nd.is_op(node, "Shape", "Size"):
            return []
        if len(slots) != 1:
            self._freeze(index)
            return []
        self._paths.setdefault(id(node), []).append(index)
        sink = _compensating(self.g, node, slots[0], index)
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


def _compensating(g: Graph, node: NodeProto, slot: int, index: Index) -> CompensatingLayer | None:
    kernel = kernel_of(g, node) if slot == 0 else None
    if kernel is None or not kernel.reads_channels:
        return None
    found = along(index, -1 if kernel.is_matrix else 1 - kernel.rank)
    return (
        CompensatingLayer(kernel, found)
        if found is not None and found.size == kernel.inputs
        else None
    )
