"""The constants of a Conv or ConvTranspose, and how maps of its inputs and outputs change them.

Seen by groups, the weights of a Conv are [groups, outputs, inputs, *taps], those of a ConvTranspose
[groups, inputs, outputs, *taps], with outputs and inputs of one group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.fuse.linear.affine import Affine, Channels, may_copy, rounded
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.rewriting.rule import Miss

Change = tuple[Array | None, Array | None]
"""Factors of the weights as seen by groups, and a bias; None: as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """Weights and bias of a convolution; a bias that is not given is zero."""

    node: NodeProto
    weight: Array
    bias: Array
    groups: int

    @classmethod
    def of(cls, g: Graph, node: NodeProto) -> Kernel:
        """What `node` reads; a Miss when the bias is no constant or the sizes are at odds."""
        weight, groups = g.const(node.input[1]), nd.attr(node, "group", 1)
        if weight is None or weight.ndim < 3 or not weight.size:
            raise Miss("its weights are not constant")
        if groups < 1 or weight.shape[0] % groups:
            raise Miss(f"{groups} groups do not divide its channels")
        is_transposed = nd.is_op(node, "ConvTranspose")
        outputs = weight.shape[1] * groups if is_transposed else weight.shape[0]
        bias = np.zeros(outputs)
        if given(node, 2):
            found = g.const(node.input[2])
            if found is None or found.shape != (outputs,):
                raise Miss("its bias is not constant")
            bias = found.astype(np.float64)
        return cls(node, weight, bias, groups)

    @property
    def is_transposed(self) -> bool:
        return nd.is_op(self.node, "ConvTranspose")

    @property
    def taps(self) -> tuple[int, ...]:
        return self.weight.shape[2:]

    @property
    def by_group(self) -> Array:
        return self.weight.reshape(self.groups, -1, *self.weight.shape[1:])

    @property
    def outputs(self) -> Channels:
        return Channels(self.weight.ndim, 1, len(self.bias))

    @property
    def inputs(self) -> Channels:
        size = self.weight.shape[0] if self.is_transposed else self.weight.shape[1] * self.groups
        return Channels(self.weight.ndim, 1, size)

    # -- changes

    def behind(self, total: Affine) -> Change:
        """s conv(x, W, b) + t = conv(x, s W, s b + t)"""
        along = 2 if self.is_transposed else 1
        factors = self._spread(total.scale, self.outputs.count, along) if total.scales else None
        return factors, total.scale * self.bias + total.shift

    def before(self, total: Affine) -> Change:
        """conv(s x + t, W, b) = conv(x, W s, b + W t)"""
        along, taps = (1 if self.is_transposed else 2), tuple(range(3, self.weight.ndim + 1))
        factors = self._spread(total.scale, self.inputs.count, along) if total.scales else None
        if not total.shifts:
            return factors, None
        shift = self._spread(total.shift, self.inputs.count, along)
        through = (self.by_group.astype(np.float64) * shift).sum(axis=(along, *taps))
        return factors, self.bias + through.reshape(-1)

    def put(self, g: Graph, change: Change) -> bool:
        """Write the changed constants; False, and nothing written, where they do not allow it."""
        factors, bias = change
        inputs = list(self.node.input)
        weight = stored = None
        if factors is not None:
            if not may_copy(g, inputs[1]):
                return False
            exact = self.by_group.astype(np.float64) * factors
            weight = rounded(exact.reshape(self.weight.shape), self.weight)
            if weight is None:
                return False
        has_bias = bias is not None and (bool(given(self.node, 2)) or bool((bias != 0).any()))
        if bias is not None and has_bias:
            stored = rounded(bias, self.weight)
            if stored is None:
                return False
        if weight is not None:
            inputs[1] = g.constant(weight, inputs[1])
        if stored is not None:
            inputs = [*inputs[:2], g.constant(stored, given(self.node, 2) or "bias")]
        g.set_inputs(self.node, inputs)
        return True

    def _spread(self, numbers: Array, count: int, along: int) -> Array:
        """Numbers by channel, laid along one of the two channel axes of the weights by group."""
        shape = [1] * (self.weight.ndim + 1)
        shape[0], shape[along] = self.groups, count // self.groups
        return np.broadcast_to(numbers, (count,)).reshape(shape)

    # -- what surrounds the image

    @property
    def is_padded(self) -> bool:
        """Whether some output does not see as many elements of the input as all others do."""
        node = self.node
        if self.is_transposed:
            ones = (*self.taps, *nd.attr(node, "strides", ()))
            zeros = (*nd.attr(node, "pads", ()), *nd.attr(node, "output_padding", ()))
            given_shape = nd.attr(node, "output_shape") is not None
            return any(n != 1 for n in ones) or any(zeros) or given_shape
        auto = nd.attr(node, "auto_pad", "NOTSET")
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            return any(size != 1 for size in self.taps)
        return auto != "VALID" and any(nd.attr(node, "pads", ()))
