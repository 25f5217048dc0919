"""Casts that a pattern allows among its operators."""

from __future__ import annotations

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.rewriting.rule import Match, Miss


def require_type_kept(g: Graph, x: str, match: Match) -> None:
    """Where Casts are part of the match, the same type must come out that went in."""
    if any(nd.is_op(node, "Cast") for node in match.nodes):
        dtype = g.dtype(x)
        if not dtype or dtype != g.dtype(match.root.output[0]):
            raise Miss(f"the type of '{x}' is not that of the result")
