"""Islands of floats between int8 layers, each as one operator.

SiLU in int8 loses range and accuracy, and as two operators of floats it reads its input twice: the
runtime then converts it for each of them. As one operator it takes about as long as in int8.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from toolkit.graph import Graph
from toolkit.pattern import op, var
from toolkit.rules import rewrite

x = var("x")


@rewrite(op.Mul(x, op.Sigmoid(x)))
def silu_island(g: Graph, x: str, node: NodeProto) -> str | None:
    """x sigmoid(x)"""
    if g.dtype(x) != TensorProto.FLOAT:
        return None
    return g.op("QuickGelu", x, domain="com.microsoft", at=node, alpha=1.0)


ISLANDS = (silu_island,)
