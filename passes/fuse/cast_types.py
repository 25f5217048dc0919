"""Check the types around a match that contains Casts."""

from __future__ import annotations

from toolkit.ir import Graph, node as nd
from toolkit.rewriting.rule import Match, MatchFailure


def require_type_kept(g: Graph, x: str, match: Match) -> None:
    """Require that a match with Casts produces the type of `x`."""
    if any(nd.is_op(node, "Cast") for node in match.nodes):
        dtype = g.dtype(x)
        if not dtype or dtype != g.dtype(match.root.output[0]):
            raise MatchFailure(f"'{x}' and the result differ in element type")
