"""What can compute with int8 weights: linear layers, and tables that rows are taken from.

    Linear   y = alpha x W + beta b     MatMul, Gemm, FusedMatMul
    Table    y = T[i]                   Gather along the first axis

The weight is a constant matrix, read as it is or through a Transpose, as by a projection that is
tied to a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from onnx import NodeProto

from passes.analysis.operands import given, permutation
from passes.quantize.layers.weight_storage import require_float32
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import FLOATS
from toolkit.rewriting.match_failure import Miss

FUSED_MATMUL = "com.microsoft::FusedMatMul"
TURNED_INPUT = ("transA", "transBatchA", "transBatchB")
"""Attributes of Gemm and FusedMatMul by which they read their input transposed."""

_MIN_ROW = 8
"""Shorter rows of a table do not pay for the scale that each of them needs."""


def is_fused(node: NodeProto) -> bool:
    """Whether a node is a MatMul with a factor and transposes, in onnxruntime's own operator."""
    return nd.qualified(node) == FUSED_MATMUL


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A constant matrix of 32-bit floats by the name it is stored under, and the graph it is in.

    `turned`: the layer computes with its transpose.
    """

    graph: Graph
    name: str
    shape: tuple[int, int]
    turned: bool = False

    @property
    def key(self) -> tuple[int, str]:
        return id(self.graph), self.name

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """y = alpha x W + beta b, read off the node as it is now: others may be rewritten first."""

    node: NodeProto
    weight: Weight

    @property
    def x(self) -> str:
        return self.node.input[0]

    @property
    def alpha(self) -> float:
        return nd.attr(self.node, "alpha", 1.0)

    @property
    def beta(self) -> float:
        return nd.attr(self.node, "beta", 1.0)

    @property
    def bias(self) -> str:
        """Blank where there is none."""
        return given(self.node, 2) if self.beta else ""

    @property
    def outputs(self) -> int:
        return self.weight.shape[0 if self.weight.turned else 1]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """y = T[i], row by row."""

    node: NodeProto
    weight: Weight

    @property
    def indices(self) -> str:
        return self.node.input[1]


Layer: TypeAlias = Linear | Table


def layer_of(g: Graph, node: NodeProto) -> Layer | None:
    """The layer that `node` is; None without weights; Miss, with the reason, for what must stay."""
    if nd.is_op(node, "MatMul", "Gemm") or is_fused(node):
        if g.is_const(node.input[0]):
            if not g.is_const(node.input[1]):
                raise Miss("a weight on the left")
            return None
        return _linear(g, node)
    if nd.is_op(node, "Gather"):
        return _table(g, node)
    return None


def readers_of(weight: Weight) -> list[NodeProto] | None:
    """The nodes that compute with the weight, through Transposes too; None if it is an output."""
    found: list[NodeProto] = []
    pending = [weight.name]
    while pending:
        name = pending.pop()
        if weight.graph.is_output(name):
            return None
        for user in weight.graph.users(name):
            if nd.is_op(user, "Transpose"):
                pending.append(user.output[0])
            else:
                found.append(user)
    return found


def _linear(g: Graph, node: NodeProto) -> Linear | None:
    """The attributes of Gemm and FusedMatMul; a MatMul has none."""
    weight = _weight(g, node.input[1], bool(nd.attr(node, "transB", 0)))
    if weight is None:
        return None
    if any(nd.attr(node, name, 0) for name in TURNED_INPUT):
        raise Miss("a transposed input")
    layer = Linear(node, weight)
    if not math.isfinite(layer.alpha):
        raise Miss("a factor that is no number")
    if layer.bias and layer.beta != 1 and not g.is_const(layer.bias):
        raise Miss("a bias that is computed and scaled")
    return layer


def _table(g: Graph, node: NodeProto) -> Table | None:
    tensor = g.tensor(node.input[0])
    if tensor is None or tensor.data_type not in FLOATS or g.is_const(node.input[1]):
        return None
    if nd.attr(node, "axis", 0) not in (0, -len(tensor.dims)):
        raise Miss("a table that is not read by rows")
    weight = _weight(g, node.input[0])
    if weight is not None and weight.shape[1] < _MIN_ROW:
        raise Miss(f"rows of fewer than {_MIN_ROW} numbers")
    return None if weight is None else Table(node, weight)


def _weight(g: Graph, name: str, turned: bool = False) -> Weight | None:
    scope = g.scope_of(name)
    if scope is None:
        return None
    tensor = scope.tensor(name)
    if tensor is None:
        maker = scope.producer(name)
        if maker is None or not nd.is_op(maker, "Transpose"):
            return None
        if permutation(scope, maker) != (1, 0) or not scope.is_const(maker.input[0]):
            return None
        return _weight(scope, maker.input[0], not turned)
    if tensor.data_type not in FLOATS:
        return None
    require_float32(tensor)
    if len(tensor.dims) != 2:
        raise Miss("weights that are no matrix")
    if not all(tensor.dims):
        raise Miss("no weights at all")
    return Weight(scope, name, (tensor.dims[0], tensor.dims[1]), turned)
