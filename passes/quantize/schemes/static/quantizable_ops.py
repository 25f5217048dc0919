"""The operators that have int8 kernels, in three kinds.

    product   Conv, ConvTranspose, Gemm, MatMul, with constant weights or without; a FusedMatMul
              with weights is a MatMul with scaled or transposed weights
    combine   Add, Mul, Concat, Sigmoid, ...: the result has a range of its own
    carry     MaxPool, Reshape, Transpose, ...: the result consists of elements of the operand and
              shares its range, since the kernels do not rescale

A Relu or Clip that is the sole user of a result is free if the range is calibrated after it: the
limits of the 8-bit range replace it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import given
from passes.quantize.layers.layers import FUSED_MATMUL, is_fused
from passes.quantize.schemes.static.weights import LayerWeight, weight_of
from toolkit.errors import UsageError
from toolkit.ir import Graph, node as nd
from toolkit.quantization.plan import Entry
from toolkit.rewriting.match_failure import MatchFailure

Kind = Literal["product", "combine", "carry"]

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
ALL_PRODUCTS = (*PRODUCTS, FUSED_MATMUL)
COMBINERS = (
    *("Add", "Mul", "Concat", "Sigmoid", "LeakyRelu", "GlobalAveragePool", "AveragePool"),
    *("Relu", "Clip", "HardSigmoid", "HardSwish", "Softmax", "Tanh"),
)
CARRIERS = (
    *("MaxPool", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split"),
    *("Gather", "Expand", "Tile", "Identity", "DepthToSpace", "SpaceToDepth", "Pad", "Resize"),
)
"""Data movement with an int8 kernel, in the order of the option `ops`; a subset of MOVEMENT."""

_TWO_OPERANDS = ("Add", "Mul", "MatMul")


@dataclass(frozen=True, slots=True, eq=False)
class Int8Site:
    """A node that can compute in int8."""

    graph: Graph
    node: NodeProto
    kind: Kind
    operands: tuple[int, ...]
    """The input slots that may hold activations."""
    weight: LayerWeight | None = None

    @property
    def activations(self) -> list[str]:
        """The operands that are not constant."""
        names = [self.node.input[slot] for slot in self.operands]
        return list(dict.fromkeys(n for n in names if not self.graph.is_const(n)))

    @property
    def is_inner(self) -> bool:
        """Whether it is in a subgraph, which may run many times or never."""
        return self.graph.parent is not None


def site_of(g: Graph, node: NodeProto) -> Int8Site | None:
    """Return the site of `node`, or None; raise MatchFailure if it must stay float."""
    if nd.qualified(node) in ALL_PRODUCTS:
        return _product(g, node)
    if node.domain not in nd.STANDARD_DOMAINS:
        return None
    if node.op_type in COMBINERS:
        return _combine(g, node)
    if node.op_type in CARRIERS:
        return _carry(g, node)
    return None


def planned_site(g: Graph, node: NodeProto, entry: Entry) -> Int8Site | None:
    """Return the site of a node that a plan quantizes; raise UsageError if it must stay float."""
    try:
        return site_of(g, node)
    except MatchFailure as failure:
        raise UsageError(f"{entry.label} cannot be static: it has {failure}") from failure


def limits_after(g: Graph, value: str) -> tuple[str, float, float] | None:
    """Return output and bounds of the Relu or Clip that is the sole user of `value`.

    None without one, or if its bounds do not contain zero.
    """
    user = g.sole_user(value)
    if user is None or user.input[0] != value:
        return None
    bounds = bounds_of(g, user)
    if bounds is None or not bounds[0] <= 0 <= bounds[1]:
        return None
    return (user.output[0], *bounds)


def bounds_of(g: Graph, node: NodeProto) -> tuple[float, float] | None:
    """Return the bounds of a Relu or Clip; None if they are not constant."""
    if nd.is_op(node, "Relu"):
        return 0.0, math.inf
    if not nd.is_op(node, "Clip"):
        return None
    bounds = [nd.attr(node, "min", -math.inf), nd.attr(node, "max", math.inf)]
    for slot in (1, 2):
        if given(node, slot):
            known = g.const(node.input[slot])
            if known is None or known.size != 1:
                return None
            bounds[slot - 1] = float(known.reshape(-1)[0])
    return None if np.isnan(bounds).any() else (bounds[0], bounds[1])


def _product(g: Graph, node: NodeProto) -> Int8Site | None:
    if g.is_const(node.input[0]):
        return None
    weight = weight_of(g, node)
    if weight is not None:
        return Int8Site(g, node, "product", (0,), weight)
    if is_fused(node):
        raise MatchFailure("two activations, scaled or transposed, without an int8 kernel")
    if not nd.is_op(node, "MatMul"):
        raise MatchFailure("weights that are computed")
    if not _is_float32(g, node.input[0]):
        raise MatchFailure("activations that are not 32-bit floats")
    if g.is_const(node.input[1]):
        raise MatchFailure("weights that are not a float matrix")
    producer = g.producer(node.input[1])
    if producer is not None and nd.is_op(producer, "Transpose") and g.is_const(producer.input[0]):
        raise MatchFailure("weights that are transposed at run time")
    return Int8Site(g, node, "product", (0, 1))


def _combine(g: Graph, node: NodeProto) -> Int8Site | None:
    slots = range(2) if nd.is_op(node, *_TWO_OPERANDS) else range(1)
    if nd.is_op(node, "Concat"):
        slots = range(len(node.input))
    if all(g.is_const(node.input[slot]) for slot in slots):
        return None
    if nd.is_op(node, "Clip") and bounds_of(g, node) is None:
        return None
    if not all(_is_float32(g, node.input[slot]) for slot in slots):
        return None
    return Int8Site(g, node, "combine", tuple(slots))


def _carry(g: Graph, node: NodeProto) -> Int8Site | None:
    if g.is_const(node.input[0]) or not _is_float32(g, node.input[0]):
        return None
    if nd.is_op(node, "MaxPool") and len(nd.outputs_of(node)) > 1:
        return None  # the second output has indices
    if nd.is_op(node, "Pad") and not pads_zeros_or_copies(g, node):
        return None
    if nd.is_op(node, "Resize") and nd.attr(node, "mode", "nearest") != "nearest":
        return None
    return Int8Site(g, node, "carry", (0,))


def pads_zeros_or_copies(g: Graph, node: NodeProto) -> bool:
    """Whether a Pad adds only zeros or copies of elements."""
    if nd.attr(node, "mode", "constant") != "constant":
        return True
    if given(node, 2):
        known = g.const(node.input[2])
        return known is not None and not known.any()
    return nd.attr(node, "value", 0.0) == 0


def _is_float32(g: Graph, value: str) -> bool:
    """Whether a value is of type float32 or unknown type."""
    return g.dtype(value) in (TensorProto.FLOAT, TensorProto.UNDEFINED)
