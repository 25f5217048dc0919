"""Queries and keys that are normalized head by head, behind the move of their heads.

    norm(Transpose(x [batch, length, heads, size]))  =  Transpose(norm(x))

A norm of the last axis does not mind how the others are arranged. Before the Transpose it works on
what is a view of tokens, which is how attention reads its operands best.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.operands import normalized_from, permutation, transpose
from passes.fuse.linear.affine import only_reader
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import TensorType
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import Miss
from toolkit.rewriting.rule import rewrite

_norms = op.any("LayerNormalization", "RMSNormalization")


@rewrite(_norms(op.Transpose(var("x", rank=4)).named("turn"), ...), opset=17)
def norm_before_move(g: Graph, x: str, turn: NodeProto, node: NodeProto) -> str:
    """norm(Transpose(x)) = Transpose(norm(x))"""
    perm, shape = permutation(g, turn), g.shape(x)
    if perm is None or perm[-1] != 3 or normalized_from(g, node) != 3:
        raise Miss("the axis that it normalizes moves, or it scales each head by itself")
    if only_reader(g, turn.output[0]) is None or len(nd.outputs_of(node)) > 1:
        raise Miss("something else reads what was moved, or its mean")
    inputs = [x, *node.input[1:]]
    normalized = g.op(node.op_type, *inputs, domain=node.domain, at=node, **nd.attrs(node))
    g.learn_type(normalized, TensorType(g.dtype(node.output[0]), shape))
    return transpose(g, normalized, perm, at=node)
