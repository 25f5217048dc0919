"""The kernel that computes attention: the standard operator's, or the runtime's own.

`Attention` is the faster one nearly everywhere. For long sequences without a mask the contributed
`MultiHeadAttention` may be, since it never writes the scores out in full.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from passes.lower.cost_query import Choice
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import Miss
from toolkit.rewriting.rule import Rule, rewrite

_PLAIN = {"q_num_heads", "kv_num_heads", "scale"}
"""What both operators have. The rest (causal, softcap, precision, score output) is one's alone."""


def rules(choice: Choice) -> tuple[Rule, ...]:
    @rewrite(op.Attention(var("q", rank=3), var("k", rank=3), var("v", rank=3)), opset=23)
    def attention_as_multi_head(g: Graph, q: str, k: str, v: str, node: NodeProto) -> str:
        """Attention of three [batch, length, heads x size] as MultiHeadAttention."""
        attributes = nd.attrs(node)
        heads = attributes.get("q_num_heads")
        if not set(attributes) <= _PLAIN or heads != attributes.get("kv_num_heads"):
            raise Miss("MultiHeadAttention has as many heads for keys as for queries, and no more")
        if len(nd.outputs_of(node)) != 1:
            raise Miss("its scores, or its keys and values, are read")
        if any(g.dtype(value) != TensorProto.FLOAT for value in (q, k, v)):
            raise Miss("its costs are known for 32-bit floats alone")
        shape = g.shape(q)
        if shape is None or not isinstance(shape[1], int) or not isinstance(shape[2], int):
            raise Miss("how long the sequence is differs from run to run")
        if g.shape(k) != shape or g.shape(v) != shape:
            raise Miss("its costs are known for one length and one head size")
        choice.require_at("attention", "multi-head", shape[1], shape[2])
        return g.op(
            "MultiHeadAttention",
            *(q, k, v),
            domain="com.microsoft",
            at=node,
            num_heads=heads,
            scale=attributes.get("scale"),
        )

    return (attention_as_multi_head,)
