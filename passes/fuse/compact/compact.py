"""Fewest operators: what `--target onnx` asks for in place of the fastest kernels.

    merged maps     query, key and value are one MatMul, one Add and a Split
    sum             a + b + c = Sum(a, b, c)
    split axes      heads are split in one Reshape and a Transpose (`regrouping`)
    tables          buckets of distances are looked up (`tables`)
    axes apart      batch and heads are not merged for a while (`unmerged`)
    gates           x sigmoid(a x) is z sigmoid(z), a in the weights (`quick_gelu`)
    added tokens    Concat(tokens for each image, x) + c = Pad(x) + (c + tokens)
    rows moved      windows are cut and merged by one Gather of rows (`moves`)
    boolean mask    Attention takes the condition itself where the mask adds 0 or minus infinity

None of it is faster on the runtime's CPU kernels, so no other target does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from onnx import NodeProto, TensorProto

from passes.fuse.activation.quick_gelu import factor_into_weights
from passes.fuse.compact import lookup_tables as tables
from passes.fuse.compact import merge_linear as merged
from passes.fuse.compact import row_gathers as moves
from passes.fuse.compact import unmerge_axes as unmerged
from passes.fuse.compact.constant_tokens import added_tokens
from passes.fuse.compact.split_before_transpose import factor_before_moves, split_behind_transpose
from passes.fuse.linear import dense
from passes.simplify.fold import Fold
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import Miss
from toolkit.rewriting.rule import apply_rules, rewrite
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_SUMMED = (TensorProto.FLOAT, TensorProto.DOUBLE)
"""Element types that runtimes have a Sum for."""

_MOST_TERMS = 8
"""A long chain would be copied again and again."""


@rewrite(op.any("Add", "Sum")(var(), ...), opset=8)
def sum_of_all(g: Graph, node: NodeProto) -> str:
    """(x + y) + z = Sum(x, y, z)"""
    if g.dtype(node.output[0]) not in _SUMMED:
        raise Miss("there is no Sum for this element type")
    inner = [(place, name) for place, name in enumerate(node.input) if _is_sum(g, name)]
    if not inner:
        raise Miss("no operand is a sum that nothing else reads")
    # The longest first, to add in the same order wherever that can be told.
    place, total = max(inner, key=lambda found: len(_terms(g, found[1])))
    terms = [*_terms(g, total), *node.input[:place], *node.input[place + 1 :]]
    if len(terms) > _MOST_TERMS:
        raise Miss("the sum is long enough")
    return g.op("Sum", *terms, at=node)


def _is_sum(g: Graph, value: str) -> bool:
    return nd.is_op(g.producer(value), "Add", "Sum") and g.use_count(value) == 1


def _terms(g: Graph, value: str) -> list[str]:
    maker = g.producer(value)
    return [] if maker is None else list(maker.input)


@rewrite(op.Attention(var("q"), var("k"), var("v"), var("mask"), ...), opset=23)
def boolean_mask(g: Graph, mask: str, node: NodeProto) -> str:
    """Attention(q, k, v, where(c, 0, -inf)) = Attention(q, k, v, c)"""
    where = g.producer(mask)
    if where is None or not nd.is_op(where, "Where"):
        raise Miss("the mask is not chosen by a condition")
    condition, kept, masked = where.input
    if g.shape(condition) is None or g.shape(condition) != g.shape(mask):
        raise Miss("the condition is not known to have the shape of the mask")
    if not _is_all(g, kept, 0.0) or not _is_all(g, masked, -np.inf):
        raise Miss("a finite number masks otherwise than a condition: see `bias`")
    g.set_input(node, 3, condition)
    g.prune(where)
    return node.output[0]


def _is_all(g: Graph, value: str, number: float) -> bool:
    stored = g.const(value)
    return stored is not None and stored.size == 1 and stored.reshape(-1)[0] == number


RULES = (
    added_tokens,
    sum_of_all,
    boolean_mask,
    split_behind_transpose,
    factor_before_moves,
    factor_into_weights,
    *dense.RULES,  # for the factors that the last one leaves beside the maps
)


_TABLES = 1 << 23
"""Bytes that tables in place of functions may add."""


@dataclass(frozen=True, slots=True)
class Compact:
    """Write the model in fewer operators; for the target onnx alone, others go by speed."""

    name: ClassVar[str] = "compact"
    tolerance: ClassVar[Tolerance] = FLOAT
    idempotent: ClassVar[bool] = True
    max_bytes: int = field(
        default=1 << 30,
        metadata={
            "help": "Leave linear maps as they are where their weights are more than this together."
        },
    )

    def run(self, model: Model, ctx: Context) -> None:
        if ctx.target != "onnx":
            return
        for graph in model.graphs():
            while self._merge(graph, ctx):  # what is merged may have readers to be merged
                pass
            unmerged.split_axes(graph)
            for chain in moves.chains(graph):
                moves.write(graph, chain)
        _look_up(model, ctx)
        apply_rules(model, RULES, ctx)

    def _merge(self, g: Graph, ctx: Context) -> bool:
        """Merge the maps that meet; whether there were any."""
        found = merged.merges(g)
        unique = {merge.weights: merge for merge in found}
        total = sum(merge.bytes(g) for merge in unique.values())
        if total > self.max_bytes:
            ctx.note(f"linear maps left apart: {total >> 20} MB of weights, see compact:max_bytes")
            return False
        stored: dict[tuple[str, ...], str] = {}
        done = 0
        for merge in found:
            if g.begin("merged-maps", merge.members[0].node):
                merged.write(g, merge, stored)
                done += 1
        return done > 0


def _look_up(model: Model, ctx: Context) -> None:
    """Functions of distances as tables, unless what they share with others stays anyway."""
    start, count = model.journal.position, _count(model)
    for graph in model.graphs():
        clipped: dict[tuple[str, int], str] = {}
        for function in tables.functions(graph):
            if graph.begin("table", function.root):
                tables.write(graph, function, clipped)
    if model.journal.position > start:
        Fold(_TABLES).run(model, ctx)
        if _count(model) >= count:
            model.journal.undo_to(start)


def _count(model: Model) -> int:
    return sum(len(graph) for graph in model.graphs())
