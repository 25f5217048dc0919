"""Replace operators that the oldest runtime lacks by equivalents that it has.

Passes fuse to operators of the newest opset. In an older release (`--runtime 1.18`), contrib
operators replace the standard ones that it has no kernel for:

    Attention    com.microsoft:MultiHeadAttention
    Gelu         com.microsoft:Gelu, or FastGelu for the tanh form
    MatMulNBits  the same without a bias, and an Add

Other operators are decomposed when the model is converted to the opset of the release. Its
load-time optimizations fuse some of them again, such as RMSNormalization.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import extra_outputs_used, given
from passes.opset.conversion import lower_ir
from toolkit.ir import Graph, Model, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import Rule, apply_rules, rewrite
from toolkit.targets import CONTRIB, Target
from toolkit.targets.releases import operand_types, opset_ceiling
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_BIAS = 5
"""The position of the bias among the operands of MatMulNBits."""
_ONE_FOR_ALL_HEADS = (1, 21)
_ONE_FOR_THE_BATCH = (1, 20)
"""The first releases whose MultiHeadAttention broadcasts a bias of 1 head, or of batch 1. Older
ones accept it and compute something else."""
_UNIDIRECTIONAL = (1, 17)
"""The first release whose MultiHeadAttention has causal masks."""


@dataclass(frozen=True, slots=True)
class Legalize:
    """Replace operators that the oldest runtime lacks by equivalents that it has."""

    name: ClassVar[str] = "legalize"
    tolerance: ClassVar[Tolerance] = FLOAT
    idempotent: ClassVar[bool] = True
    opset: int | None = field(
        default=None,
        metadata={"help": "The opset to prepare for; none: the newest that the runtime supports."},
    )

    def run(self, model: Model, ctx: Context) -> None:
        if not ctx.target.standard_only:
            opset = self.opset or opset_ceiling(model, ctx.target.release)
            apply_rules(model, rules_for(ctx.target, opset), ctx)
        if model.ir_version > ctx.target.max_ir:
            lower_ir(model, 3)


def rules_for(target: Target, opset: int) -> tuple[Rule, ...]:
    """Return the rules for operators without a kernel in the target's release at an opset."""
    x = var("x")

    def require(g: Graph, node: NodeProto, form: str) -> None:
        """Raise MatchFailure unless the release lacks the operator and has the other form."""
        kinds = operand_types(g, node)
        if target.has_kernel(node.op_type, opset, inputs=kinds):
            raise MatchFailure(f"{target.release} has a kernel for it")
        if not target.has_kernel(form, 1, CONTRIB, kinds[:1]):
            raise MatchFailure(f"{target.release} has no kernel for {form}")

    @rewrite(op.Gelu(x))
    def gelu_as_contrib(g: Graph, x: str, node: NodeProto) -> str:
        """com.microsoft:Gelu(x), or FastGelu(x) for the approximation by tanh"""
        tanh = nd.attr(node, "approximate", "none") == "tanh"
        form = "FastGelu" if tanh else "Gelu"
        require(g, node, form)
        g.require_opset(CONTRIB)
        return g.op(form, x, at=node, domain=CONTRIB)

    @rewrite(op.Attention(var("q"), var("k"), var("v"), ...))
    def attention_as_contrib(g: Graph, q: str, k: str, v: str, node: NodeProto) -> str:
        """MultiHeadAttention(q, k, v, bias) for as many heads of keys as of queries"""
        require(g, node, "MultiHeadAttention")
        heads = _heads(g, node)
        mask = given(node, 3)
        causal = nd.attr(node, "is_causal", 0)
        if causal and not _equally_long(g, q, k):
            raise MatchFailure("causal masks differ if queries and keys differ in length")
        oldest = min(release.number for release in target.releases)
        if causal and oldest < _UNIDIRECTIONAL:
            raise MatchFailure(f"MultiHeadAttention of {target.release} has no causal masks")
        may_be_empty = bool(mask) and not _is_never_empty(g, mask)
        if may_be_empty and (causal or _size_of_heads(g, mask) != 1):
            raise MatchFailure("a fully masked row would be NaN")
        each = oldest < _ONE_FOR_ALL_HEADS, oldest < _ONE_FOR_THE_BATCH
        bias = _bias(g, q, mask, heads, each, node) if mask else ""
        g.require_opset(CONTRIB)
        result = g.op(
            "MultiHeadAttention",
            *nd.without_blanks([q, k, v, "", "", bias]),
            at=node,
            domain=CONTRIB,
            num_heads=heads,
            scale=nd.attr(node, "scale"),
            unidirectional=1 if causal else None,
        )
        return _zero_for_empty_rows(g, mask, result, node) if may_be_empty else result

    @rewrite(op(CONTRIB).MatMulNBits(x, ...))
    def bias_apart(g: Graph, node: NodeProto) -> str:
        """MatMulNBits(x, codes, scales) + bias"""
        bias = given(node, _BIAS)
        kinds = operand_types(g, node)
        if not bias or target.has_kernel(node.op_type, 1, CONTRIB, kinds):
            raise MatchFailure(f"it has no bias, or {target.release} supports it")
        inputs = nd.without_blanks(node.input[:_BIAS])
        product = g.op(node.op_type, *inputs, at=node, domain=CONTRIB, **nd.attrs(node))
        return g.op("Add", product, bias, at=node)

    return gelu_as_contrib, attention_as_contrib, bias_apart


def _heads(g: Graph, node: NodeProto) -> int:
    """Return the number of heads of an attention that MultiHeadAttention can compute."""
    heads = nd.attr(node, "q_num_heads", 0)
    if not heads or heads != nd.attr(node, "kv_num_heads", 0):
        raise MatchFailure("queries and keys differ in heads, or have an axis of heads")
    if any(given(node, i) for i in (4, 5, 6)) or extra_outputs_used(g, node):
        raise MatchFailure("it has a cache, or its scores are an output")
    if nd.attr(node, "softcap", 0.0) or nd.attr(node, "softmax_precision", 0):
        raise MatchFailure("it has a softcap or its own precision")
    if any(g.dtype(value) != TensorProto.FLOAT for value in node.input[:3]):
        raise MatchFailure("MultiHeadAttention has a kernel for float32 only")
    return heads


def _bias(g: Graph, q: str, mask: str, heads: int, each: tuple[bool, bool], node: NodeProto) -> str:
    """Return [batch, heads, queries, keys] from a mask of floats that is broadcast to it.

    `each` tells whether the release needs every head and the whole batch, or takes a 1 for them.
    """
    rank = g.rank(mask)
    if g.dtype(mask) != TensorProto.FLOAT or rank is None:
        raise MatchFailure("its mask is not floats, or has an unknown rank")
    if rank < 4:
        mask = g.op("Unsqueeze", mask, _ints(g, "axes", *range(4 - rank)), at=node)
    elif _fits(g, q, mask, heads, each):
        return mask
    shape = g.op("Shape", q, at=node)
    sizes = [g.op("Gather", shape, _ints(g, "axis", axis), at=node) for axis in (0, 1)]
    first = sizes[0] if each[1] else _ints(g, "batch", 1)
    second = _ints(g, "heads", heads if each[0] else 1)
    parts = first, second, sizes[1], _ints(g, "keys", 1)
    return g.op("Expand", mask, g.op("Concat", *parts, at=node, axis=0), at=node)


def _is_never_empty(g: Graph, mask: str) -> bool:
    """Return whether no row of a float mask can be -inf throughout."""
    known = g.const(mask)
    if known is not None:
        return bool((known != -np.inf).any(-1).all())
    producer = g.producer(mask)
    if producer is None:
        return False
    if nd.is_op(producer, "Unsqueeze", "Expand", "Identity"):
        return _is_never_empty(g, producer.input[0])
    constants = [g.const(name) for name in producer.input]
    if nd.is_op(producer, "Max"):  # with a finite lower bound
        return any(c is not None and np.isfinite(c).all() for c in constants)
    if nd.is_op(producer, "Where"):
        return all(c is not None and np.isfinite(c).all() for c in constants[1:])
    return False


def _size_of_heads(g: Graph, mask: str) -> object:
    """Return the size of a mask's axis of heads; None when it is unknown."""
    shape = g.shape(mask)
    if shape is None:
        return None
    return shape[-3] if len(shape) > 2 else 1


def _zero_for_empty_rows(g: Graph, mask: str, result: str, node: NodeProto) -> str:
    """Return the result with 0 in fully masked rows, as Attention defines it.

    The mask has one head: [queries, keys], [1, queries, keys] or [batch, 1, queries, keys].
    """
    top = g.op("ReduceMax", mask, _ints(g, "axes", -1), at=node)
    empty = g.op("Equal", top, g.constant(np.array(-np.inf, np.float32), "lowest"), at=node)
    if g.rank(mask) == 4:
        empty = g.op("Squeeze", empty, _ints(g, "axes", 1), at=node)
    return g.op("Where", empty, g.constant(np.array(0, np.float32), "zero"), result, at=node)


def _fits(g: Graph, q: str, mask: str, heads: int, each: tuple[bool, bool]) -> bool:
    """Return whether a mask of rank 4 has the sizes that the release needs."""
    wide, shape = g.shape(q), g.shape(mask)
    if wide is None or shape is None or shape[2] != wide[1]:
        return False
    all_heads = shape[1] == heads or (shape[1] == 1 and not each[0])
    return all_heads and (shape[0] == wide[0] or (shape[0] == 1 and not each[1]))


def _equally_long(g: Graph, q: str, k: str) -> bool:
    one, other = g.shape(q), g.shape(k)
    return one is not None and other is not None and one[1] == other[1]


def _ints(g: Graph, hint: str, *values: int) -> str:
    return g.constant(np.array(values, dtype=np.int64), hint)
