"""Move the normalization of each head (queries and keys) before the Transpose of the heads.

    norm(Transpose(x [batch, length, heads, size]))  =  Transpose(norm(x))

A norm over the last axis is independent of the order of the others. Before the Transpose its
operand is a view of tokens, the layout that attention prefers.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.operands import normalized_from, permutation, transpose
from passes.fuse.typed_op import typed_op
from toolkit.ir import Graph, TensorType, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

_norms = op.any("LayerNormalization", "RMSNormalization")


@rewrite(_norms(op.Transpose(var("x", rank=4)).named("moved"), ...), opset=17)
def norm_before_move(g: Graph, x: str, moved: NodeProto, node: NodeProto) -> str:
    """norm(Transpose(x)) = Transpose(norm(x))"""
    perm = permutation(g, moved)
    if perm is None or perm[-1] != 3 or normalized_from(g, node) != 3:
        raise MatchFailure("the normalized axis moves, or each head has its own scale")
    if g.sole_user(moved.output[0]) is None or len(nd.outputs_of(node)) > 1:
        raise MatchFailure("the Transpose or the statistics have other users")
    inputs = [x, *node.input[1:]]
    known = TensorType(g.dtype(node.output[0]), g.shape(x))
    normalized = typed_op(
        g, known, node.op_type, *inputs, domain=node.domain, at=node, **nd.attrs(node)
    )
    return transpose(g, normalized, perm, at=node)
