"""Move channel factors from one layer to the next, so that the model computes the same.

    (x W / s + b / s) through operators that pass a positive factor, then times (s V)

The producer divides its channels by s: the weights and bias of a linear layer or convolution, the
scale and bias of a norm, the constant of a product. Layers that use the result multiply their
weights by s. See `propagate` for the operators between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers.channel_weights import Kernel, kernel_of, put_scaled
from passes.quantize.rescale.propagate import FactorSpread, Index, spread
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
class ScaledConstant:
    """A constant of the source: its slot, the shape to view it in, and that of the factors."""

    slot: int
    shape: tuple[int, ...]
    factor_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RescaleSource:
    """A node that can divide the channels of its output by a factor."""

    node: NodeProto
    index: Index
    parts: tuple[ScaledConstant, ...]
    kernel: Kernel | None = None

    @property
    def value(self) -> str:
        return self.node.output[0]


@dataclass(frozen=True, slots=True, eq=False)
class RescaleGroup:
    """A producer and every consumer its channel factor propagates to."""

    source: RescaleSource
    spread: FactorSpread

    @property
    def label(self) -> str:
        return nd.label(self.source.node)

    def limited(self, factors: Array) -> Array:
        """Return the factors with 1 for channels that are not free."""
        return np.where(self.spread.free, factors, 1.0)

    def apply(self, g: Graph, rule: str, factors: Array) -> bool:
        """Divide the source by the factors; return False if the rewrite is vetoed.

        Raises MatchFailure if a constant cannot be scaled. In both cases the graph is unchanged.
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
            put_scaled(
                g, self.source.node, part.slot, part.shape, 1 / factors.reshape(part.factor_shape)
            )
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
    """Return the group whose source is `node`; None if no channel is free."""
    source = source_of(g, node)
    if source is None or not source.parts:
        return None
    found = spread(g, source.value, source.index)
    return RescaleGroup(source, found) if found.free.any() else None


def source_of(g: Graph, node: NodeProto) -> RescaleSource | None:
    """Return a layer with weights, a norm, or a product with a constant vector; otherwise None."""
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
    by_output = tuple(n if a in kernel.out_axes else 1 for a, n in enumerate(kernel.shape))
    parts = [ScaledConstant(1, kernel.shape, by_output)]
    if given(node, 2):
        bias = _floats(g, node.input[2])
        if bias is None:
            return None
        parts.append(ScaledConstant(2, np.broadcast_shapes(bias.shape, (count,)), (count,)))
    index = np.arange(count)
    if not kernel.is_matrix:
        index = index.reshape(-1, *[1] * (kernel.rank - 2))
    return RescaleSource(node, index, tuple(parts), kernel)


def _norm(g: Graph, node: NodeProto, slot: int) -> RescaleSource | None:
    biased = node.op_type not in _NO_BIAS and given(node, slot + 1)
    return _vectors(g, node, (slot, slot + 1) if biased else (slot,))


def _channel_norm(g: Graph, node: NodeProto) -> RescaleSource | None:
    rank, found = g.rank(node.output[0]), _vectors(g, node, (1, 2))
    if rank is None or rank < 2 or found is None or found.index.ndim != 1:
        return None
    if nd.is_op(node, "GroupNormalization") and g.opset() < 21:
        return None  # one scale per group
    if nd.attr(node, "training_mode", 0):
        return None
    return replace(found, index=found.index.reshape(-1, *[1] * (rank - 2)))


def _product(g: Graph, node: NodeProto) -> RescaleSource | None:
    """Return the source x c, where c varies along one axis."""
    slots = [slot for slot, name in enumerate(node.input) if _floats(g, name) is not None]
    found = _vectors(g, node, slots) if len(slots) == 1 else None
    if found is None or found.index.size < 2 or found.index.size != max(found.index.shape):
        return None
    return found


def _vectors(g: Graph, node: NodeProto, slots: Sequence[int]) -> RescaleSource | None:
    """Return the source whose constants have equal shapes and one number per channel each."""
    arrays = [_floats(g, given(node, slot)) for slot in slots]
    shapes = {None if array is None else array.shape for array in arrays}
    shape = shapes.pop()
    if shape is None or shapes or 0 in shape:
        return None
    parts = tuple(ScaledConstant(slot, shape, shape) for slot in slots)
    return RescaleSource(node, np.arange(math.prod(shape)).reshape(shape), parts)


def _floats(g: Graph, name: str) -> Array | None:
    tensor = g.tensor(name) if name else None
    return g.const(name) if tensor is not None and tensor.data_type in FLOATS else None
