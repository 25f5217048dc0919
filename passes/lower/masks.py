"""Attention masks with finite values, for processors that are slow with denormal numbers.

A masked score is the score plus -1e4, -3.4e38 or -inf. The runtime's exp of that is a denormal
number, and some processors take a hundred times as long to compute with those: causal attention
then costs 2.2 to 2.5 times what it must, padded batches 1.3 to 2 times. With -50 a masked score
still weighs only exp(-50) = 2e-22 of an equal one that is not masked, and stays a normal number.

It is the same attention only where no masked score is larger than the largest one that is not by
25 or more (what is masked then weighs exp(-25) = 1e-11 at most), and where no row is masked as a
whole: such a row attends to everything alike with -3.4e38, and to nothing with -inf. Neither can be
shown from the graph: scores have no bound that would do. So this is only done when asked for, with
`lower:mask=fast`, and proven on the feeds like everything else.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto

from toolkit.graph import Array, Graph
from toolkit.misses import Miss
from toolkit.model import Model
from toolkit.nodes import is_op
from toolkit.pattern import op, var
from toolkit.rules import Rule, rewrite

MASKED = -50.0


def rules() -> tuple[Rule, ...]:
    @rewrite(op.Attention(var("q"), var("k"), var("v"), var("mask"), ...), opset=23)
    def finite_mask(g: Graph, mask: str, node: NodeProto) -> str:
        """Attention(q, k, v, max(mask, -50)); one mask is clipped once, for all its readers."""
        if g.dtype(mask) != TensorProto.FLOAT:
            raise Miss("a boolean mask, or one of 16 bits")
        if _is_clipped(g, mask):
            raise Miss("the mask is finite already")
        g.set_input(node, 3, _clipped(g, mask, node))
        return node.output[0]

    return (finite_mask,)


def any_in(model: Model) -> bool:
    """Whether there is a mask that the rule would clip."""
    return any(
        is_op(node, "Attention")
        and len(node.input) > 3
        and g.dtype(node.input[3]) == TensorProto.FLOAT
        and not _is_clipped(g, node.input[3])
        for g in model.graphs()
        for node in g.nodes
    )


def _is_clipped(g: Graph, mask: str) -> bool:
    maker, stored = g.producer(mask), g.const(mask)
    if stored is not None:
        return not stored.size or bool(stored.min() >= MASKED)
    if maker is None or not is_op(maker, "Max"):
        return False
    return any(_is_limit(g, value) for value in maker.input)


def _is_limit(g: Graph, value: str) -> bool:
    limit = g.const(value)
    return limit is not None and limit.size == 1 and bool(limit.reshape(-1)[0] >= MASKED)


def _clipped(g: Graph, mask: str, node: NodeProto) -> str:
    """What an Attention before this one reads, or the mask's values no lower than the limit."""
    for reader in g.users(mask):
        if is_op(reader, "Max") and any(_is_limit(g, value) for value in reader.input):
            return reader.output[0]
    limit: Array = np.array(MASKED, dtype=np.float32)
    stored = g.const(mask)
    if stored is not None:
        return g.constant(np.maximum(stored, limit), "mask")
    return g.op("Max", mask, g.constant(limit, "lowest"))
