"""Applying rules until nothing changes.

Every node is looked at once in topological order. After a rewrite, the nodes that it made and those
beside it (readers of the new values, producers that lost a reader) are looked at again at once; the
sweep is repeated until one of them changes nothing. Rules are found by the operator of their root.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from onnx import NodeProto

from toolkit.errors import ToolkitError, summarize
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.pattern.backtracking import Search, Stop
from toolkit.pattern.compile import Root
from toolkit.pattern.op_matchers import head, heads_above
from toolkit.rewriting.match_failure import MatchFailure, NearMiss, NearMisses

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context
    from toolkit.rewriting.rule import Match, Rule


class RuleError(ToolkitError):
    """A rule that is wrong in itself: it raises, returns nonsense, or never comes to an end."""


def apply_rules(model: Model, rules: Sequence[Rule], ctx: Context | None = None) -> int:
    """Apply `rules` to all graphs of the model to a fixpoint; the number of rewrites made.

    Near misses go to the context's recorder where it has one.
    """
    return _Worklist(model, rules, None if ctx is None else ctx.misses).run()


def explain(model: Model, rules: Sequence[Rule]) -> list[NearMiss]:
    """Why `rules` do not apply where they nearly would, nearest first. The model stays as it is."""
    misses = NearMisses()
    worklist = _Worklist(model, rules, misses)
    for graph in model.graphs():
        for node in graph.nodes:
            worklist.try_all(graph, node)
    return misses.list()


class _Worklist:
    def __init__(self, model: Model, rules: Sequence[Rule], misses: NearMisses | None) -> None:
        self._model = model
        self._misses = misses
        self._index: dict[str, list[tuple[Rule, Root]]] = {}
        for rule in rules:
            opset = model.opsets.get("", 0)
            if misses is not None:
                _announce(rule, opset, misses)
            if rule.covers(opset):
                for root in rule.roots:
                    for key in root.heads:
                        self._index.setdefault(key, []).append((rule, root))
        self._searches: dict[int, Search] = {}
        self._made: Counter[str] = Counter()
        self._limit = 50 + 10 * model.node_count()
        self._known: set[int] = set()

    def run(self) -> int:
        while self._index and self._sweep():
            pass
        return self._made.total()

    def try_all(self, graph: Graph, node: NodeProto) -> None:
        """Try every rule at a node, record the misses, and leave the graph as it was."""
        for rule, root in self._index.get(head(node), ()):
            match = self._match(rule, root, graph, node)
            if match is not None:
                start = self._model.journal.position
                self._attempt(rule, root, match)
                self._model.journal.undo_to(start)

    # -- one sweep

    def _sweep(self) -> int:
        """Look at every node once, and again at what rewrites touched; the rewrites made."""
        before = self._made.total()
        for graph in self._model.graphs():
            nodes = graph.nodes
            waiting = {id(node) for node in nodes}
            self._known |= waiting
            for node in nodes:
                waiting.discard(id(node))
                if head(node) in self._index and node in graph:
                    self._settle(graph, node, waiting)
        return self._made.total() - before

    def _settle(self, graph: Graph, node: NodeProto, waiting: set[int]) -> None:
        """Apply rules at `node` and then around it. Nodes in `waiting` have their turn to come."""
        pending, queued = deque([node]), {id(node)}
        while pending:
            node = pending.popleft()
            queued.discard(id(node))
            for touched in self._visit(graph, node):
                if id(touched) not in waiting and id(touched) not in queued:
                    queued.add(id(touched))
                    pending.append(touched)

    def _visit(self, graph: Graph, node: NodeProto) -> list[NodeProto]:
        """Apply the first rule that fits at `node`; the nodes to look at because of it."""
        if node not in graph:
            return []
        above: dict[frozenset[str], set[str] | None] = {}
        for rule, root in self._index.get(head(node), ()):
            if root.below and self._misses is None:
                if root.through not in above:
                    above[root.through] = heads_above(graph, node, root.through)
                heads = above[root.through]
                if heads is not None and any(map(heads.isdisjoint, root.below)):
                    continue
            match = self._match(rule, root, graph, node)
            if match is not None:
                beside = _beside(graph, match.nodes)
                made = self._attempt(rule, root, match)
                if made is not None:
                    self._count(rule, node)
                    return self._touched(graph, [*made, node, *beside])
        return []

    def _match(self, rule: Rule, root: Root, graph: Graph, node: NodeProto) -> Match | None:
        search = self._searches.get(id(graph))
        if search is None or search.graph is not graph:
            search = self._searches[id(graph)] = Search(graph, self._misses is not None)
        try:
            match = rule.match(search, root, node)
        except Exception as error:
            raise _failed(rule, node, error) from error
        if self._misses is not None and match is None and search.deepest is not None:
            self._misses.put(rule.name, graph, node, root.size, search.deepest)
        return match

    def _attempt(self, rule: Rule, root: Root, match: Match) -> list[NodeProto] | None:
        """Run the rule's function and put its result in place; None when it did not apply."""
        graph, node, journal = match.graph, match.root, self._model.journal
        if not graph.begin(rule.name, node):
            return None
        start = journal.position
        outputs = list(node.output)
        try:
            result = rule.call(match)
            pairs = _pairs(result, outputs, root.output)
            makers = [graph.producer(new) for _, new in pairs]
            _replace(graph, node, pairs)
        except MatchFailure as failure:
            journal.undo_to(start)
            if self._misses is not None:
                stop = Stop(root.size, 2, outputs[root.output], str(failure) or "not here")
                self._misses.put(rule.name, graph, node, root.size, stop)
            return None
        except Exception as error:
            journal.undo_to(start)
            raise _failed(rule, node, error) from error
        if journal.position == start:
            return None
        for one in match.nodes:
            if one in graph:
                graph.prune(one)
        if self._misses is not None:
            self._misses.forget(rule.name, node)
        return [maker for maker in makers if maker is not None]

    def _count(self, rule: Rule, node: NodeProto) -> None:
        self._made[rule.name] += 1
        if self._made[rule.name] > self._limit:
            raise RuleError(
                f"rule '{rule.name}' does not come to an end: {self._limit} rewrites, the last at "
                f"{nd.label(node)}; what it writes must not match its own pattern for ever"
            )

    def _touched(self, graph: Graph, start: Iterable[NodeProto]) -> list[NodeProto]:
        """New nodes behind `start`, what reads from them, and `start` itself, if still there."""
        touched: dict[int, NodeProto] = {}
        pending = [node for node in start if node in graph]
        while pending:
            node = pending.pop()
            touched[id(node)] = node
            if id(node) not in self._known:
                self._known.add(id(node))
                pending.extend(_beside(graph, (node,)))
                for name in nd.outputs_of(node):
                    touched.update((id(user), user) for user in graph.users(name))
        return list(touched.values())


def _announce(rule: Rule, opset: int, misses: NearMisses) -> None:
    """Tell the recorder that a rule is looked for, or why it is not."""
    if rule.covers(opset):
        misses.tried.add(rule.name)
        misses.left_out.pop(rule.name, None)
    elif rule.name not in misses.tried:
        least, most = rule.opset
        wanted = f"{least} or newer" if most is None else f"{least} to {most}"
        misses.left_out[rule.name] = f"it is for opset {wanted}, and the model has {opset}"


def _beside(graph: Graph, nodes: Iterable[NodeProto]) -> list[NodeProto]:
    """The producers of what `nodes` read."""
    found = (graph.producer(name) for node in nodes for name in node.input)
    return [node for node in found if node is not None]


def _pairs(result: object, outputs: list[str], index: int) -> list[tuple[str, str]]:
    """What is to be replaced by what, from the value that a rule's function returned."""
    if result is None:
        raise MatchFailure
    if isinstance(result, str):
        new: tuple[str | None, ...] = (result,)
        old = outputs[index : index + 1]
    elif isinstance(result, (tuple, list)):
        new, old = tuple(result), outputs  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    else:
        raise TypeError(f"returned {result!r}, not the name of a value")
    if len(new) != len(old):
        raise TypeError(f"returned {len(new)} values for {len(old)} outputs")
    pairs = zip(old, new, strict=True)
    return [(was, now) for was, now in pairs if now is not None and was and was != now]


def _replace(graph: Graph, root: NodeProto, pairs: list[tuple[str, str]]) -> None:
    for old, new in pairs:
        if graph.scope_of(new) is None:
            raise ValueError(f"returned '{new}', which nothing in the graph defines")
        if graph.is_output(old) and nd.is_op(root, "Identity"):
            maker = graph.producer(new)
            if maker is None or graph.is_output(new):
                raise MatchFailure(f"'{old}' needs an Identity to be an output under its own name")
        graph.replace(old, new)


def _failed(rule: Rule, node: NodeProto, error: Exception) -> RuleError:
    return RuleError(f"rule '{rule.name}' failed at {nd.label(node)}: {summarize(error)}")
