"""The constants of Conv, ConvTranspose, Gemm and MatMul, and folding affine maps into them.

All four are y = alpha x W + b: a matrix product, for a convolution of each window and per group.
With per-channel scale s and shift t,

    s (x W + b) + t  =  x (W s) + (s b + t)
    (s x + t) W + b  =  x (s W) + (t W + b)

By group, the weights are [groups, outputs, inputs, *taps] for a Conv and for a Gemm with `transB`,
and [groups, inputs, outputs, *taps] for a ConvTranspose and other products. A matrix is one group
without taps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.fuse.linear.affine import (
    Affine,
    Chain,
    Channels,
    by_channel,
    bypass,
    chain_after,
    chain_before,
    may_copy,
    rewire_input,
    rounded,
    variable_operand,
)
from toolkit.ir import Array, Graph, node as nd
from toolkit.rewriting.rule import MatchFailure

Change = tuple[Array | None, Array]
"""Factors of the weights by group, or None, and the new bias."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """The weight of a linear operator as stored, and its bias in float64: zero if it has none."""

    node: NodeProto
    stored: Array
    groups: int
    rank: int
    bias: Array

    @classmethod
    def of(cls, g: Graph, node: NodeProto) -> LinearWeights:
        """Return the constants of `node`; raise MatchFailure if variable or mismatched."""
        stored, groups = g.const(node.input[1]), nd.attr(node, "group", 1)
        is_conv = nd.is_op(node, "Conv", "ConvTranspose")
        if stored is None or not stored.size or (stored.ndim > 2) != is_conv or stored.ndim < 2:
            raise MatchFailure("its weights are not constant")
        if groups < 1 or stored.shape[0] % groups:
            raise MatchFailure(f"{groups} groups do not divide its channels")
        # With an unknown rank, only constants that cannot raise any rank may be absorbed.
        is_matmul = nd.is_op(node, "MatMul")
        rank = (g.rank(node.input[0]) or 1) if is_matmul else stored.ndim
        weights = cls(node, stored, groups, rank, np.zeros(()))
        if not given(node, 2):
            return weights
        where = Channels(1, 0, weights.outputs.count) if is_conv else weights.outputs
        bias = by_channel(g, node.input[2], where)
        if bias is None:
            raise MatchFailure("its bias is not constant, or not one number per channel")
        return cls(node, stored, groups, rank, bias * nd.attr(node, "beta", 1.0))

    @property
    def is_transposed(self) -> bool:
        """Return whether the outputs come before the inputs."""
        return nd.is_op(self.node, "Conv") or bool(nd.attr(self.node, "transB", 0))

    @property
    def by_group(self) -> Array:
        return self.stored.reshape(self.groups, -1, *self.stored.shape[1:])

    @property
    def matrix(self) -> Array:
        """W as [inputs, outputs]."""
        return np.transpose(self.stored) if self.is_transposed else self.stored

    @property
    def alpha(self) -> float:
        return nd.attr(self.node, "alpha", 1.0)

    @property
    def inputs(self) -> Channels:
        return self._channels(2 if self.is_transposed else 1)

    @property
    def outputs(self) -> Channels:
        return self._channels(1 if self.is_transposed else 2)

    def _channels(self, axis: int) -> Channels:
        count = self.groups * self.by_group.shape[axis]
        return Channels(self.rank, 1 if self.stored.ndim > 2 else self.rank - 1, count)

    # -- affine maps

    def after(self, total: Affine) -> Change:
        """s (x W + b) + t = x (W s) + (s b + t)"""
        factors = self._spread(total.scale, self.outputs, 1 if self.is_transposed else 2)
        return factors if total.scales else None, total.scale * self.bias + total.shift

    def before(self, total: Affine) -> Change:
        """(s x + t) W + b = x (s W) + (t W + b)"""
        factors = self._spread(total.scale, self.inputs, 2 if self.is_transposed else 1)
        bias = self.bias + self.alpha * self.through(total.shift) if total.shifts else self.bias
        return factors if total.scales else None, bias

    def through(self, shift: Array) -> Array:
        """t W, with one number per output"""
        weights = np.moveaxis(self.by_group, 2, 1) if self.is_transposed else self.by_group
        matrices = weights.sum(axis=tuple(range(3, weights.ndim)), dtype=np.float64)
        numbers = np.broadcast_to(shift, (self.inputs.count,)).reshape(self.groups, 1, -1)
        return (numbers @ matrices).reshape(-1)

    def _spread(self, numbers: Array, channels: Channels, axis: int) -> Array:
        """Return per-channel numbers along one of the two channel axes of the weights by group."""
        shape = [1] * (self.stored.ndim + 1)
        shape[0], shape[axis] = self.groups, channels.count // self.groups
        return np.broadcast_to(numbers, (channels.count,)).reshape(shape)

    # -- writing

    def put_scaled(self, g: Graph, change: Change) -> bool:
        """Write the changed constants; return False, without an edit, where that is impossible."""
        weight = self.scaled(g, change[0])
        return weight is not None and self.put(g, weight, change[1])

    def put(self, g: Graph, weight: Array, bias: Array) -> bool:
        """Write a weight and a bias; return False, without an edit, where that is impossible.

        The bias of a MatMul is an Add after it, which takes over the name of its output.
        """
        node = self.node
        vector = rounded(np.broadcast_to(bias, (self.outputs.count,)), self.stored)
        if vector is None:
            return False
        if weight is not self.stored:
            g.set_input(node, 1, g.constant(weight, node.input[1]))
        if bias is not self.bias and (given(node, 2) or vector.any()):
            name = g.constant(vector, given(node, 2) or "bias")
            if nd.is_op(node, "MatMul"):
                result = node.output[0]
                g.set_outputs(node, [g.fresh(result)])
                g.add("Add", [node.output[0], name], [result])
                return True
            g.set_inputs(node, [*node.input[:2], name])
            g.del_attr(node, "beta")
        return True

    def scaled(self, g: Graph, factors: Array | None) -> Array | None:
        """Return the weight, as stored, times factors by group, or None if impossible."""
        if factors is None:
            return self.stored
        if not may_copy(g, self.node.input[1]):
            return None
        exact = np.multiply(self.by_group, factors, dtype=np.float64)
        return rounded(exact.reshape(self.stored.shape), self.stored)


Obstacle = Callable[[Affine, int], str]
"""Returns why not to fold a chain with this map and length; blank to fold it."""


def absorb_after(
    g: Graph, weights: LinearWeights, obstacle: Obstacle = lambda total, length: ""
) -> str:
    """Fold as much as possible of the maps after a linear operator into its weights."""
    result = weights.node.output[0]
    chain = chain_after(g, result, weights.outputs)
    last = _absorb(g, weights, chain, weights.after, obstacle)
    return bypass(g, last, result)


def absorb_before(
    g: Graph, weights: LinearWeights, obstacle: Obstacle = lambda total, length: ""
) -> str:
    """Fold as much as possible of the maps before a linear operator into its weights."""
    result = weights.node.output[0]
    chain = chain_before(g, weights.node.input[0], weights.inputs)
    last = _absorb(g, weights, chain, weights.before, obstacle)
    rewire_input(g, weights.node, variable_operand(g, last))
    return result


def _absorb(
    g: Graph,
    weights: LinearWeights,
    chain: Chain,
    change: Callable[[Affine], Change],
    obstacle: Obstacle,
) -> NodeProto:
    """Fold the longest possible part of a chain; return its last node."""
    reason = "no per-channel constant is applied to its input or result alone"
    for length in range(len(chain), 0, -1):
        total, last = chain[length - 1]
        reason = obstacle(total, length)
        if not reason and weights.put_scaled(g, change(total)):
            return last
        reason = reason or why_unchanged(g, weights.node)
    raise MatchFailure(reason)


def why_unchanged(g: Graph, node: NodeProto) -> str:
    """Return why the weight of `node` cannot be replaced."""
    if not may_copy(g, node.input[1]):
        return "its weight has other users, and is too large to be copied"
    return "its element type cannot hold the weight"
