"""Attention written out as MatMul and Softmax, for opsets below 23.

    Y = softmax(cap(scale Q K^T) + bias) V        cap(s) = c tanh(s / c)

A row whose bias is -inf everywhere is 0, as the operator defines it.
"""

from __future__ import annotations

import math

import numpy as np

from passes.opset.adapter_context import AdapterContext, Array, CannotConvert
from passes.opset.decompositions import element_type

_LARGEST_MASK = 1 << 20
"""Elements of a causal mask up to which it is stored instead of computed."""


def attention(ctx: AdapterContext) -> None:
    """Attention-23, with grouped queries, caches, masks, softcap and the scores as outputs."""
    q, k, v, mask, past_k, past_v = (ctx.input(i) for i in range(6))
    packed = ctx.known_rank(q) == 3
    size, queries, keys = _heads(ctx, q, k, packed)
    floats = bool(mask) and element_type(ctx, mask) == element_type(ctx, q)
    if mask and not floats and ctx.dtype(mask) != np.bool_:
        raise CannotConvert("its mask has another type than its queries")
    dtype = ctx.dtype(q)
    count = _lengths(ctx, q, k, past_k, packed)
    if packed:
        q, k, v = (_unpacked(ctx, x, n) for x, n in ((q, queries), (k, keys), (v, keys)))
    if past_k:
        k = ctx.op("Concat", past_k, k, axis=2)
        v = ctx.op("Concat", past_v, v, axis=2)
    _output(ctx, 1, k)
    _output(ctx, 2, v)
    if queries != keys:
        k, v = (_repeated(ctx, x, queries // keys, queries) for x in (k, v))
    scale = ctx.attr("scale") or 1 / math.sqrt(size)
    scaled = ctx.op("Mul", q, ctx.constant(scale, dtype, "scale"))
    scores = ctx.op("MatMul", scaled, ctx.op("Transpose", k, perm=[0, 1, 3, 2]))
    debug: int = ctx.attr("qk_matmul_output_mode", 0)
    seen = {0: scores}
    cap = ctx.attr("softcap", 0.0)
    if cap:
        limit = ctx.constant(cap, dtype, "softcap")
        scores = ctx.op("Mul", ctx.op("Tanh", ctx.op("Div", scores, limit)), limit)
    seen[1] = scores
    bias, may_be_empty = _bias(ctx, mask, floats, dtype, scaled, k, past_k, count)
    if bias:
        scores = ctx.op("Add", scores, bias)
    seen[2] = scores
    weights = _softmax(ctx, scores, element_type(ctx, ctx.input(0)))
    if may_be_empty:
        top = ctx.op("ReduceMax", bias, ctx.constant([-1], hint="axes"))
        empty = ctx.op("Equal", top, ctx.constant(-np.inf, dtype, "lowest"))
        weights = ctx.op("Where", empty, ctx.constant(0, dtype, "zero"), weights)
    seen[3] = weights
    _output(ctx, 3, seen[debug])
    result = ctx.op("MatMul", weights, v)
    if packed:
        result = ctx.op("Transpose", result, perm=[0, 2, 1, 3])
        ctx.become("Reshape", result, ctx.constant([0, 0, -1], hint="shape"))
    else:
        ctx.become("Identity", result)


def _heads(ctx: AdapterContext, q: str, k: str, packed: bool) -> tuple[int, int, int]:
    """Return the size of a head, and the numbers of query heads and of key heads."""
    size = _size(ctx, q, -1)
    if packed:
        queries, keys = ctx.attr("q_num_heads"), ctx.attr("kv_num_heads")
    else:
        queries, keys = _size(ctx, q, 1), _size(ctx, k, 1)
    if not queries or not keys or size is None:
        raise CannotConvert("the number or the size of its heads is unknown")
    return size // queries if packed else size, queries, keys


def _lengths(
    ctx: AdapterContext, q: str, k: str, past: str, packed: bool
) -> tuple[int | None, int | None, int | None]:
    """Return the numbers of queries, new keys and cached keys; None if the run determines them."""
    queries, keys = _size(ctx, q, 1 if packed else 2), _size(ctx, k, 1 if packed else 2)
    return queries, keys, _size(ctx, past, 2) if past else 0


def _size(ctx: AdapterContext, value: str, axis: int) -> int | None:
    sizes = ctx.sizes(value)
    return sizes[axis] if sizes else None


def _unpacked(ctx: AdapterContext, x: str, heads: int) -> str:
    """Return [batch, heads, length, size] from [batch, length, heads * size]."""
    split = ctx.op("Reshape", x, ctx.constant([0, 0, heads, -1], hint="shape"))
    return ctx.op("Transpose", split, perm=[0, 2, 1, 3])


def _repeated(ctx: AdapterContext, x: str, times: int, heads: int) -> str:
    """Repeat every head for the queries of its group: 0 0 1 1 for two groups of two."""
    apart = ctx.op("Unsqueeze", x, ctx.constant([2], hint="axis"))
    wide = ctx.op("Expand", apart, ctx.constant([1, 1, times, 1, 1], hint="repeats"))
    first, last = (ctx.op("Shape", x, start=a, end=b) for a, b in ((0, 1), (2, 4)))
    shape = ctx.op("Concat", first, ctx.constant([heads], hint="heads"), last, axis=0)
    return ctx.op("Reshape", wide, shape)


def _bias(
    ctx: AdapterContext,
    mask: str,
    floats: bool,
    dtype: np.dtype[np.generic],
    q: str,
    k: str,
    past: str,
    count: tuple[int | None, int | None, int | None],
) -> tuple[str, bool]:
    """Return what is added to the scores, and whether it may be -inf in a whole row."""
    causal = ctx.attr("is_causal", 0)
    known = ctx.graph.const(mask) if mask else None
    may_be_empty = bool(mask)
    if known is not None and not causal:
        rows = known.astype(bool) if not floats else known != -np.inf
        may_be_empty = not rows.any(-1).all()
    allowed = _causal(ctx, q, k, past, count) if causal else ""
    if mask and not floats:
        allowed = ctx.op("And", mask, allowed) if allowed else mask
    bias = ""
    if allowed:
        zero, lowest = (ctx.constant(v, dtype, "bias") for v in (0, -np.inf))
        bias = ctx.op("Where", allowed, zero, lowest)
    if floats:
        bias = ctx.op("Add", bias, mask) if bias else mask
    return bias, may_be_empty


def _causal(
    ctx: AdapterContext,
    q: str,
    k: str,
    past: str,
    count: tuple[int | None, int | None, int | None],
) -> str:
    """Return [queries, keys]: whether key j <= query i + cached keys."""
    queries, new, cached = count
    if queries is not None and new is not None and cached is not None:
        keys = new + cached
        if queries * keys <= _LARGEST_MASK:
            kept: Array = np.tri(queries, keys, cached, dtype=bool)
            return ctx.constant(kept, np.bool_, "causal")
    row, column = (_indices(ctx, x) for x in (q, k))
    if past:
        row = ctx.op("Add", row, _length(ctx, past))
    row = ctx.op("Unsqueeze", row, ctx.constant([1], hint="axis"))
    return ctx.op("Not", ctx.op("Greater", column, row))


def _indices(ctx: AdapterContext, x: str) -> str:
    """Return 0, 1, ... up to the length of [batch, heads, length, size]."""
    return ctx.op("Range", ctx.constant(0), _length(ctx, x), ctx.constant(1))


def _length(ctx: AdapterContext, x: str) -> str:
    return ctx.op("Squeeze", ctx.op("Shape", x, start=2, end=3), ctx.constant([0], hint="axis"))


def _softmax(ctx: AdapterContext, scores: str, own: int) -> str:
    wanted = ctx.attr("softmax_precision", 0)
    if not wanted or wanted == own:
        return ctx.op("Softmax", scores, axis=-1)
    wide = ctx.op("Cast", scores, to=wanted)
    return ctx.op("Cast", ctx.op("Softmax", wide, axis=-1), to=own)


def _output(ctx: AdapterContext, index: int, value: str) -> None:
    """Define an optional output, if the node has it."""
    if index < len(ctx.node.output) and ctx.node.output[index]:
        _, name = ctx.hand_over(index)
        ctx.define(name, "Identity", value)
