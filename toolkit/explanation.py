"""The facts behind `toolkit explain`: what was fused where, and what stopped the rest.

The passes run on a copy of the model, with a recorder for near misses. After the last pass that
declares cores (see `cores`), those that are still there are what was left unfused. A pattern ends
in a node behind its core, so the nearest rule is looked for there.
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
from toolkit.rewriting.anchors import Core, cores_of, downstream, find_cores, is_about
from toolkit.rewriting.match_failure import Misses, NearMiss
from toolkit.rewriting.rule import Rule, Rules
from toolkit.settings import OpsetLimit

_FAR = 16
"""How many nodes behind its core a pattern may end."""


@dataclass(frozen=True, slots=True)
class Fused:
    """The rewrites of one rule: the values in whose place it wrote something."""

    pass_name: str
    rule: str
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unfused:
    """A core that is still there: the rules about it, the nearest of them, what stopped it."""

    core: str
    op: str
    rules: tuple[str, ...]
    nearest: NearMiss | None
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything that `toolkit explain` knows.

    `misses` are near misses of rules that nobody declared a core for, `besides` counts the rewrites
    of passes that do not fuse, `problems` are passes that failed.
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
    target: str = "ort-cpu",
    opset: OpsetLimit = None,
) -> Explanation:
    """Run passes without validation, and tell what their rules did and why they did no more.

    With `rule`, only what concerns that rule and its variants. The source is not modified.
    """
    started = time.perf_counter()
    model = Model.of(source)
    model = model.copy() if model is source else model
    before, misses = model.node_count(), Misses()
    last = max((n for n, item in enumerate(passes, 1) if cores_of(item)), default=0)

    def run(part: Sequence[Pass]) -> list[PassResult]:
        pipeline = Pipeline(part, validate="off", target=target, opset=opset, misses=misses)
        return pipeline.run(model).passes

    results = run(passes[:last])
    # now, because a pass behind the fusions may spell an operator out again
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


def _unfused(model: Model, passes: Sequence[Pass], misses: Misses) -> list[Unfused]:
    left = find_cores(model, map(cores_of, passes))
    cores_in: dict[int, list[Core]] = {}
    for core in left:
        cores_in.setdefault(id(core.graph), []).append(core)
    behind = [_behind(core, cores_in[id(core.graph)]) for core in left]
    # A layer leads to the next one: a node belongs to the core that is closest to it.
    closest: dict[tuple[str, int], int] = {}
    for core, nodes in zip(left, behind, strict=True):
        for name in core.rules:
            for distance, node in nodes:
                key = name, id(node)
                closest[key] = min(distance, closest.get(key, distance))
    return [
        _explained(
            core,
            [
                (distance, miss)
                for distance, node in nodes
                for miss in misses.at(node)
                if any(
                    is_about(miss.rule, name) and distance == closest[name, id(node)]
                    for name in core.rules
                )
            ],
            misses,
        )
        for core, nodes in zip(left, behind, strict=True)
    ]


def _behind(core: Core, cores: Sequence[Core]) -> list[tuple[int, NodeProto]]:
    """The core and what is behind it as far as the next of its kind, each with its distance."""
    alike = [other.node for other in cores if set(other.rules) & set(core.rules)]
    return [(0, core.node), *downstream(core.graph, core.node, _FAR, stop=alike)]


def _explained(core: Core, near: Sequence[tuple[int, NearMiss]], misses: Misses) -> Unfused:
    """The core with what came nearest to fusing it."""

    def rank(found: tuple[int, NearMiss]) -> tuple[float, int]:
        # Of two that are equally far, the one that ends later has more of the formula in it; but
        # where nothing but the last operator matched, the closer one is more likely about it.
        distance, miss = found
        return miss.matched / miss.total, distance if miss.matched > 1 else -distance

    nearest = max(near, key=rank)[1] if near else None
    return Unfused(
        core=nd.label(core.node),
        op=core.node.op_type,
        rules=core.rules,
        nearest=nearest,
        reason=nearest.reason if nearest else _why_none(core.rules, misses),
    )


def _why_none(names: Sequence[str], misses: Misses) -> str:
    for rule, reason in misses.left_out.items():
        if any(is_about(rule, name) for name in names):
            return f"{rule} was not looked for: {reason}"
    return "no rule matched a single node around it"


def _concerns(core: Unfused, rule: str) -> bool:
    return any(is_about(name, rule) or is_about(rule, name) for name in core.rules)


def _require_known(
    rule: str, passes: Sequence[Pass], results: Sequence[PassResult], misses: Misses
) -> None:
    """Raise unless one of the passes has such a rule."""
    declared = {name for item in passes for name in cores_of(item)}
    known = {*misses.tried, *misses.left_out, *declared, *(n for r in results for n in r.rules)}
    if not any(is_about(name, rule) for name in known):
        listed = sorted(declared or known)
        hint = suggestion(rule, sorted(known)) or ":"
        raise UsageError(f"no rule '{rule}' in these passes{hint} known: {', '.join(listed)}")


@dataclass(frozen=True, slots=True)
class _View:
    """What is shown: the rule that was asked for, or else the passes that fuse."""

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
        """The other rewrites, by pass, the most frequent first."""
        counts: Counter[str] = Counter()
        for item, result in zip(self.passes, results, strict=True):
            others = (n for name, n in result.rules.items() if not self._shows(item, name))
            counts[result.name] += sum(others)
        return {name: count for name, count in counts.most_common() if count}

    def misses(self, misses: Misses, unfused: Sequence[Unfused]) -> list[NearMiss]:
        """Those at least half of the way, of the rule asked for or of rules that are passes."""
        told = {(core.nearest.rule, core.nearest.root) for core in unfused if core.nearest}
        own = {name for item in self.passes for name in _rule_names(item)}
        return [
            miss
            for miss in misses.list()
            if (miss.rule in own if self.rule is None else is_about(miss.rule, self.rule))
            and (miss.rule, miss.root) not in told
            and 2 * miss.matched >= miss.total
        ]

    def _shows(self, item: Pass, rule: str) -> bool:
        if self.rule is not None:
            return is_about(rule, self.rule)
        return bool(cores_of(item)) or rule in _rule_names(item)


def _rule_names(item: Pass) -> set[str]:
    """The names of the rules, if the pass is one or made of some by the user."""
    rules = (item,) if isinstance(item, Rule) else item.rules if isinstance(item, Rules) else ()
    return {rule.name for rule in rules}
