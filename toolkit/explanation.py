"""The data behind `toolkit explain`: the fusions that applied, and the reasons others did not.

The passes run on a copy of the model and record match failures. Anchors (see `rewriting.anchors`)
that remain after the last pass that declares any are unfused. The root of a pattern lies downstream
of its anchor, so match failures are collected from there.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import NodeProto

from toolkit.errors import UsageError
from toolkit.ir import node as nd
from toolkit.ir.model import Model, Source
from toolkit.messages import suggestion
from toolkit.pass_manager.pipeline import Pipeline
from toolkit.pass_manager.protocol import Pass
from toolkit.pass_manager.result import PassResult
from toolkit.rewriting.anchors import Anchor, anchors_of, downstream, find_anchors, is_about
from toolkit.rewriting.match_failure import NearMiss, NearMisses
from toolkit.rewriting.rule import Rule, Rules
from toolkit.settings import OpsetLimit, Settings
from toolkit.targets import DEFAULT_TARGET

_FAR = 16
"""The largest distance, in nodes, from an anchor to the root of a pattern about it."""


@dataclass(frozen=True, slots=True)
class Fused:
    """The rewrites of one rule, each named by the value that it replaced."""

    pass_name: str
    rule: str
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unfused:
    """An anchor left after fusion: its rules, the closest match failure, and the reason.

    `core` is the label of the anchor node.
    """

    core: str
    op: str
    rules: tuple[str, ...]
    nearest: NearMiss | None
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of `toolkit explain`.

    `misses` are the match failures of rules without an anchor, `besides` counts the rewrites of
    other passes, `problems` are the passes that failed.
    """

    path: Path | None
    nodes: tuple[int, int]
    fused: list[Fused]
    unfused: list[Unfused]
    misses: list[NearMiss]
    besides: dict[str, int]
    problems: list[str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "input": None if self.path is None else str(self.path),
            "nodes": {"before": self.nodes[0], "after": self.nodes[1]},
            "fused": [
                {"pass": f.pass_name, "rule": f.rule, "count": len(f.places), "places": f.places}
                for f in self.fused
            ],
            "unfused": [dataclasses.asdict(core) for core in self.unfused],
            "misses": [dataclasses.asdict(miss) for miss in self.misses],
            "besides": self.besides,
            "problems": self.problems,
            "seconds": round(self.seconds, 6),
        }


def explain_passes(
    source: Source,
    passes: Sequence[Pass],
    rule: str | None = None,
    target: str = DEFAULT_TARGET,
    opset: OpsetLimit = None,
    runtime: str | None = None,
) -> Explanation:
    """Run passes without validation; return the rewrites they made and the match failures.

    `rule` restricts the result to that rule and its variants. The source is not modified.
    """
    started = time.perf_counter()
    settings = Settings(target=target, runtime=runtime, validate="off", opset=opset)
    model = Model.of(source)
    model = model.copy() if model is source else model
    before, misses = model.node_count(), NearMisses()
    last = max((n for n, item in enumerate(passes, 1) if anchors_of(item)), default=0)

    def run(part: Sequence[Pass]) -> list[PassResult]:
        found = Pipeline(part, settings, misses=misses, finish=False).run(model).passes
        return found[len(found) - len(part) :]  # without the conversion to the opset limit

    results = run(passes[:last])
    # before the remaining passes, which may decompose an operator again
    unfused = _unfused(model, passes, misses)
    results += run(passes[last:])
    if rule is not None:
        _require_known(rule, passes, results, misses)
    view = _View(passes, rule)
    return Explanation(
        path=model.path,
        nodes=(before, model.node_count()),
        fused=view.fused(results),
        unfused=[core for core in unfused if rule is None or _concerns(core, rule)],
        misses=view.misses(misses, unfused),
        besides=view.besides(results),
        problems=[f"{r.name}: {r.reason}" for r in results if r.status == "reverted"],
        seconds=time.perf_counter() - started,
    )


def _unfused(model: Model, passes: Sequence[Pass], misses: NearMisses) -> list[Unfused]:
    left = find_anchors(model, map(anchors_of, passes))
    anchors_in: dict[int, list[Anchor]] = {}
    for anchor in left:
        anchors_in.setdefault(id(anchor.graph), []).append(anchor)
    behind = [_behind(anchor, anchors_in[id(anchor.graph)]) for anchor in left]
    # Layers follow each other: a node belongs to the closest anchor.
    closest: dict[tuple[str, int], int] = {}
    for anchor, nodes in zip(left, behind, strict=True):
        for name in anchor.rules:
            for distance, node in nodes:
                key = name, id(node)
                closest[key] = min(distance, closest.get(key, distance))
    return [
        _explained(
            anchor,
            [
                (distance, miss)
                for distance, node in nodes
                for miss in misses.at(node)
                if any(
                    is_about(miss.rule, name) and distance == closest[name, id(node)]
                    for name in anchor.rules
                )
            ],
            misses,
        )
        for anchor, nodes in zip(left, behind, strict=True)
    ]


def _behind(anchor: Anchor, anchors: Sequence[Anchor]) -> list[tuple[int, NodeProto]]:
    """Return the anchor and its downstream nodes up to the next such anchor, with distances."""
    alike = [other.node for other in anchors if set(other.rules) & set(anchor.rules)]
    return [(0, anchor.node), *downstream(anchor.graph, anchor.node, _FAR, stop=alike)]


def _explained(anchor: Anchor, near: Sequence[tuple[int, NearMiss]], misses: NearMisses) -> Unfused:
    """Return the anchor with its closest match failure."""

    def rank(found: tuple[int, NearMiss]) -> tuple[float, int]:
        # Of two equally complete matches, the root further downstream covers more of the formula;
        # when only the root matched, the closer one is more likely related to the anchor.
        distance, miss = found
        return miss.matched / miss.total, distance if miss.matched > 1 else -distance

    nearest = max(near, key=rank)[1] if near else None
    return Unfused(
        core=nd.label(anchor.node),
        op=anchor.node.op_type,
        rules=anchor.rules,
        nearest=nearest,
        reason=nearest.reason if nearest else _why_none(anchor.rules, misses),
    )


def _why_none(names: Sequence[str], misses: NearMisses) -> str:
    for rule, reason in misses.left_out.items():
        if any(is_about(rule, name) for name in names):
            return f"{rule} was not looked for: {reason}"
    return "no rule matched any node near it"


def _concerns(core: Unfused, rule: str) -> bool:
    return any(is_about(name, rule) or is_about(rule, name) for name in core.rules)


def _require_known(
    rule: str, passes: Sequence[Pass], results: Sequence[PassResult], misses: NearMisses
) -> None:
    """Raise unless one of the passes has such a rule."""
    declared = {name for item in passes for name in anchors_of(item)}
    known = {*misses.tried, *misses.left_out, *declared, *(n for r in results for n in r.rules)}
    if not any(is_about(name, rule) for name in known):
        listed = sorted(declared or known)
        hint = suggestion(rule, sorted(known)) or ":"
        raise UsageError(f"no rule '{rule}' in these passes{hint} known: {', '.join(listed)}")


@dataclass(frozen=True, slots=True)
class _View:
    """Selects the results to show: those of the requested rule, or of all fusion passes."""

    passes: Sequence[Pass]
    rule: str | None

    def fused(self, results: Sequence[PassResult]) -> list[Fused]:
        return [
            Fused(result.name, name, tuple(places))
            for item, result in zip(self.passes, results, strict=True)
            for name, places in result.places.items()
            if self._shows(item, name)
        ]

    def besides(self, results: Sequence[PassResult]) -> dict[str, int]:
        """Count the remaining rewrites by pass, most frequent first."""
        counts: Counter[str] = Counter()
        for item, result in zip(self.passes, results, strict=True):
            others = (n for name, n in result.rules.items() if not self._shows(item, name))
            counts[result.name] += sum(others)
        return {name: count for name, count in counts.most_common() if count}

    def misses(self, misses: NearMisses, unfused: Sequence[Unfused]) -> list[NearMiss]:
        """Return match failures that got at least halfway, of the requested or the user's rules."""
        shown = {(core.nearest.rule, core.nearest.root) for core in unfused if core.nearest}
        own = {name for item in self.passes for name in _rule_names(item)}
        return [
            miss
            for miss in misses.list()
            if (miss.rule in own if self.rule is None else is_about(miss.rule, self.rule))
            and (miss.rule, miss.root) not in shown
            and 2 * miss.matched >= miss.total
        ]

    def _shows(self, item: Pass, rule: str) -> bool:
        if self.rule is not None:
            return is_about(rule, self.rule)
        return bool(anchors_of(item)) or rule in _rule_names(item)


def _rule_names(item: Pass) -> set[str]:
    """Return the rule names of a pass that is a rule or a `Rules`."""
    rules = (item,) if isinstance(item, Rule) else item.rules if isinstance(item, Rules) else ()
    return {rule.name for rule in rules}
