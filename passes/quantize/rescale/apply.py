"""Move channel factors from one layer to the next, so that the model computes the same.

    (x W / s + b / s) through operators that pass a positive factor, then times (s V)

The producer divides its channels by s: weights and bias of a linear layer or convolution, scale
and bias of a norm, the constant of a product. Layers that use the result multiply their weights
by s. See `propagate` for the operators between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers.channel_weights import Kernel, kernel_of, put_scaled
from passes.quantize.rescale.propagate import Index, Spread, spread
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import FLOATS
from toolkit.rewriting.match_failure import MatchFailure

_LAST_AXES = {
    "LayerNormalization": 1,
    "RMSNormalization": 1,
    "SimplifiedLayerNormalization": 1,
    "com.microsoft::SimplifiedLayerNormalization": 1,
    "com.microsoft::SkipLayerNormalization": 2,
    "com.microsoft::SkipSimplifiedLayerNormalization": 2,
}
"""Norms over the last axes, with the slot of their scale; a bias is in the next slot."""

_CHANNEL_NORMS = ("BatchNormalization", "InstanceNormalization", "GroupNormalization")
_NO_BIAS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")
_HOMOGENEOUS = ("", "Relu", "LeakyRelu")


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A constant of the source: its slot, the shape to view it in, and the shape of the factor."""

    slot: int
    seen: tuple[int, ...]
    lies: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RescaleSource:
    """A node that can divide the channels of its output by a factor."""

    node: NodeProto
    index: Index
    parts: tuple[Part, ...]
    kernel: Kernel | None = None

    @property
    def value(self) -> str:
        return self.node.output[0]


@dataclass(frozen=True, slots=True, eq=False)
class RescaleGroup:
    """A producer and every consumer its channel factor propagates to."""

    source: RescaleSource
    spread: Spread

    @property
    def label(self) -> str:
        return nd.label(self.source.node)

    def limited(self, factors: Array) -> Array:
        """Return the factors with 1 for channels that are not free."""
        return np.where(self.spread.free, factors, 1.0)

    def apply(self, g: Graph, rule: str, factors: Array) -> bool:
        """Divide the source by the factors; return False, with nothing changed, if vetoed.

        Raises MatchFailure, with nothing changed, if a constant cannot be scaled.
        """
        if not g.begin(rule, self.source.node):
            return False
        start = g.model.journal.position
        try:
            self.write(g, self.limited(factors))
        except MatchFailure:
            g.model.journal.undo_to(start)
            raise
        return True

    def write(self, g: Graph, factors: Array) -> None:
        """Scale all constants."""
        for part in self.source.parts:
            put_scaled(g, self.source.node, part.slot, part.seen, 1 / factors.reshape(part.lies))
        for node, slot, index in self.spread.terms:
            known = g.const(node.input[slot])
            assert known is not None
            along = np.where(index >= 0, 1 / factors[index], 1.0)
            put_scaled(g, node, slot, np.broadcast_shapes(known.shape, index.shape), along)
        for sink in self.spread.sinks:
            kernel = sink.kernel
            along = kernel.spread(sink.factors(factors), kernel.in_axes)
            put_scaled(g, sink.node, 1, kernel.shape, along)


def group_of(g: Graph, node: NodeProto) -> RescaleGroup | None:
    """Return the group of a node's output; None if no channel is free."""
    source = source_of(g, node)
    if source is None or not source.parts:
        return None
    found = spread(g, source.value, source.index)
    return RescaleGroup(source, found) if found.free.any() else None


def source_of(g: Graph, node: NodeProto) -> RescaleSource | None:
    """Return a layer with weights, a norm, or a product with a constant as a source."""
    kernel = kernel_of(g, node)
    if kernel is not None:
        return _layer(g, node, kernel)
    op = nd.qualified(node)
    if op in _LAST_AXES:
        return _norm(g, node, _LAST_AXES[op])
    if nd.is_op(node, *_CHANNEL_NORMS):
        return _channel_norm(g, node)
    return _product(g, node) if nd.is_op(node, "Mul") else None


def _layer(g: Graph, node: NodeProto, kernel: Kernel) -> RescaleSource | None:
    if nd.attr(node, "activation", "") not in _HOMOGENEOUS or given(node, 3):
        return None
    count = kernel.outputs
    lies = tuple(n if a in kernel.out_axes else 1 for a, n in enumerate(kernel.shape))
    parts = [Part(1, kernel.shape, lies)]
    if given(node, 2):
        bias = _floats(g, node.input[2])
        if bias is None:
            return None
        parts.append(Part(2, np.broadcast_shapes(bias.shape, (count,)), (count,)))
    index = np.arange(count)
    if not kernel.is_matrix:
        index = index.reshape(-1, *[1] * (kernel.rank - 2))
    return RescaleSource(node, index, tuple(parts), kernel)


def _norm(g: Graph, node: NodeProto, slot: int) -> RescaleSource | None:
    scale = _floats(g, given(node, slot))
    if scale is None or not scale.size:
        return None
    parts = [Part(slot, scale.shape, scale.shape)]
    if node.op_type not in _NO_BIAS and given(node, slot + 1):
        bias = _floats(g, node.input[slot + 1])
        if bias is None or bias.shape != scale.shape:
            return None
        parts.append(Part(slot + 1, scale.shape, scale.shape))
    return RescaleSource(node, np.arange(scale.size).reshape(scale.shape), tuple(parts))


def _channel_norm(g: Graph, node: NodeProto) -> RescaleSource | None:
    rank, scale, bias = g.rank(node.output[0]), _floats(g, node.input[1]), _floats(g, node.input[2])
    if rank is None or rank < 2 or scale is None or bias is None or scale.shape != bias.shape:
        return None
    if nd.is_op(node, "GroupNormalization") and g.opset() < 21:
        return None  # one scale per group
    if nd.attr(node, "training_mode", 0) or scale.ndim != 1 or not scale.size:
        return None
    index = np.arange(scale.size).reshape(-1, *[1] * (rank - 2))
    return RescaleSource(
        node, index, (Part(1, scale.shape, scale.shape), Part(2, bias.shape, bias.shape))
    )


def _product(g: Graph, node: NodeProto) -> RescaleSource | None:
    """Return the source x c, where c varies along one axis."""
    constants = [(slot, _floats(g, name)) for slot, name in enumerate(node.input)]
    found = [(slot, array) for slot, array in constants if array is not None]
    if len(found) != 1:
        return None
    slot, array = found[0]
    if array.ndim == 0 or array.size == 1 or array.size != max(array.shape):
        return None
    index = np.arange(array.size).reshape(array.shape)
    return RescaleSource(node, index, (Part(slot, array.shape, array.shape),))


def _floats(g: Graph, name: str) -> Array | None:
    tensor = g.tensor(name) if name else None
    return g.const(name) if tensor is not None and tensor.data_type in FLOATS else None
