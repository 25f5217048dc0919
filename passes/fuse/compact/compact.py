"""Minimize the number of operators, for `--target onnx`.

    merge_linear            query, key and value become one MatMul, one Add and a Split
    unmerge_axes            batch and heads stay separate axes
    row_gathers             windows are cut and merged by one Gather of rows
    lookup_tables           buckets of distances become a table
    constant_tokens         Concat(Expand(tokens), x) + c = Pad(x) + (c + tokens)
    split_before_transpose  heads are split by one Reshape and a Transpose
    quick_gelu              x sigmoid(a x) = z sigmoid(z) / a, with a in the weights
    sum_of_all              a + b + c = Sum(a, b, c)
    boolean_mask            Attention takes a condition instead of adding 0 or -inf

Nothing here is faster with onnxruntime's CPU kernels, so other targets skip it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import scalar_value
from passes.fuse.activation.quick_gelu import factor_into_weights
from passes.fuse.compact import lookup_tables, merge_linear, row_gathers, unmerge_axes
from passes.fuse.compact.constant_tokens import added_tokens
from passes.fuse.compact.split_before_transpose import factor_before_moves, split_after_transpose
from passes.fuse.linear import dense
from passes.simplify.fold import Fold
from toolkit.ir import Graph, Model, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import apply_rules, rewrite
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_SUMMED = (TensorProto.FLOAT, TensorProto.DOUBLE)
"""Element types for which onnxruntime has a Sum kernel."""

_MAX_TERMS = 8
"""Largest number of terms of a Sum: longer ones would be rewritten once per term."""


@rewrite(op.any("Add", "Sum")(var(), ...), opset=8)
def sum_of_all(g: Graph, node: NodeProto) -> str:
    """(x + y) + z = Sum(x, y, z)"""
    if g.dtype(node.output[0]) not in _SUMMED:
        raise MatchFailure("Sum has no kernel for this element type")
    inner = [(index, _terms(g, name)) for index, name in enumerate(node.input)]
    # The longest sum comes first, to keep the order of additions where possible.
    index, first = max(inner, key=lambda found: len(found[1]))
    if not first:
        raise MatchFailure("no operand is a sum without other users")
    terms = [*first, *node.input[:index], *node.input[index + 1 :]]
    if len(terms) > _MAX_TERMS:
        raise MatchFailure(f"the sum has more than {_MAX_TERMS} terms")
    return g.op("Sum", *terms, at=node)


def _terms(g: Graph, value: str) -> list[str]:
    """Return the terms of a sum that has no other user."""
    node = g.producer(value)
    is_sum = node is not None and nd.is_op(node, "Add", "Sum") and g.use_count(value) == 1
    return list(node.input) if node is not None and is_sum else []


@rewrite(op.Attention(var("q"), var("k"), var("v"), var("mask"), ...), opset=23)
def boolean_mask(g: Graph, mask: str, node: NodeProto) -> str:
    """Attention(q, k, v, where(c, 0, -inf)) = Attention(q, k, v, c)"""
    where = g.producer(mask)
    if where is None or not nd.is_op(where, "Where"):
        raise MatchFailure("the mask is not a Where")
    condition, kept, masked = where.input
    if g.shape(condition) is None or g.shape(condition) != g.shape(mask):
        raise MatchFailure("the condition may be smaller than the mask")
    if scalar_value(g, kept) != 0 or scalar_value(g, masked) != -np.inf:
        raise MatchFailure("it masks with a finite number, but a boolean mask masks with -inf")
    g.set_input(node, 3, condition)
    g.prune(where)
    return node.output[0]


RULES = (
    added_tokens,
    sum_of_all,
    boolean_mask,
    split_after_transpose,
    factor_before_moves,
    factor_into_weights,
    *dense.RULES,  # for the factors that `factor_into_weights` leaves beside linear layers
)


_MAX_TABLE_BYTES = 1 << 23
"""Bytes that lookup tables may add to the model."""


@dataclass(frozen=True, slots=True)
class Compact:
    """Rewrite the model in fewer operators, for the target onnx only."""

    name: ClassVar[str] = "compact"
    tolerance: ClassVar[Tolerance] = FLOAT
    idempotent: ClassVar[bool] = True
    max_bytes: int = field(
        default=1 << 30,
        metadata={"help": "Do not merge linear layers if their weights have more bytes in total."},
    )

    def run(self, model: Model, ctx: Context) -> None:
        if ctx.target.has_costs:
            return
        for graph in model.graphs():
            while self._merge(graph, ctx):  # users of merged layers may be merged in turn
                pass
            unmerge_axes.split_axes(graph)
            for chain in row_gathers.chains(graph):
                row_gathers.write(graph, chain)
        _tabulate(model, ctx)
        apply_rules(model, RULES, ctx)

    def _merge(self, g: Graph, ctx: Context) -> bool:
        """Merge linear layers; return whether any were found."""
        found = merge_linear.merges(g)
        unique = {merge.weights: merge for merge in found}
        total = sum(merge.bytes(g) for merge in unique.values())
        if total > self.max_bytes:
            ctx.note(f"linear layers not merged: {total >> 20} MB of weights, compact:max_bytes")
            return False
        stored: dict[tuple[str, ...], str] = {}
        done = 0
        for merge in found:
            if g.begin("merge-linear", merge.layers[0].node):
                merge_linear.write(g, merge, stored)
                done += 1
        return done > 0


def _tabulate(model: Model, ctx: Context) -> None:
    """Replace functions of distances with tables, if that saves nodes."""
    start, count = model.journal.position, _count(model)
    for graph in model.graphs():
        clipped: dict[tuple[str, int], str] = {}
        for function in lookup_tables.functions(graph):
            if graph.begin("table", function.root):
                lookup_tables.write(graph, function, clipped)
    if model.journal.position > start:
        Fold(_MAX_TABLE_BYTES).run(model, ctx)
        if _count(model) >= count:
            model.journal.undo_to(start)


def _count(model: Model) -> int:
    return sum(len(graph) for graph in model.graphs())
