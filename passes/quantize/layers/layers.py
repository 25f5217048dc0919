"""Linear layers and lookup tables with constant weights.

    Linear   y = alpha x W + beta b     MatMul, Gemm, FusedMatMul
    Table    y = T[i]                   Gather along the first axis

The weight is a constant matrix, direct or through a Transpose, as in a projection tied to a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from onnx import NodeProto

from passes.analysis.operands import given, permutation
from passes.quantize.layers.weight_storage import float_weights
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import FLOATS
from toolkit.rewriting.match_failure import MatchFailure

FUSED_MATMUL = "com.microsoft::FusedMatMul"
TURNED_INPUT = ("transA", "transBatchA", "transBatchB")
"""Attributes of Gemm and FusedMatMul that transpose the input."""

ScaleAxes: TypeAlias = tuple[int | None, ...]
"""The axes that a layer's dynamic scales may have, that of the outputs first; None: one for all."""

_MIN_ROW = 8
"""Tables with shorter rows stay float, since each row has a scale."""


def is_fused(node: NodeProto) -> bool:
    """Whether a node is onnxruntime's MatMul with a factor and transposes."""
    return nd.qualified(node) == FUSED_MATMUL


@dataclass(frozen=True, slots=True, eq=False)
class WeightMatrix:
    """A constant float32 matrix in a graph; `turned`: the layer uses its transpose."""

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
    """y = alpha x W + beta b. Properties look at the node, since other rewrites may change it."""

    axes: ClassVar[ScaleAxes] = (1, None)
    kind: ClassVar[str] = "a linear layer"
    node: NodeProto
    weight: WeightMatrix

    @property
    def size(self) -> int:
        return self.weight.size

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
        """The name of the bias, or an empty string."""
        return given(self.node, 2) if self.beta else ""

    @property
    def outputs(self) -> int:
        return self.weight.shape[0 if self.weight.turned else 1]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A lookup table, y = T[i]."""

    axes: ClassVar[ScaleAxes] = (0,)
    kind: ClassVar[str] = "a table"
    node: NodeProto
    weight: WeightMatrix

    @property
    def size(self) -> int:
        return self.weight.size

    @property
    def indices(self) -> str:
        return self.node.input[1]


Layer: TypeAlias = Linear | Table


def layer_of(g: Graph, node: NodeProto) -> Layer | None:
    """Return the layer of `node`, or None; raise MatchFailure if it must stay float."""
    if nd.is_op(node, "MatMul", "Gemm") or is_fused(node):
        if g.is_const(node.input[0]):
            if not g.is_const(node.input[1]):
                raise MatchFailure("a weight on the left")
            return None
        return _linear(g, node)
    if nd.is_op(node, "Gather"):
        return _table(g, node)
    return None


def users_of(weight: WeightMatrix) -> list[NodeProto] | None:
    """Return the users of a weight and of its transposes; None if one is a graph output."""
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
    """Return a MatMul, Gemm or FusedMatMul as a linear layer."""
    weight = _weight(g, node.input[1], bool(nd.attr(node, "transB", 0)))
    if weight is None:
        return None
    if any(nd.attr(node, name, 0) for name in TURNED_INPUT):
        raise MatchFailure("a transposed input")
    layer = Linear(node, weight)
    if not math.isfinite(layer.alpha):
        raise MatchFailure("a factor that is not finite")
    if layer.bias and layer.beta != 1 and not g.is_const(layer.bias):
        raise MatchFailure("a bias that is computed and scaled")
    return layer


def _table(g: Graph, node: NodeProto) -> Table | None:
    tensor = g.tensor(node.input[0])
    if tensor is None or tensor.data_type not in FLOATS or g.is_const(node.input[1]):
        return None
    if nd.attr(node, "axis", 0) not in (0, -len(tensor.dims)):
        raise MatchFailure("a table that is not gathered by rows")
    weight = _weight(g, node.input[0])
    if weight is not None and weight.shape[1] < _MIN_ROW:
        raise MatchFailure(f"rows of fewer than {_MIN_ROW} numbers")
    return None if weight is None else Table(node, weight)


def _weight(g: Graph, name: str, turned: bool = False) -> WeightMatrix | None:
    scope = g.scope_of(name)
    if scope is None:
        return None
    tensor = scope.tensor(name)
    if tensor is None:
        producer = scope.producer(name)
        if producer is None or not nd.is_op(producer, "Transpose"):
            return None
        if permutation(scope, producer) != (1, 0) or not scope.is_const(producer.input[0]):
            return None
        return _weight(scope, producer.input[0], not turned)
    shape = float_weights(scope, name, 2, "matrix")
    return None if shape is None else WeightMatrix(scope, name, (shape[0], shape[1]), turned)
