"""Fold constant tokens (class tokens, registers) into the constant added after their Concat.

    Concat(Expand(t), x) + c  =  Pad(x) + (c + t)

A position embedding c has its own element for each token t, so zeros can take the place of t. A Pad
writes them without an Expand to the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import int_vector
from toolkit.ir import Array, Graph, node as nd
from toolkit.pattern import const, op, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import rewrite


@rewrite(op.Add(op.Concat(var(), ...).named("join"), const("c")), opset=13)
def added_tokens(g: Graph, join: NodeProto, c: str, node: NodeProto) -> str:
    """Concat(Expand(t), x) + c = Pad(x) + (c + t)"""
    whole, added = g.shape(join.output[0]), g.const(c)
    rank = len(whole or ())
    axes = positive_axes([nd.attr(join, "axis", 0)], rank)
    if whole is None or axes is None or axes[0] == 0 or added is None:
        raise MatchFailure("the shape of the Concat is not known")
    axis = axes[0]
    if added.ndim != rank or added.shape[0] != 1 or added.shape[1:] != tuple(whole[1:]):
        raise MatchFailure("the constant does not have one element per position, for all images")
    tokens = [_token(g, name, rank) for name in join.input]
    rest = [index for index, token in enumerate(tokens) if token is None]
    if len(rest) != 1 or len(tokens) < 2:
        raise MatchFailure("it does not join constants to one variable")
    before, after = (_joined(part, axis) for part in (tokens[: rest[0]], tokens[rest[0] + 1 :]))
    sums = np.array(added)
    pads = [0] * (2 * rank)
    every = (slice(None),) * axis
    if before is not None:
        pads[axis] = before.shape[axis]
        sums[(*every, slice(None, pads[axis]))] += before
    if after is not None:
        pads[rank + axis] = after.shape[axis]
        sums[(*every, slice(-after.shape[axis], None))] += after
    padded = g.op("Pad", join.input[rest[0]], int_vector(g, pads, "pads"), at=node)
    return g.op("Add", padded, g.constant(sums, c), at=node)


def _token(g: Graph, value: str, rank: int) -> Array | None:
    """Return a constant repeated for every image, as [1, tokens, ...], or None."""
    node, shape = g.producer(value), g.shape(value)
    stored = g.const(node.input[0]) if node is not None and nd.is_op(node, "Expand") else None
    if stored is None or shape is None or stored.ndim > rank:
        return None
    full: Array = stored.reshape((1,) * (rank - stored.ndim) + stored.shape)
    return full if full.shape[0] == 1 and full.shape[1:] == tuple(shape[1:]) else None


def _joined(tokens: Sequence[Array | None], axis: int) -> Array | None:
    known = [token for token in tokens if token is not None]
    return np.concatenate(known, axis) if known else None
