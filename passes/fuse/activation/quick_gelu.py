"""The factor in the gate of a QuickGelu, x sigmoid(a x).

    z = a x:   x sigmoid(a x) = z sigmoid(z) / a

Between two linear maps neither factor is left: a goes into the weights of the map that gives x, and
1 / a into those of the map that reads the result.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, helper

from passes.fuse.linear.affine import Channels, by_channel, may_copy, only_reader
from passes.fuse.linear.dense import Dense
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.pattern import number, op, product, var
from toolkit.rewriting.match_failure import Miss
from toolkit.rewriting.rule import rewrite

x = var("x")
_LEAST, _MOST = 1e-2, 1e2
"""A factor beyond these is no gate's: the weights could get too large or too small for it."""


@rewrite(
    product(
        x, op.Sigmoid(product(x, number("a", where=lambda a: _LEAST <= a <= _MOST and a != 1)))
    ),
    opset=7,
)
def factor_into_weights(g: Graph, x: str, a: float, node: NodeProto) -> str:
    """(u V + b) sigmoid(a (u V + b)) W = z sigmoid(z) (W / a) with z = u (a V) + a b"""
    if g.use_count(x) != 2 or not _is_mapped(g, x):
        raise Miss("what it is of is not given by a linear map for it alone")
    reader = only_reader(g, node.output[0])
    if reader is None or not _is_map(g, reader) or reader.input[0] != node.output[0]:
        raise Miss("its result is not read by a linear map alone")
    return scaled_silu(g, x, a, node)


def scaled_silu(g: Graph, x: str, a: float, node: NodeProto) -> str:
    """x sigmoid(a x) as z sigmoid(z) / a with z = a x; linear maps around it take the factors."""
    known = g.type(x)
    if known is None:
        raise Miss("its element type is not known")
    z = g.op("Mul", x, _number(g, a, known.dtype), at=node)
    silu = g.op("Mul", z, g.op("Sigmoid", z, at=node), at=node)
    g.learn_type(silu, known)
    return g.op("Mul", silu, _number(g, 1 / a, known.dtype), at=node)


def _is_mapped(g: Graph, value: str) -> bool:
    """Whether a linear map gives `value`, perhaps by a bias behind it."""
    maker = g.producer(value)
    if maker is None or not nd.is_op(maker, "Add"):
        return maker is not None and _is_map(g, maker)
    for index in (0, 1):
        source, before = maker.input[index], g.producer(maker.input[index])
        if before is not None and only_reader(g, source) is not None and _is_map(g, before):
            outputs: Channels = Dense.of(g, before).outputs
            return by_channel(g, maker.input[1 - index], outputs) is not None
    return False


def _is_map(g: Graph, node: NodeProto) -> bool:
    """Whether it is a MatMul or Gemm by a constant matrix that can be changed for it alone."""
    if not nd.is_op(node, "MatMul", "Gemm") or nd.attr(node, "transA", 0):
        return False
    weight = g.const(node.input[1])
    return weight is not None and weight.ndim == 2 and may_copy(g, node.input[1])


def _number(g: Graph, value: float, dtype: int) -> str:
    array: Array = np.array(value, dtype=helper.tensor_dtype_to_np_dtype(dtype))
    return g.constant(array, "number")
