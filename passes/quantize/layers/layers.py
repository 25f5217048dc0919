"""Layers with constant float32 weights.

    Linear            y = alpha x W + beta b     MatMul, Gemm, FusedMatMul
    Table             y = T[i]                   Gather along the first axis
    Convolution       Conv
    Recurrent         LSTM
    PackedAttention   com.microsoft::Attention, whose projections are packed into one weight

The weight of the first two is a matrix, direct or through a Transpose, as in a projection tied to a
table. `find_layers` finds them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from onnx import NodeProto

from passes.analysis.operands import given
from toolkit.ir import Graph, node as nd

FUSED_MATMUL = "com.microsoft::FusedMatMul"
TURNED_INPUT = ("transA", "transBatchA", "transBatchB")
"""Attributes of Gemm and FusedMatMul that transpose the input."""

ScaleAxes: TypeAlias = tuple[int | None, ...]


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
class Layer:
    """A layer. Properties read the node, which other rewrites may change."""

    kind: ClassVar[str]
    rule: ClassVar[str]
    """The name of the rewrite to dynamic int8."""
    axes: ClassVar[ScaleAxes] = (1, None)
    """The axes that dynamic scales may have, that of the outputs first; None: one for all."""
    node: NodeProto
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the weights."""

    @property
    def size(self) -> int:
        """The number of weights."""
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True, slots=True, eq=False)
class MatrixLayer(Layer):
    """A layer whose weight is a matrix."""

    weight: WeightMatrix


class Linear(MatrixLayer):
    """y = alpha x W + beta b."""

    kind: ClassVar[str] = "a linear layer"
    rule: ClassVar[str] = "quantize-linear"

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


class Table(MatrixLayer):
    """A lookup table, y = T[i]."""

    kind: ClassVar[str] = "a table"
    rule: ClassVar[str] = "quantize-table"
    axes: ClassVar[ScaleAxes] = (0,)

    @property
    def indices(self) -> str:
        return self.node.input[1]


class Convolution(Layer):
    """A Conv."""

    kind: ClassVar[str] = "a convolution"
    rule: ClassVar[str] = "quantize-conv"
    axes: ClassVar[ScaleAxes] = (0, None)


class Recurrent(Layer):
    """An LSTM; its weights are W and R."""

    kind: ClassVar[str] = "a recurrent layer"
    rule: ClassVar[str] = "quantize-lstm"


class PackedAttention(Layer):
    """An Attention of com.microsoft."""

    kind: ClassVar[str] = "packed attention"
    rule: ClassVar[str] = "quantize-attention"
