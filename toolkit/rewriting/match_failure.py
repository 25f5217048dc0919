"""Near misses: where a rule almost applied, and the node and reason that stopped it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnx import NodeProto

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.pattern.backtracking import Stop

if TYPE_CHECKING:
    from toolkit.rewriting.rule import Rule

_MOST = 20_000
"""The largest number of sites that a recorder keeps."""


class MatchFailure(Exception):
    """Raised by a rule that does not apply to a match; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A partial match: `matched` of `total` nodes, and the `node` and `reason` that stopped it."""

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
    """A recorder of the nearest miss of every rule at every root.

    `tried` are the rules that were applied; `left_out` maps the others to the reason.
    """

    def __init__(self) -> None:
        self.tried: set[str] = set()
        self.left_out: dict[str, str] = {}
        self._kept: dict[tuple[str, int], tuple[Graph, NodeProto, NearMiss]] = {}

    def announce(self, rule: Rule, opset: int) -> None:
        """Record that a rule is tried on a model of this opset, or why it is not."""
        if rule.covers(opset):
            self.tried.add(rule.name)
            self.left_out.pop(rule.name, None)
        elif rule.name not in self.tried:
            least, most = rule.opset
            wanted = f"{least} or newer" if most is None else f"{least} to {most}"
            self.left_out[rule.name] = f"it is for opset {wanted}, and the model has {opset}"

    def put(self, rule: str, graph: Graph, root: NodeProto, total: int, stop: Stop) -> None:
        """Record what stopped `rule` at `root`, unless another of its patterns matched more.

        A rule whose root does not match is not a near miss.
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
        """Drop the near miss of a rule that applied at this root."""
        self._kept.pop((rule, id(root)), None)

    def at(self, root: NodeProto) -> list[NearMiss]:
        """Return the near misses whose root is this node."""
        kept = (self._kept.get((rule, id(root))) for rule in sorted(self.tried))
        return [entry[2] for entry in kept if entry is not None]

    def list(self) -> list[NearMiss]:
        """Return the near misses, nearest first, except at roots that have been rewritten."""
        there = (miss for graph, root, miss in self._kept.values() if root in graph)
        return sorted(there, key=lambda miss: -miss.matched / miss.total)
