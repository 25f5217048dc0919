"""Decompose Attention with capped scores.

    softmax(cap * tanh(scale / cap * Q K^T) + mask) V

The kernel of Attention caps one score at a time; that of Tanh is vectorized. The grouped queries of
one key get their own axis, along which keys and values are broadcast:

    tokens [batch, length, groups * queries * size]  =  [batch, groups, queries, length, size]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import reshape, scalar, transpose, unsqueeze
from passes.lower.cost_query import CostQuery
from toolkit.ir import Graph, node as nd
from toolkit.ir.op_traits import MOVEMENT
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import Rule, rewrite

_KNOWN = {"q_num_heads", "kv_num_heads", "scale", "softcap"}
"""Attributes that the decomposition supports."""

_DEPTH = 8
"""The analysis of a mask stops this many nodes above it."""


def rules(costs: CostQuery) -> tuple[Rule, ...]:
    tokens = (var(name, rank=3, dtype=TensorProto.FLOAT) for name in "qkv")

    @rewrite(op.Attention(*tokens, ...), opset=23)
    def capped_attention(g: Graph, q: str, k: str, v: str, node: NodeProto) -> str:
        """Attention(q, k, v) of [batch, length, heads x size] with a softcap"""
        attributes = nd.attrs(node)
        if attributes.get("softcap", 0.0) <= 0:
            raise MatchFailure("it has no softcap")
        if not set(attributes) <= _KNOWN or "scale" not in attributes:
            raise MatchFailure("it is causal, or has an attribute without a decomposition")
        if any(node.input[4:]) or len(nd.outputs_of(node)) != 1:
            raise MatchFailure("it has a cache or several outputs")
        heads = GroupedHeads.of(g, (q, k, v), attributes)
        mask = _mask(g, node, heads)
        costs.require("capped-attention", "decomposed", g, q)
        return heads.attend(g, (q, k, v), mask, attributes, node)

    return (capped_attention,)


def _mask(g: Graph, node: NodeProto, heads: GroupedHeads) -> str:
    """Return the mask with the additional axis of grouped queries, or blank."""
    mask = node.input[3] if len(node.input) > 3 else ""
    if not mask:
        return mask
    if g.dtype(mask) != TensorProto.FLOAT:
        raise MatchFailure("the mask is not float32")
    if not _has_floor(g, mask):
        raise MatchFailure("only Attention itself returns 0 for a fully masked row")
    shape = g.shape(mask)
    if shape is None:
        raise MatchFailure("the shape of the mask is unknown")
    if heads.queries == 1 or len(shape) == 2:
        return mask
    if len(shape) != 4 or shape[1] != 1:
        raise MatchFailure("the mask differs between heads")
    return unsqueeze(g, mask, [1], at=node)


def _has_floor(g: Graph, mask: str, depth: int = 0) -> bool:
    """Whether all elements of a mask are provably above the lowest float32."""
    stored, node = g.const(mask), g.producer(mask)
    if stored is not None:
        return bool(stored.min(initial=0.0) > np.finfo(np.float32).min)
    if node is None or depth > _DEPTH:
        return False
    if nd.is_op(node, "Where"):
        return all(_has_floor(g, value, depth + 1) for value in node.input[1:])
    if nd.is_op(node, "Max"):
        return any(_has_floor(g, value, depth + 1) for value in node.input)
    return nd.is_op(node, *MOVEMENT) and _has_floor(g, node.input[0], depth + 1)


@dataclass(frozen=True, slots=True)
class GroupedHeads:
    """`groups` heads of keys and values, and `queries` heads of queries for each."""

    groups: int
    queries: int
    size: int
    value_size: int

    @classmethod
    def of(
        cls, g: Graph, operands: tuple[str, str, str], attributes: dict[str, Any]
    ) -> GroupedHeads:
        widths = [shape[2] for name in operands if (shape := g.shape(name)) is not None]
        known = [width for width in widths if isinstance(width, int)]
        if len(known) != len(operands):
            raise MatchFailure("the size of the heads is unknown")
        count, groups = (attributes.get(f"{name}_num_heads", 0) for name in ("q", "kv"))
        if not groups or count % groups:
            raise MatchFailure("the number of query heads is not a multiple of that of key heads")
        return cls(groups, count // groups, known[1] // groups, known[2] // groups)

    def attend(
        self,
        g: Graph,
        operands: tuple[str, str, str],
        mask: str,
        attributes: dict[str, Any],
        node: NodeProto,
    ) -> str:
        q, k, v = operands
        cap: float = attributes["softcap"]
        query = self._split(g, q, self.queries, self.size, False, node)
        key = self._split(g, k, 1, self.size, True, node)
        value = self._split(g, v, 1, self.value_size, False, node)
        scores = g.op("MatMul", query, key, at=node)
        inside = g.op("Mul", scores, _number(g, attributes["scale"] / cap), at=node)
        scores = g.op("Mul", g.op("Tanh", inside, at=node), _number(g, cap), at=node)
        if mask:
            scores = g.op("Add", scores, mask, at=node)
        weights = g.op("Softmax", scores, at=node, axis=-1)
        return self._joined(g, g.op("MatMul", weights, value, at=node), node)

    def _split(
        self, g: Graph, x: str, queries: int, size: int, transposed: bool, node: NodeProto
    ) -> str:
        """Return tokens as [batch, groups, queries, length, size], or with the last two swapped."""
        if self.queries == 1:
            split = reshape(g, x, (0, 0, self.groups, size), at=node)
            return transpose(g, split, (0, 2, 3, 1) if transposed else (0, 2, 1, 3), at=node)
        split = reshape(g, x, (0, 0, self.groups, queries, size), at=node)
        return transpose(g, split, (0, 2, 3, 4, 1) if transposed else (0, 2, 3, 1, 4), at=node)

    def _joined(self, g: Graph, x: str, node: NodeProto) -> str:
        """Return heads as tokens again."""
        perm = (0, 2, 1, 3) if self.queries == 1 else (0, 3, 1, 2, 4)
        width = self.groups * self.queries * self.value_size
        return reshape(g, transpose(g, x, perm, at=node), (0, 0, width), at=node)


def _number(g: Graph, value: float) -> str:
    return scalar(g, value, TensorProto.FLOAT, "number")
