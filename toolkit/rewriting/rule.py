"""Rules: a pattern, and a function that returns its replacement.

    @rewrite(product(x, 0.5, op.Erf(product(x, 1 / sqrt(2))) + 1))
    def gelu(g, x):
        \"\"\"0.5 x (1 + erf(x / sqrt 2))\"\"\"
        return g.op("Gelu", x)

The function's parameters are the graph and names that the pattern binds: value names for `var` and
`const`, floats for `number`, NodeProtos for `.named`, attribute values; None for the names of an
alternative that did not match. `node` is the root, and `match` the whole match. The function
returns the name of the value that replaces the root's result, or a tuple for several results, with
None for those to keep. To decline, it returns None or raises `MatchFailure("reason")`, which
`explain` reports; its edits are then undone. After editing nodes in place it returns the root's own
result.

A rule is a pass by itself; `Rules` combines several.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from onnx import NodeProto

from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.pattern.backtracking import Goals, Search
from toolkit.pattern.compile import Root, compile_roots, names_of
from toolkit.pattern.dsl import Pattern, name_of
from toolkit.rewriting.anchors import Anchors
from toolkit.rewriting.driver import RuleError, apply_rules, explain
from toolkit.rewriting.match_failure import MatchFailure, NearMiss, NearMisses
from toolkit.verification.tolerance import EXACT, FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

__all__ = [
    "Match",
    "MatchFailure",
    "Miss",
    "NearMiss",
    "NearMisses",
    "Rule",
    "RuleError",
    "RulePass",
    "Rules",
    "apply_rules",
    "explain",
    "rewrite",
]

Miss = MatchFailure
"""The former name of `MatchFailure`, for rules of users."""

Function = Callable[..., "str | Sequence[str | None] | None"]
Guard = Callable[..., bool]

_Names = tuple[str, ...] | None
"""The bound names that a function takes; None: all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A match of a pattern: the nodes, root first, and the bindings of its names."""

    graph: Graph
    root: NodeProto
    nodes: tuple[NodeProto, ...]
    bindings: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.bindings[name]


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """Patterns with the function that replaces their matches. Made by `rewrite`."""

    idempotent: ClassVar[bool] = True
    name: str
    doc: str
    patterns: tuple[Pattern, ...]
    apply: Function
    opset: tuple[int, int | None] = (1, None)
    tolerance: Tolerance = FLOAT
    when: Guard | None = None
    roots: tuple[Root, ...] = field(init=False, repr=False)
    _names: tuple[str, ...] = field(init=False, repr=False)
    _arguments: _Names = field(init=False, repr=False)
    _guard_arguments: _Names = field(init=False, repr=False)

    def __post_init__(self) -> None:
        bound: dict[str, str] = {}
        try:
            for pattern in self.patterns:
                bound.update(names_of(pattern))
            roots = tuple(root for pattern in self.patterns for root in compile_roots(pattern))
            arguments = _arguments_of(self.apply, bound)
            guard = _arguments_of(self.when, bound) if self.when is not None else ()
        except ValueError as error:
            raise ValueError(f"rule '{self.name}': {error}") from error
        object.__setattr__(self, "roots", roots)
        object.__setattr__(self, "_names", tuple(bound))
        object.__setattr__(self, "_arguments", arguments)
        object.__setattr__(self, "_guard_arguments", guard)

    def covers(self, opset: int) -> bool:
        """Return whether the rule applies to models of this opset."""
        least, most = self.opset
        return least <= opset and (most is None or opset <= most)

    def match(self, search: Search, root: Root, node: NodeProto) -> Match | None:
        """Match one of the rule's `roots` at `node`, unless its result is unused."""
        if root.output >= len(node.output):
            return None
        value = node.output[root.output]
        if not value or search.graph.is_unused(value):
            return None
        goals: Goals = (root.matcher.step, value, (self._finish, value, None))
        return self._found(search, node) if search.attempt(node, goals) else None

    def call(self, match: Match) -> object:
        """Call the rule's function with a match."""
        return self.apply(match.graph, **_pick(self._arguments, match))

    def run(self, model: Model, ctx: Context) -> None:
        """Apply the rule to the whole model, as a pass."""
        apply_rules(model, (self,), ctx)

    def _found(self, search: Search, root: NodeProto) -> Match:
        bindings = {name: search.bound.get(name) for name in self._names}
        return Match(search.graph, root, tuple(search.nodes()), bindings)

    def _finish(self, search: Search, value: str, rest: Goals) -> Goals:
        """Require, as the last goal, that no inner value has other users, and the condition."""
        if not search.is_closed():
            return False
        if self.when is None or search.root is None:
            return rest
        match = self._found(search, search.root)
        if self.when(search.graph, **_pick(self._guard_arguments, match)):
            return rest
        condition = f"the rule's condition {name_of(self.when)}".rstrip()
        return search.recording and search.fail(value, f"{condition} does not hold", exact=True)


@dataclass(frozen=True, slots=True)
class Rules:
    """A pass that applies rules; its default tolerance is the loosest of theirs."""

    idempotent: ClassVar[bool] = True
    name: str
    rules: tuple[Rule, ...]
    tolerance: Tolerance = None  # pyright: ignore[reportAssignmentType]  (set below)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        if self.tolerance is None:  # pyright: ignore[reportUnnecessaryComparison]
            loosest = max((rule.tolerance for rule in self.rules), default=EXACT)
            object.__setattr__(self, "tolerance", loosest)

    def run(self, model: Model, ctx: Context) -> None:
        apply_rules(model, self.rules, ctx)


@dataclass(frozen=True, slots=True)
class RulePass:
    """Base class of a pass without options that applies `rules`.

    For a target without a cost table, `onnx_rules` are applied as well.
    """

    name: ClassVar[str]
    rules: ClassVar[tuple[Rule, ...]]
    onnx_rules: ClassVar[tuple[Rule, ...]] = ()
    tolerance: ClassVar[Tolerance] = FLOAT
    idempotent: ClassVar[bool] = True
    anchors: ClassVar[Anchors] = {}

    def run(self, model: Model, ctx: Context) -> None:
        further = () if ctx.target.has_costs else self.onnx_rules
        apply_rules(model, (*self.rules, *further), ctx)


def rewrite(
    *patterns: Pattern,
    name: str | None = None,
    opset: int | tuple[int, int | None] = 1,
    tolerance: Tolerance = FLOAT,
    when: Guard | None = None,
) -> Callable[[Function], Rule]:
    """Return a decorator that makes a rule. Several patterns are alternatives, tried in order.

    The rule is named after the function: `relu_as_max` is reported as relu-as-max. `opset` is the
    first opset that the rule supports, or the first and the last. The condition `when` is called
    with the graph and any of the bound names; if it does not hold, other matches are tried.
    """
    if not patterns:
        raise ValueError("rewrite() needs a pattern")

    def make(function: Function) -> Rule:
        return Rule(
            name=name or function.__name__.replace("_", "-"),
            doc=inspect.getdoc(function) or "",
            patterns=patterns,
            apply=function,
            opset=(opset, None) if isinstance(opset, int) else opset,
            tolerance=tolerance,
            when=when,
        )

    return make


def _arguments_of(function: Callable[..., Any], bound: Mapping[str, str]) -> _Names:
    """Return the bound names among the parameters of a function."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise ValueError("its function takes no graph: write def rule(g, ...)")
    names: list[str] = []
    for parameter in parameters[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            return None
        if parameter.name in bound or parameter.name in ("node", "match"):
            names.append(parameter.name)
        elif parameter.default is parameter.empty:
            has = ", ".join(sorted(bound)) or "nothing"
            raise ValueError(
                f"its function asks for '{parameter.name}', but the pattern binds {has}"
            )
    return tuple(names)


def _pick(names: _Names, match: Match) -> dict[str, Any]:
    if names is None:
        return dict(match.bindings)
    known = {"node": match.root, "match": match, **match.bindings}
    return {name: known[name] for name in names}
