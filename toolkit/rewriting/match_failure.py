"""Near misses: where a rule almost applied, and the node and reason that stopped it."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import NodeProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.pattern.backtracking import Stop

_MOST = 20_000
"""Sites kept by a recorder; a model with more near misses than this tells nothing new by them."""


class MatchFailure(Exception):
    """Raised by a rule that finds that it does not apply here; the message says why."""


@dataclass(frozen=True, slots=True)
class NearMiss:
    """How far a rule got at a root: `matched` of `total` nodes, then `node` was in the way."""

    rule: str
    root: str
    matched: int
    total: int
    node: str
    reason: str

    def __str__(self) -> str:
        far = f"{self.matched} of {self.total} nodes matched"
        return f"{self.rule} at {self.root}: {far}, stopped at {self.node}: {self.reason}"


class NearMisses:
    """A recorder: the nearest miss of every rule at every root that is still there.

    `tried` are the rules that were looked for, `left_out` those that are not for such a model,
    with the reason.
    """

    def __init__(self) -> None:
        self.tried: set[str] = set()
        self.left_out: dict[str, str] = {}
        self._kept: dict[tuple[str, int], tuple[Graph, NodeProto, NearMiss]] = {}

    def put(self, rule: str, graph: Graph, root: NodeProto, total: int, stop: Stop) -> None:
        """Keep what stopped `rule` at `root`, unless another of its patterns came further.

        A rule whose root did not match at all is not near.
        """
        key = rule, id(root)
        kept = self._kept.get(key)
        matched = min(stop.matched, total)
        if not matched or (kept is None and len(self._kept) >= _MOST):
            return
        if kept is not None and kept[2].matched / kept[2].total > matched / total:
            return
        producer = graph.producer(stop.where)
        where = nd.label(producer) if producer is not None else f"'{stop.where}'"
        miss = NearMiss(rule, nd.label(root), matched, total, where, stop.reason)
        self._kept[key] = graph, root, miss

    def forget(self, rule: str, root: NodeProto) -> None:
        """Before a rule is tried again at a root, and where it applied."""
        self._kept.pop((rule, id(root)), None)

    def at(self, root: NodeProto) -> list[NearMiss]:
        """What stopped the rules whose pattern ends in this node."""
        kept = (self._kept.get((rule, id(root))) for rule in sorted(self.tried))
        return [entry[2] for entry in kept if entry is not None]

    def list(self) -> list[NearMiss]:
        """The nearest first; roots that were rewritten since are left out."""
        there = (miss for graph, root, miss in self._kept.values() if root in graph)
        return sorted(there, key=lambda miss: -miss.matched / miss.total)
