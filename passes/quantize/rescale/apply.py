"""Move channel factors from one layer to the next without changing the model's results.

    (x W / s + b / s) through operators that pass a positive factor, then times (s V)

The producer divides its channels by s: the weights and bias of a linear layer or convolution, the
scale and bias of a norm, the constant of a product. Layers that use the result multiply their
weights by s. See `propagate` for the operators between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.quantize.layers.channel_weights import Kernel, kernel_of, put_scaled
from passes.quantize.rescale.propagate import FactorSpread, Index, spread
from toolkit.ir import FLOATS, Array, Graph, node as nd
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


Source: TypeAlias = tuple[Index, tuple[ScaledConstant, ...]]
"""The channels of a node's output, and the constants that divide them by a factor."""


@dataclass(frozen=True, slots=True, eq=False)
class RescaleGroup:
    """A producer and every consumer its channel factor propagates to."""

    node: NodeProto
    parts: tuple[ScaledConstant, ...]
    spread: FactorSpread
    kernel: Kernel | None = None
    """The weights of the producer."""

    @property
    def label(self) -> str:
        return nd.label(self.node)

    def limited(self, factors: Array) -> Array:
        """Return the factors, with 1 for frozen channels."""
        return np.where(self.spread.free, factors, 1.0)

    def apply(self, g: Graph, rule: str, factors: Array) -> bool:
        """Divide the source by the factors; return False if the rewrite is vetoed.

        Raises MatchFailure if a constant cannot be scaled. In both cases the graph is unchanged.
        """
        if not g.begin(rule, self.node):
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
        for part in self.parts:
            by = 1 / factors.reshape(part.factor_shape)
            put_scaled(g, self.node, part.slot, part.shape, by)
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
    """Return the group of `node`; None if it is not a source, or all channels are frozen.

    Sources are layers with weights, norms, and products with a constant vector.
    """
    kernel, op = kernel_of(g, node), nd.qualified(node)
    source = None
    if kernel is not None:
        source = _layer(g, node, kernel)
    elif op in _LAST_AXES:
        slot = _LAST_AXES[op]
        biased = node.op_type not in _NO_BIAS and given(node, slot + 1)
        source = _vectors(g, node, (slot, slot + 1) if biased else (slot,))
    elif op in _CHANNEL_NORMS:
        source = _channel_norm(g, node)
    elif op == "Mul":
        source = _product(g, node)
    if source is None:
        return None
    index, parts = source
    found = spread(g, node.output[0], index)
    return RescaleGroup(node, parts, found, kernel) if found.free.any() else None


def _layer(g: Graph, node: NodeProto, kernel: Kernel) -> Source | None:
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
    return index, tuple(parts)


def _channel_norm(g: Graph, node: NodeProto) -> Source | None:
    rank, found = g.rank(node.output[0]), _vectors(g, node, (1, 2))
    if rank is None or rank < 2 or found is None or found[0].ndim != 1:
        return None
    if nd.is_op(node, "GroupNormalization") and g.opset() < 21:
        return None  # one scale per group
    if nd.attr(node, "training_mode", 0):
        return None
    index, parts = found
    return index.reshape(-1, *[1] * (rank - 2)), parts


def _product(g: Graph, node: NodeProto) -> Source | None:
    """Return the source x c, where c varies along one axis."""
    slots = [slot for slot, name in enumerate(node.input) if _floats(g, name) is not None]
    found = _vectors(g, node, slots) if len(slots) == 1 else None
    varies = found is not None and 2 <= found[0].size == max(found[0].shape)
    return found if varies else None


def _vectors(g: Graph, node: NodeProto, slots: Sequence[int]) -> Source | None:
    """Return the source whose constants have equal shapes and one number per channel each."""
    arrays = [_floats(g, given(node, slot)) for slot in slots]
    shapes = {None if array is None else array.shape for array in arrays}
    shape = shapes.pop()
    if shape is None or shapes or 0 in shape:
        return None
    parts = tuple(ScaledConstant(slot, shape, shape) for slot in slots)
    return np.arange(math.prod(shape)).reshape(shape), parts


def _floats(g: Graph, name: str) -> Array | None:
    tensor = g.tensor(name) if name else None
    return g.const(name) if tensor is not None and tensor.data_type in FLOATS else None
