"""Fuse the concatenation of cached and new keys and values into Attention.

    Attention(q, concat(past_k, k), concat(past_v, v))  =  Attention(q, k, v, past_k, past_v)

The operator concatenates them itself and returns the results as further outputs. Nothing is copied
twice, and the new keys and values can be tokens.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.operands import given
from passes.fuse.attention.heads import AttentionOperand, OperandForm, mismatch, split_heads
from toolkit.ir import Graph, TensorType, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

_SEQUENCE = 2
"""The axis along which a cache grows: [batch, heads, sequence, size]."""


@rewrite(op.Attention(var("q", rank=4), var("k"), var("v"), ...), opset=23)
def cached_attention(g: Graph, q: str, k: str, v: str, node: NodeProto) -> str:
    """Attention(q, concat(past_k, k), concat(past_v, v)) = Attention(q, k, v, past_k, past_v)"""
    if given(node, 4) or len(node.output) > 1 or k == v:
        raise MatchFailure(f"{nd.label(node)} has a cache already, or keys that are its values")
    concats = [_concat(g, name, node) for name in (k, v)]
    (past_k, new_k), (past_v, new_v) = (concat.input for concat in concats)
    if not (_same_length(g, past_k, past_v) or _same_length(g, new_k, new_v)):
        raise MatchFailure("the cached keys and values may differ in length")
    attributes = nd.attrs(node)
    if attributes.get("is_causal"):
        raise MatchFailure(f"{nd.label(node)} is causal, counting its queries from the first key")
    names, forms = [q, new_k, new_v], _token_forms(g, q, new_k, new_v)
    if forms is not None:
        query, key, _ = forms
        names = [form.write(g, node) for form in forms]
        attributes["scale"] = attributes.get("scale", query.size**-0.5) * query.source.scale
        attributes.update(q_num_heads=query.heads, kv_num_heads=key.heads)
    fused = g.add("Attention", [*names, given(node, 3), past_k, past_v], 3, attributes, at=node)
    for concat, present in zip(concats, fused.output[1:], strict=True):
        g.replace(concat.output[0], present)
        g.prune(concat)
    result = fused.output[0]
    if forms is None:
        return result
    query, _, value = forms
    tokens = query.batch, query.sequence, query.heads * value.size
    g.learn_type(result, TensorType(g.dtype(q), tokens))
    return split_heads(g, result, query.heads, value.size, node)


def _token_forms(g: Graph, q: str, k: str, v: str) -> list[OperandForm] | None:
    """Return query, key and value as tokens, if they fit together."""
    query = AttentionOperand(g, q).tokens()
    key, value = (AttentionOperand(g, name, scaled=False).tokens() for name in (k, v))
    if query is None or key is None or value is None or not key.keeps_heads:
        return None
    return None if mismatch(query, key, value) else [query, key, value]


def _same_length(g: Graph, keys: str, values: str) -> bool:
    one, other = g.shape(keys), g.shape(values)
    return one is not None and other is not None and one[_SEQUENCE] == other[_SEQUENCE]


def _concat(g: Graph, name: str, attention: NodeProto) -> NodeProto:
    """Return the Concat of cached and new values, which must have no other user."""
    concat = g.producer(name)
    if concat is None or not nd.is_op(concat, "Concat") or len(concat.input) != 2:
        raise MatchFailure(f"'{name}' does not join cached and new values")
    if nd.attr(concat, "axis", 0) not in (_SEQUENCE, _SEQUENCE - 4) or g.rank(name) != 4:
        raise MatchFailure(f"{nd.label(concat)} does not join along the sequence")
    if any(user is not attention for user in g.users(name)) or g.is_captured(name):
        # The mask may depend on it, and the operator cannot use its own results.
        raise MatchFailure(f"{nd.label(concat)} has other users")
    return concat
