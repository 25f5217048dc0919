"""Fuse scaled dot product attention: softmax(scale * Q K^T + bias) V.

The pattern is the two products and the softmax between them. Everything that varies is analyzed
instead of listed: `scores` collects scales, masks and biases, `heads` finds the sources of query,
key and value. The result is the standard operator Attention (opset 23) on tokens
[batch, sequence, heads * size] where possible, otherwise on [batch, heads, sequence, size].

Fully masked rows: exporters write `where(isnan(p), 0, p)` after the softmax, or apply the mask a
second time (Keras), and the operator returns 0 for them as well. Without such a guard the original
returns NaN, and the fused model 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import (
    broadcast,
    permutation,
    scalar,
    squeeze,
    transpose,
)
from passes.fuse.attention.bias import BiasWriter, ScoreLayout, needs_full_precision
from passes.fuse.attention.grouped_heads import HeadAxes
from passes.fuse.attention.head_norms import norm_before_move
from passes.fuse.attention.heads import (
    AttentionOperand,
    OperandForm,
    heads_restored,
    merge_batch_and_heads,
    mismatch,
    split_heads,
)
from passes.fuse.attention.kv_cache import cached_attention
from passes.fuse.attention.packed_qkv import packed_heads, split_before_view
from passes.fuse.attention.reshaped_bias import bias_in_another_shape
from passes.fuse.attention.scores import Scores, keeps_matrices, read_scores
from passes.fuse.computed_sizes import size_vector
from passes.fuse.typed_op import typed_op
from toolkit.ir import Graph, Shape, TensorType, node as nd
from toolkit.pattern import maybe_cast, op, optional, var
from toolkit.rewriting.anchors import Anchors
from toolkit.rewriting.rule import MatchFailure, RulePass, rewrite

_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
"""Element types for which onnxruntime has a kernel."""

_MIN_SCALE = 1e-30
"""onnxruntime requires a positive scale, in float32."""

_softmax = op.Softmax(var("scores")).named("softmax")
_nan_guarded = op.Where(op.IsNaN(_softmax), 0, _softmax).named("guard")
_masked_twice = op.Where(var("kept"), _softmax, 0).named("guard")
_probabilities = optional(
    [op.Reshape, op.Squeeze, op.Unsqueeze], maybe_cast(_softmax | _nan_guarded | _masked_twice)
)


@rewrite(
    op.MatMul(_probabilities.when(keeps_matrices), var("v")),
    op.MatMul(var("v"), op.Transpose(_probabilities).named("swap")),
    opset=23,
)
def attention(
    g: Graph,
    scores: str,
    v: str,
    softmax: NodeProto,
    guard: NodeProto | None,
    kept: str | None,
    swap: NodeProto | None,
    node: NodeProto,
) -> str:
    """softmax(scale * Q K^T + bias) V, or its transpose V^T softmax(..)^T (pixels as last axis)"""
    perm = _matrix_transpose(g, v, swap) if swap is not None else ()
    value = transpose(g, v, perm, at=node) if perm else v
    result = _write_attention(
        g, _analyzed(g, scores, kept), value, softmax, guard is not None, node
    )
    return transpose(g, result, perm, at=node) if perm else result


def _matrix_transpose(g: Graph, v: str, swap: NodeProto) -> tuple[int, ...]:
    """Return the permutation of `swap`, which must swap the last two axes and nothing else."""
    rank = g.rank(v)
    if rank is None or g.rank(swap.output[0]) != rank:
        raise MatchFailure("the ranks of value and scores differ")
    perm = (*range(rank - 2), rank - 1, rank - 2)
    if permutation(g, swap) != perm or not keeps_matrices(g, swap.input[0]):
        raise MatchFailure(f"{nd.label(swap)} does more than transpose each matrix")
    return perm


def _analyzed(g: Graph, value: str, kept: str | None) -> Scores:
    """Return the scores. With `kept`, masked probabilities are set to 0 after the softmax: then the
    mask value becomes -inf, and a fully masked row attends to nothing instead of everything."""
    found = read_scores(g, value)
    if kept is None:
        return found
    own = [bias for bias in found.biases if bias.value == kept and bias.replaces]
    if len(own) != 1 or own[0].where_true:
        raise MatchFailure("the masks before and after the softmax differ")
    found.biases[found.biases.index(own[0])] = replace(own[0], masked=-np.inf)
    return found


def _write_attention(
    g: Graph, found: Scores, v: str, softmax: NodeProto, guarded: bool, node: NodeProto
) -> str:
    """Write the operator for these scores; the result has the shape of the second product."""
    rank, axis = g.rank(softmax.input[0]), nd.attr(softmax, "axis", -1)
    if axis != -1 and (rank is None or axis != rank - 1):
        raise MatchFailure(f"{nd.label(softmax)} is along axis {axis}, not along the keys")
    dtype = g.dtype(found.query)
    value = _without_cast(g, v, dtype)
    if dtype not in _TYPES or g.dtype(found.key) != dtype or g.dtype(value) != dtype:
        raise MatchFailure(
            "query, key and value differ in element type, or Attention does not support it"
        )
    if found.head_scale:
        found.query = _scaled_by_head(g, found, node)
    ranks = {g.rank(found.query), g.rank(found.key)}
    is_merged = g.rank(value) == g.rank(node.output[0]) == 3 and ranks == {4}
    if is_merged:  # only the second product has batch and heads in one axis
        value = heads_restored(g, value, node)
    elif g.rank(value) == 4 and ranks == {3}:  # only the first product has
        found.query, found.key = (heads_restored(g, x, node) for x in (found.query, found.key))
    axes = HeadAxes.of(g, found.query, found.key, value)
    if axes is not None:
        names = found.query, found.key, value
        found.query, found.key, value = (axes.merged(name, node) for name in names)
    result = QueryKeyValue.of(g, found, value).write(found, guarded, node)
    if axes is not None:
        result = axes.split(result, node)
    if is_merged:
        result = merge_batch_and_heads(g, result, node)
    return result if g.dtype(v) == dtype else g.op("Cast", result, at=node, to=g.dtype(v))


def _scaled_by_head(g: Graph, found: Scores, node: NodeProto) -> str:
    if g.dtype(found.head_scale) != g.dtype(found.query):
        raise MatchFailure("query and per-head scale differ in element type")
    query = g.shape(found.query) or ()
    if broadcast(g.shape(found.head_scale) or (), query) != query:
        raise MatchFailure("the per-head scale broadcasts the scores")
    return typed_op(g, g.type(found.query), "Mul", found.query, found.head_scale, at=node)


def _without_cast(g: Graph, v: str, dtype: int) -> str:
    """Return the value in the type of the query: some exporters cast it for the product."""
    node = g.producer(v)
    is_cast = nd.is_op(node, "Cast") and node is not None and g.dtype(node.input[0]) == dtype
    return node.input[0] if is_cast and node is not None else v


@dataclass(frozen=True, slots=True)
class QueryKeyValue:
    """The forms of query, key and value that the operator uses, and the rank of the MatMuls."""

    g: Graph
    rank: int
    query: OperandForm
    key: OperandForm
    value: OperandForm

    @classmethod
    def of(cls, g: Graph, scores: Scores, value: str) -> QueryKeyValue:
        """Return the cheapest forms that fit together; raise MatchFailure if there are none."""
        q, v = AttentionOperand(g, scores.query), AttentionOperand(g, value)
        k = AttentionOperand(g, scores.key, sequence=-1, size=-2)
        for one, name in ((q, "query"), (k, "key"), (v, "value")):
            if one.rank not in (3, 4):
                raise MatchFailure(f"the {name} has rank {one.rank or 'unknown'}, not 3 or 4")
        if not q.rank == k.rank == v.rank:
            raise MatchFailure("the ranks of query, key and value differ")
        reason = "the number of heads of query, key or value is not known"
        for form in (
            AttentionOperand.tokens,
            AttentionOperand.separate if q.rank == 4 else AttentionOperand.merged,
        ):
            query, key, val = form(q), form(k), form(v)
            if query is None or key is None or val is None:
                continue
            reason = mismatch(query, key, val)
            if not reason:
                return cls(g, q.rank, query, key, val)
        raise MatchFailure(reason)

    def write(self, scores: Scores, guarded: bool, node: NodeProto) -> str:
        """Write the operator; the result has the shape of the MatMul."""
        g, query, key = self.g, self.query, self.key
        names = [form.write(g, node) for form in (query, key, self.value)]
        if query.batch != key.batch:
            names[0] = self._for_each_batch(names[0], names[1], node)
        own = dtype = g.dtype(names[0])
        if own == TensorProto.FLOAT16 and needs_full_precision(g, scores.biases):
            dtype = TensorProto.FLOAT
            names = [self._cast(name, dtype, node) for name in names]
        if scores.biases:
            layout = ScoreLayout(
                key.batch, query.heads, query.sequence, key.sequence, dtype, guarded
            )
            writer = BiasWriter(g, layout, names[0], node)
            bias, shape = writer.total(scores.biases, scores.least)
            if bias:
                names.append(writer.full(bias, shape, names[1], 1 if query.on_tokens else 2))
        scale = scores.scale * query.source.scale * key.source.scale
        if not _MIN_SCALE < scale < 1 / _MIN_SCALE:
            raise MatchFailure(f"the operator does not support a scale of {scale:g}")
        attributes: dict[str, Any] = {"scale": scale}
        if scores.cap:  # the scores are divided by the cap before tanh
            attributes = {"scale": scale * scores.cap, "softcap": scores.cap}
        if query.on_tokens:
            attributes.update(q_num_heads=query.heads, kv_num_heads=key.heads)
        result = g.op("Attention", *names, at=node, **attributes)
        if dtype != own:
            result = g.op("Cast", result, at=node, to=own)
        if self.value.source.scale != 1.0:
            factor = scalar(g, self.value.source.scale, g.dtype(query.source.value))
            result = g.op("Mul", result, factor, at=node)
        return self._in_matmul_shape(result, node)

    def _cast(self, name: str, dtype: int, node: NodeProto) -> str:
        return typed_op(
            self.g, TensorType(dtype, self.g.shape(name)), "Cast", name, at=node, to=dtype
        )

    def _for_each_batch(self, query: str, key: str, node: NodeProto) -> str:
        """Repeat a query that is the same for the whole batch, such as a learned one."""
        g, shape = self.g, self.g.shape(query) or ()
        target = size_vector(g, [(key, 0), *[1] * (len(shape) - 1)], node)
        known = TensorType(g.dtype(query), (self.key.batch, *shape[1:]))
        return typed_op(g, known, "Expand", query, target, at=node)

    def _in_matmul_shape(self, result: str, node: NodeProto) -> str:
        """Write the result as [batch, heads, sequence, size], or with the first two merged."""
        g, query, size, batch = self.g, self.query, self.value.size, self.key.batch
        if query.on_tokens and query.heads == 1 and self.rank == 3:
            return result
        shape: Shape = (batch, query.heads, query.sequence, size)
        if query.on_tokens:
            shape = (batch, query.sequence, query.heads * size)
        g.learn_type(result, TensorType(g.dtype(query.source.value), shape))
        if query.on_tokens:
            result = split_heads(g, result, query.heads, size, node)
        if self.rank == 4:
            return result
        if batch == 1:
            return squeeze(g, result, [0], at=node)
        return merge_batch_and_heads(g, result, node)


RULES = (
    packed_heads,
    split_before_view,
    norm_before_move,
    bias_in_another_shape,
    attention,
    cached_attention,
)


class FuseAttention(RulePass):
    """Fuse scaled dot product attention into Attention."""

    name = "fuse-attention"
    rules = RULES
    anchors: ClassVar[Anchors] = {"attention": ("Softmax > MatMul",)}
