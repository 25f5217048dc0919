"""A MatMul or Gemm whose weight is a constant matrix: y = alpha x W + beta b.

What is done to its input and output by channel (the last axis of either) goes into W and b:

    s (x W + b) + t  =  x (W s) + (s b + t)
    (s x + t) W + b  =  x (s W) + (t W + b)

A Gemm has a place for the bias. A MatMul has none: there one Add stays behind it, so a chain is
worth merging only where it is longer than what remains of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from passes.fuse.linear.affine import (
    Affine,
    Channels,
    by_channel,
    bypass,
    chain_after,
    chain_before,
    may_copy,
    read_from,
    rounded,
    source_of,
)
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import FLOATS
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import Miss, rewrite

weight = const("w", rank=2, dtype=tuple(FLOATS))
matmul = op.MatMul(var("x"), weight)
gemm = op.Gemm(var("x"), weight, ...)


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """The constants of y = alpha x W + beta b; `matrix` is W as [inputs, outputs]."""

    node: NodeProto
    stored: Array
    rank: int

    @classmethod
    def of(cls, g: Graph, node: NodeProto) -> Dense:
        stored = g.const(node.input[1])
        if stored is None or stored.ndim != 2 or not stored.size:
            raise Miss("its weight is not a constant matrix")
        # Where the rank is not known, only what cannot raise any rank may meet the result.
        rank = 2 if nd.is_op(node, "Gemm") else g.rank(node.input[0]) or 1
        return cls(node, stored, rank)

    @property
    def is_turned(self) -> bool:
        return bool(nd.attr(self.node, "transB", 0))

    @property
    def matrix(self) -> Array:
        return np.transpose(self.stored) if self.is_turned else self.stored

    @property
    def inputs(self) -> Channels:
        return Channels(self.rank, self.rank - 1, self.matrix.shape[0])

    @property
    def outputs(self) -> Channels:
        return Channels(self.rank, self.rank - 1, self.matrix.shape[1])

    @property
    def alpha(self) -> float:
        return nd.attr(self.node, "alpha", 1.0)

    def bias(self, g: Graph) -> Array:
        """beta b of a Gemm, one number for each output or one for all; zero when not given."""
        name = given(self.node, 2)
        if not name:
            return np.zeros(())
        found = by_channel(g, name, self.outputs)
        if found is None:
            raise Miss("its bias is not constant, or not the same for all rows")
        return found * nd.attr(self.node, "beta", 1.0)

    def scaled(self, g: Graph, factors: Array) -> Array | None:
        """The weight, as stored, times `factors` of the matrix; None where that cannot be."""
        if not may_copy(g, self.node.input[1]):
            return None
        return self.store(np.multiply(self.matrix, factors, dtype=np.float64))

    def store(self, matrix: Array) -> Array | None:
        """Another matrix in the layout and element type of this one, if that can hold it."""
        return rounded(np.transpose(matrix) if self.is_turned else matrix, self.stored)

    def vector(self, numbers: Array) -> Array | None:
        """One number for each output, in the weight's element type."""
        return rounded(np.broadcast_to(numbers, (self.outputs.count,)), self.stored)


# -- behind it


@rewrite(gemm, opset=7)
def affine_after_gemm(g: Graph, node: NodeProto) -> str:
    """s (x W + b) + t = x (W s) + (s b + t)"""
    dense = Dense.of(g, node)
    chain = chain_after(g, node.output[0], dense.outputs)
    if not chain:
        raise Miss("no constant by channel is applied to its result and nothing else")
    bias = dense.bias(g)
    for total, last in reversed(chain):
        changed = dense.scaled(g, total.scale) if total.scales else dense.stored
        if changed is not None and put_gemm(g, dense, changed, total.scale * bias + total.shift):
            return bypass(g, node, last)
    raise Miss(_refusal(g, node))


@rewrite(matmul)
def affine_after_matmul(g: Graph, node: NodeProto) -> str:
    """s (x W) + t = x (W s) + t, where that leaves less to do"""
    dense = Dense.of(g, node)
    chain = chain_after(g, node.output[0], dense.outputs)
    for length in range(len(chain), 0, -1):
        total, last = chain[length - 1]
        if length == 1 and not total.scales:
            break  # an Add is what would be left of it
        changed = dense.scaled(g, total.scale) if total.scales else dense.stored
        shift = dense.vector(total.shift)
        if changed is None or shift is None:
            continue
        put_matmul(g, dense, changed)
        if not total.shifts:
            return bypass(g, node, last)
        added = g.op("Add", node.output[0], g.constant(shift, "bias"), at=last)
        g.replace(last.output[0], added)
        g.prune(last)
        return node.output[0]
    raise Miss(
        _refusal(g, node)
        if len(chain) > 1
        else "no constant by channel but a bias is applied to its result"
    )


# -- before it


@rewrite(gemm, opset=7)
def affine_before_gemm(g: Graph, node: NodeProto) -> str:
    """(s x + t) W + b = x (s W) + (t W + b)"""
    if nd.attr(node, "transA", 0):
        raise Miss("the channels of its input come first")
    dense = Dense.of(g, node)
    chain = chain_before(g, node.input[0], dense.inputs)
    if not chain:
        raise Miss("no constant by channel is applied to its input for it alone")
    bias = dense.bias(g)
    for total, last in reversed(chain):
        through = dense.alpha * _through(dense, total) if total.shifts else 0
        changed = dense.scaled(g, total.scale[..., None]) if total.scales else dense.stored
        if changed is not None and put_gemm(g, dense, changed, bias + through):
            return read_from(g, node, source_of(g, last))
    raise Miss(_refusal(g, node))


@rewrite(matmul)
def affine_before_matmul(g: Graph, node: NodeProto) -> str:
    """(s x + t) W = x (s W) + t W, where an Add behind it takes the shift"""
    dense = Dense.of(g, node)
    chain = chain_before(g, node.input[0], dense.inputs) if dense.rank > 1 else []
    if not chain:
        raise Miss("no constant by channel is applied to its input for it alone")
    behind = chain_after(g, node.output[0], dense.outputs)[:1]
    for length in range(len(chain), 0, -1):
        total, last = chain[length - 1]
        if total.shifts and length + len(behind) < 2:
            continue
        changed = dense.scaled(g, total.scale[..., None]) if total.scales else dense.stored
        shift = dense.vector(_through(dense, total))
        if changed is None or shift is None:
            continue
        put_matmul(g, dense, changed)
        read_from(g, node, source_of(g, last))
        return add_behind(g, node, shift) if total.shifts else node.output[0]
    raise Miss("no bias behind it takes the shift, or its weight cannot be changed")


# -- writing


def put_gemm(g: Graph, dense: Dense, weight: Array, bias: Array) -> bool:
    """Write these constants; False, and nothing written, where the element type is too small."""
    node = dense.node
    vector = dense.vector(bias)
    if vector is None:
        return False
    inputs = list(node.input[:2])
    if weight is not dense.stored:
        inputs[1] = g.constant(weight, inputs[1])
    if given(node, 2) or vector.any():
        inputs.append(g.constant(vector, given(node, 2) or "bias"))
    g.set_inputs(node, inputs)
    if nd.attr(node, "beta") is not None:
        g.del_attr(node, "beta")
    return True


def _through(dense: Dense, total: Affine) -> Array:
    """t W"""
    if not np.any(total.shift):
        return np.zeros(dense.matrix.shape[1:])
    matrix = dense.matrix.astype(np.float64)
    return np.broadcast_to(total.shift, matrix.shape[:1]) @ matrix


def put_matmul(g: Graph, dense: Dense, weight: Array) -> None:
    if weight is not dense.stored:
        g.set_input(dense.node, 1, g.constant(weight, dense.node.input[1]))


def add_behind(g: Graph, node: NodeProto, numbers: Array) -> str:
    """What `node` gives plus these numbers takes the place, and the name, of what it gives."""
    result = node.output[0]
    hidden = g.fresh(result)
    g.set_outputs(node, [hidden])
    g.add("Add", [hidden, g.constant(numbers, "bias")], [result])
    return result


def _refusal(g: Graph, node: NodeProto) -> str:
    if not may_copy(g, node.input[1]):
        return "its weight has other readers, and is too large to be copied"
    return "its element type cannot hold the weight"


RULES = (affine_after_gemm, affine_after_matmul, affine_before_gemm, affine_before_matmul)
