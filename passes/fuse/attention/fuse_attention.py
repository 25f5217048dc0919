"""Scaled dot product attention, in every spelling: softmax(scale * Q K^T + bias) V.

The two products and the softmax between them are the pattern; all that varies is read, not listed:
`scores` reads scales, masks and biases, `heads` finds what query, key and value are views of. The
result is the standard's Attention (opset 23) on tokens [batch, sequence, heads * size] where the
operands can be had that way, otherwise on [batch, heads, sequence, size].

Rows that are masked as a whole: an exporter writes `where(isnan(p), 0, p)` behind the softmax, or
the mask once more (Keras), and the operator gives 0 for them too. Without that guard the original
gives NaN, and the fused model 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.analysis.operands import int_vector, permutation, squeeze, transpose
from passes.fuse.attention.bias import BiasWriter, Layout, need_full_precision
from passes.fuse.attention.grouped_heads import Groups
from passes.fuse.attention.head_norms import norm_before_move
from passes.fuse.attention.heads import (
    Form,
    Operand,
    heads_apart,
    heads_merged,
    heads_restored,
    mismatch,
)
from passes.fuse.attention.kv_cache import cached_attention
from passes.fuse.attention.packed_qkv import packed_heads, split_before_view
from passes.fuse.attention.reshaped_bias import bias_in_another_shape
from passes.fuse.attention.scores import Scores, keeps_matrices, read_scores
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import TensorType
from toolkit.pattern import maybe_cast, op, optional, var
from toolkit.rewriting.anchors import Cores
from toolkit.rewriting.match_failure import Miss
from toolkit.rewriting.rule import apply_rules, rewrite
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
"""Element types that the runtime has the operator for."""

_LEAST_SCALE = 1e-30
"""The runtime takes positive scales only, of 32 bits."""

_VIEWS = [op.Reshape, op.Squeeze, op.Unsqueeze]

_weights = op.Softmax(var("scores")).named("softmax")
_guarded = op.Where(op.IsNaN(_weights), 0, _weights).named("guard")
_masked_again = op.Where(var("kept"), _weights, 0).named("guard")
_probabilities = optional(_VIEWS, maybe_cast(_weights | _guarded | _masked_again))


@rewrite(op.MatMul(_probabilities.when(keeps_matrices), var("v")), opset=23)
def attention(
    g: Graph,
    scores: str,
    v: str,
    softmax: NodeProto,
    guard: NodeProto | None,
    kept: str | None,
    node: NodeProto,
) -> str:
    """softmax(scale * Q K^T + bias) V"""
    return _attend(g, _read(g, scores, kept), v, softmax, guard, node)


@rewrite(op.MatMul(var("v"), op.Transpose(_probabilities).named("turn")), opset=23)
def attention_turned(
    g: Graph,
    scores: str,
    v: str,
    softmax: NodeProto,
    guard: NodeProto | None,
    kept: str | None,
    turn: NodeProto,
    node: NodeProto,
) -> str:
    """V^T softmax(scale * Q K^T + bias)^T, as on images whose pixels come last"""
    rank, shape = g.rank(v), g.shape(v)
    if rank is None or shape is None or g.rank(turn.output[0]) != rank:
        raise Miss("the value has not as many axes as the scores")
    swap = (*range(rank - 2), rank - 1, rank - 2)
    if permutation(g, turn) != swap or not keeps_matrices(g, turn.input[0]):
        raise Miss(f"{nd.label(turn)} does more than to turn each matrix")
    upright = transpose(g, v, swap, at=node)
    g.learn_type(upright, TensorType(g.dtype(v), tuple(shape[axis] for axis in swap)))
    result = _attend(g, _read(g, scores, kept), upright, softmax, guard, node)
    return transpose(g, result, swap, at=node)


def _read(g: Graph, value: str, kept: str | None) -> Scores:
    """The scores; masked with minus infinity where what is masked is set to 0 once more, behind.

    Else a row that is masked as a whole would attend to everything alike, there to nothing.
    """
    found = read_scores(g, value)
    if kept is None:
        return found
    own = [bias for bias in found.biases if bias.value == kept and bias.replaces]
    if len(own) != 1 or own[0].where_true:
        raise Miss("what is set to 0 behind the softmax is not what is masked before it")
    found.biases[found.biases.index(own[0])] = replace(own[0], masked=-np.inf)
    return found


def _attend(
    g: Graph,
    found: Scores,
    v: str,
    softmax: NodeProto,
    guard: NodeProto | None,
    node: NodeProto,
) -> str:
    """The operator for these scores, in the shape that the product with the values had."""
    _require_last_axis(g, softmax)
    dtype = g.dtype(found.query)
    value = _before_cast(g, v, dtype)
    if dtype not in _TYPES or g.dtype(found.key) != dtype or g.dtype(value) != dtype:
        raise Miss("query, key and value are not of one type that Attention takes")
    if found.head_scale:
        found.query = _scaled_by_head(g, found, node)
    ranks = {g.rank(found.query), g.rank(found.key)}
    is_merged = g.rank(value) == g.rank(node.output[0]) == 3 and ranks == {4}
    if is_merged:
        # Only the product with the values is for all heads at once.
        value = heads_restored(g, value, node)
    elif g.rank(value) == 4 and ranks == {3}:
        # The scores were computed for all heads at once, and taken apart for their mask.
        found.query, found.key = (
            heads_restored(g, name, node) for name in (found.query, found.key)
        )
    grouped = Groups.of(g, found.query, found.key, value)
    if grouped is not None:
        found.query, found.key, value = (
            grouped.joined(name, node) for name in (found.query, found.key, value)
        )
    result = Operands.of(g, found, value).write(found, guard is not None, node)
    if grouped is not None:
        result = grouped.apart(result, node)
    if is_merged:
        result = heads_merged(g, result, node)
    return result if g.dtype(v) == dtype else g.op("Cast", result, at=node, to=g.dtype(v))


def _scaled_by_head(g: Graph, found: Scores, node: NodeProto) -> str:
    if g.dtype(found.head_scale) != g.dtype(found.query):
        raise Miss("the scale of the heads is of another type")
    shape, query = g.shape(found.head_scale) or (), g.shape(found.query) or ()
    sizes = zip(reversed(shape), reversed(query), strict=False)
    if len(shape) > len(query) or any(size not in (1, own) for size, own in sizes):
        raise Miss("the scale of the heads makes the scores larger")
    scaled = g.op("Mul", found.query, found.head_scale, at=node)
    g.learn_type(scaled, TensorType(g.dtype(found.query), g.shape(found.query)))
    return scaled


def _before_cast(g: Graph, v: str, dtype: int) -> str:
    """The value in the type of the query: some exporters widen it for the product alone."""
    node = g.producer(v)
    widened = nd.is_op(node, "Cast") and node is not None and g.dtype(node.input[0]) == dtype
    return node.input[0] if widened and node is not None else v


def _require_last_axis(g: Graph, softmax: NodeProto) -> None:
    rank = g.rank(softmax.input[0])
    axis = nd.attr(softmax, "axis", -1)
    if axis != -1 and (rank is None or axis != rank - 1):
        raise Miss(f"{nd.label(softmax)} runs along axis {axis}, not along the keys")


@dataclass(frozen=True, slots=True)
class Operands:
    """Query, key and value, each with the form in which the operator is to read it."""

    g: Graph
    query: tuple[Operand, Form]
    key: tuple[Operand, Form]
    value: tuple[Operand, Form]

    @classmethod
    def of(cls, g: Graph, scores: Scores, value: str) -> Operands:
        """The cheapest forms that fit together; raises Miss when there are none."""
        q, v = Operand(g, scores.query), Operand(g, value)
        k = Operand(g, scores.key, sequence=-1, size=-2)
        for one, what in ((q, "query"), (k, "key"), (v, "value")):
            if one.rank not in (3, 4):
                raise Miss(f"the {what} has {one.rank or 'an unknown number of'} axes, not 3 or 4")
        if not q.rank == k.rank == v.rank:
            raise Miss("query, key and value have not as many axes")
        second = Operand.apart if q.rank == 4 else Operand.merged
        why = "query, key and value have no known number of heads"
        for form in (Operand.tokens, second):
            query, key, val = form(q), form(k), form(v)
            if query is None or key is None or val is None:
                continue
            why = mismatch(query, key, val, q)
            if not why:
                return cls(g, (q, query), (k, key), (v, val))
        raise Miss(why)

    @property
    def on_tokens(self) -> bool:
        return self.query[1].on_tokens

    def write(self, scores: Scores, guarded: bool, node: NodeProto) -> str:
        """Write the operator, and bring what it gives into the shape that the MatMul had."""
        g = self.g
        (_, query), (_, key), (_, _) = self.query, self.key, self.value
        names = [operand.write(form, node) for operand, form in (self.query, self.key, self.value)]
        if query.batch != key.batch:
            names[0] = self._for_all(names[0], names[1], node)
        own = dtype = g.dtype(names[0])
        if own == TensorProto.FLOAT16 and need_full_precision(g, scores.biases):
            dtype = TensorProto.FLOAT
            names = [self._cast(name, dtype, node) for name in names]
        if scores.biases:
            layout = Layout(key.batch, query.heads, query.sequence, key.sequence, dtype, guarded)
            writer = BiasWriter(g, layout, names[0], node)
            bias, shape = writer.total(scores.biases, scores.least)
            if bias:
                names.append(writer.full(bias, shape, names[1], 1 if self.on_tokens else 2))
        scale = scores.scale * query.source.scale * key.source.scale
        if not _LEAST_SCALE < scale < 1 / _LEAST_SCALE:
            raise Miss(f"the operator takes no scale of {scale:g}")
        attributes: dict[str, Any] = {"scale": scale}
        if scores.cap:
            # Inside of the cap the scores are divided by it.
            attributes = {"scale": scale * scores.cap, "softcap": scores.cap}
        if self.on_tokens:
            attributes.update(q_num_heads=query.heads, kv_num_heads=key.heads)
        result = g.op("Attention", *names, at=node, **attributes)
        if dtype != own:
            result = g.op("Cast", result, at=node, to=own)
        return self._as_before(self._rescaled(result, node), node)

    def _cast(self, name: str, dtype: int, node: NodeProto) -> str:
        wide = self.g.op("Cast", name, at=node, to=dtype)
        self.g.learn_type(wide, TensorType(dtype, self.g.shape(name)))
        return wide

    def _for_all(self, query: str, key: str, node: NodeProto) -> str:
        """One query for the whole batch, as learned ones are, with a copy for each."""
        g = self.g
        batch, shape = g.op("Shape", key, at=node, start=0, end=1), g.shape(query) or ()
        ones = int_vector(g, [1] * (len(shape) - 1))
        expanded = g.op("Expand", query, g.op("Concat", batch, ones, at=node, axis=0), at=node)
        g.learn_type(expanded, TensorType(g.dtype(query), (self.key[1].batch, *shape[1:])))
        return expanded

    def _rescaled(self, result: str, node: NodeProto) -> str:
        """What was multiplied into the values on their way here is made up for behind."""
        scale = self.value[1].source.scale
        if scale == 1.0:
            return result
        kind = helper.tensor_dtype_to_np_dtype(self.g.dtype(self.query[1].source.value))
        return self.g.op("Mul", result, self.g.constant(np.array(scale, kind)), at=node)

    def _as_before(self, result: str, node: NodeProto) -> str:
        """[batch, heads, sequence, size], or with batch and heads merged as the MatMul had it."""
        g, query, size = self.g, self.query[1], self.value[1].size
        batch, rank = self.key[1].batch, self.query[0].rank
        dtype = g.dtype(self.query[1].source.value)
        if self.on_tokens and query.heads == 1 and rank == 3:
            return result
        if self.on_tokens:
            return_type = TensorType(dtype, (batch, query.sequence, query.heads * size))
            g.learn_type(result, return_type)
            result = heads_apart(g, result, query.heads, size, node)
        else:
            shape = (batch, query.heads, query.sequence, size)
            g.learn_type(result, TensorType(dtype, shape))
        if rank == 3 and batch == 1:
            return squeeze(g, result, [0], at=node)
        return heads_merged(g, result, node) if rank == 3 else result


RULES = (
    packed_heads,
    split_before_view,
    norm_before_move,
    bias_in_another_shape,
    attention,
    attention_turned,
    cached_attention,
)


@dataclass(frozen=True, slots=True)
class FuseAttention:
    """Find scaled dot product attention, and write it as one operator."""

    name: ClassVar[str] = "fuse-attention"
    tolerance: ClassVar[Tolerance] = FLOAT
    cores: ClassVar[Cores] = {"attention": ("Softmax > MatMul",)}

    def run(self, model: Model, ctx: Context) -> None:
        apply_rules(model, RULES, ctx)
