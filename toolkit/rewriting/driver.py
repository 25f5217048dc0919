"""The rewrite driver: apply rules to a fixpoint.

A sweep visits every node in topological order. The driver listens to the edits of each rewrite: the
new and edited nodes, their users and their producers are visited again at once. Sweeps are repeated
until one changes nothing. Rules are indexed by the operators of their roots.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnx import NodeProto

from toolkit.errors import ToolkitError, summarize
from toolkit.ir import edits as ed, node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.pattern.associative import heads_above
from toolkit.pattern.backtracking import Search, Stop
from toolkit.pattern.compile import Root
from toolkit.pattern.op_matchers import head
from toolkit.rewriting.match_failure import MatchFailure, NearMiss, NearMisses

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context
    from toolkit.rewriting.rule import Match, Rule


class RuleError(ToolkitError):
    """A defective rule: it raises, returns something other than values, or does not converge."""


def apply_rules(model: Model, rules: Sequence[Rule], ctx: Context | None = None) -> int:
    """Apply `rules` to all graphs of the model to a fixpoint; return the number of rewrites.

    Near misses go to the recorder of the context, if it has one.
    """
    return _Driver(model, rules, None if ctx is None else ctx.misses).run()


def explain(model: Model, rules: Sequence[Rule]) -> list[NearMiss]:
    """Return the near misses of `rules`, nearest first, and leave the model unchanged."""
    misses = NearMisses()
    driver = _Driver(model, rules, misses)
    for graph in model.graphs():
        for node in graph.nodes:
            driver.try_all(graph, node)
    return misses.list()


class _Driver:
    def __init__(self, model: Model, rules: Sequence[Rule], misses: NearMisses | None) -> None:
        self._model = model
        self._misses = misses
        self._index: dict[str, list[tuple[Rule, Root]]] = {}
        for rule in rules:
            opset = model.opsets.get("", 0)
            if misses is not None:
                misses.announce(rule, opset)
            if rule.covers(opset):
                for root in rule.roots:
                    for key in root.heads:
                        self._index.setdefault(key, []).append((rule, root))
        self._searches: dict[int, Search] = {}
        self._made: Counter[str] = Counter()
        self._limit = 50 + 10 * model.node_count()

    def run(self) -> int:
        while self._index and self._sweep():
            pass
        return self._made.total()

    def try_all(self, graph: Graph, node: NodeProto) -> None:
        """Try every rule at a node, record near misses, and undo the rewrites."""
        for rule, root in self._index.get(head(node), ()):
            match = self._match(rule, root, graph, node)
            if match is not None:
                start = self._model.journal.position
                self._attempt(rule, root, match)
                self._model.journal.undo_to(start)

    # -- one sweep

    def _sweep(self) -> int:
        """Visit every node, and the neighbors of rewrites again; return the number of rewrites."""
        before = self._made.total()
        for graph in self._model.graphs():
            nodes = graph.nodes
            waiting = {id(node) for node in nodes}
            for node in nodes:
                waiting.discard(id(node))
                if head(node) in self._index and node in graph:
                    self._settle(graph, node, waiting)
        return self._made.total() - before

    def _settle(self, graph: Graph, node: NodeProto, waiting: set[int]) -> None:
        """Apply rules at `node` and then around it, except at the nodes `waiting` for a visit."""
        pending, queued = deque([node]), {id(node)}
        while pending:
            node = pending.popleft()
            queued.discard(id(node))
            for touched in self._visit(graph, node):
                if id(touched) not in waiting and id(touched) not in queued:
                    queued.add(id(touched))
                    pending.append(touched)

    def _visit(self, graph: Graph, node: NodeProto) -> list[NodeProto]:
        """Apply the first rule that matches at `node`; return the nodes to visit again."""
        rules = self._index.get(head(node), ())
        if not rules or node not in graph:
            return []
        heads = heads_above(graph, node) if self._misses is None else None
        for rule, root in rules:
            if heads is not None and any(map(heads.isdisjoint, root.below)):
                continue
            match = self._match(rule, root, graph, node)
            if match is not None:
                touched = _Neighborhood(graph)
                with self._model.journal.listening(touched.note):
                    applied = self._attempt(rule, root, match)
                if applied:
                    self._count(rule, node)
                    return touched.nodes()
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

    def _attempt(self, rule: Rule, root: Root, match: Match) -> bool:
        """Run the rule's function and insert its result; return whether the rule applied."""
        graph, node, journal = match.graph, match.root, self._model.journal
        if not graph.begin(rule.name, node):
            return False
        start = journal.position
        outputs = list(node.output)
        try:
            _replace(graph, node, _pairs(rule.call(match), outputs, root.output))
        except MatchFailure as failure:
            journal.undo_to(start)
            if self._misses is not None:
                stop = Stop(root.size, 2, outputs[root.output], str(failure) or "not here")
                self._misses.put(rule.name, graph, node, root.size, stop)
            return False
        except Exception as error:
            journal.undo_to(start)
            raise _failed(rule, node, error) from error
        if journal.position == start:
            return False
        for one in match.nodes:
            if one in graph:
                graph.prune(one)
        if self._misses is not None:
            self._misses.forget(rule.name, node)
        return True

    def _count(self, rule: Rule, node: NodeProto) -> None:
        self._made[rule.name] += 1
        if self._made[rule.name] > self._limit:
            raise RuleError(
                f"rule '{rule.name}' does not converge: {self._limit} rewrites, the last at "
                f"{nd.label(node)}; its replacement must not match its own pattern"
            )


class _Neighborhood:
    """The nodes of a graph that edits touched: edited nodes, and old and new neighbors of them."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._edited: dict[int, NodeProto] = {}
        self._operands: dict[str, None] = {}
        self._results: dict[str, None] = {}

    def note(self, edit: ed.Edit) -> None:
        """Record an edit; the journal calls this."""
        if isinstance(edit, ed.SetModel) or edit.graph is not self._graph:
            return
        match edit:
            case ed.InsertNode() | ed.RemoveNode():
                self._operands.update(dict.fromkeys(nd.inputs_of(edit.node)))
            case ed.SetInputs():
                self._operands.update(dict.fromkeys(edit.before))
            case ed.SetOperand():
                self._operands[edit.before] = None
            case ed.SetOutputs():
                self._results.update(dict.fromkeys(edit.after))
            case ed.SetInitializer():
                self._results[edit.value] = None
            case _:
                pass
        if isinstance(edit, ed.NodeEdit):
            self._edited[id(edit.node)] = edit.node

    def nodes(self) -> list[NodeProto]:
        """Return the touched nodes that are still in the graph."""
        found = [node for node in self._edited.values() if node in self._graph]
        found += (user for name in self._results for user in self._graph.users(name))
        producers = map(self._graph.producer, self._operands)
        found += (node for node in producers if node is not None)
        return list({id(node): node for node in found}.values())


def _pairs(result: object, outputs: list[str], index: int) -> list[tuple[str, str]]:
    """Return (old value, new value) pairs from the return value of a rule's function."""
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
            producer = graph.producer(new)
            if producer is None or graph.is_output(new):
                raise MatchFailure(f"output '{old}' keeps its name only through an Identity")
        graph.replace(old, new)


def _failed(rule: Rule, node: NodeProto, error: Exception) -> RuleError:
    return RuleError(f"rule '{rule.name}' failed at {nd.label(node)}: {summarize(error)}")
