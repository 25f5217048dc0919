"""Attention with a cache: keys and values of earlier steps, joined with those of this step.

    Attention(q, concat(past_k, k), concat(past_v, v))  =  Attention(q, k, v, past_k, past_v)

The operator joins them itself and gives what it joined as further outputs, so that nothing is
copied twice, and the new keys and values can come as tokens.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.operands import given
from passes.fuse.attention.heads import Operand, heads_apart, mismatch
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import TensorType
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import Miss
from toolkit.rewriting.rule import rewrite

_SEQUENCE = 2
"""The axis along which a cache grows: [batch, heads, sequence, size]."""


@rewrite(op.Attention(var("q", rank=4), var("k"), var("v"), ...), opset=23)
def cached_attention(g: Graph, q: str, k: str, v: str, node: NodeProto) -> str:
    """Attention(q, concat(past_k, k), concat(past_v, v))"""
    if given(node, 4) or len(node.output) > 1 or k == v:
        raise Miss(f"{nd.label(node)} has a cache already, or one for keys and values together")
    joined = [_joined(g, name, node) for name in (k, v)]
    (past_k, new_k), (past_v, new_v) = (join.input for join in joined)
    if not (_as_long(g, past_k, past_v) or _as_long(g, new_k, new_v)):
        raise Miss("the keys may be joined at another place than the values")
    attributes = nd.attrs(node)
    if attributes.get("is_causal"):
        raise Miss(f"{nd.label(node)} is causal, and counts its queries from the first key on")
    operands = Operand(g, q), Operand(g, new_k, scaled=False), Operand(g, new_v, scaled=False)
    forms = [operand.tokens() for operand in operands]
    names = [q, new_k, new_v]
    query, key, value = forms
    on_tokens = (
        query is not None
        and key is not None
        and value is not None
        and not mismatch(query, key, value, operands[0])
        and operands[1].keeps_heads(key)
    )
    if on_tokens and query is not None and key is not None:
        found = [form for form in forms if form is not None]
        names = [one.write(form, node) for one, form in zip(operands, found, strict=True)]
        attributes["scale"] = attributes.get("scale", query.size**-0.5) * query.source.scale
        attributes.update(q_num_heads=query.heads, kv_num_heads=key.heads)
    fused = g.add("Attention", [*names, given(node, 3), past_k, past_v], 3, attributes, at=node)
    for join, present in zip(joined, fused.output[1:], strict=True):
        g.replace(join.output[0], present)
        g.prune(join)
    result = fused.output[0]
    if not on_tokens or query is None or value is None:
        return result
    tokens = (query.batch, query.sequence, query.heads * value.size)
    g.learn_type(result, TensorType(g.dtype(q), tokens))
    return heads_apart(g, result, query.heads, value.size, node)


def _as_long(g: Graph, keys: str, values: str) -> bool:
    """Whether there are as many keys as values."""
    one, other = g.shape(keys), g.shape(values)
    return one is not None and other is not None and one[_SEQUENCE] == other[_SEQUENCE]


def _joined(g: Graph, name: str, reader: NodeProto) -> NodeProto:
    """The Concat of a cache and what is new, which only the attention reads."""
    join = g.producer(name)
    if join is None or not nd.is_op(join, "Concat") or len(join.input) != 2:
        raise Miss(f"'{name}' is not a cache and what is new")
    axis = nd.attr(join, "axis", 0)
    if axis not in (_SEQUENCE, _SEQUENCE - 4) or g.rank(name) != 4:
        raise Miss(f"{nd.label(join)} does not join along the sequence")
    others = [user for user in g.users(name) if user is not reader]
    if others or g.is_captured(name):
        # The mask might be made of it, and the operator cannot read what it makes itself.
        raise Miss(f"{nd.label(join)} is read elsewhere too")
    return join
