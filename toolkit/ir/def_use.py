"""The def-use index of one graph: the producer and the users of each value, updated by edits.

Nodes are keyed by identity (NodeProto is unhashable and compares deeply). An outer value that a
subgraph uses is reported to the enclosing graphs as a capture, up to the graph that defines it, so
that every graph knows all users of its values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

from onnx import NodeProto

from toolkit.errors import ModelError
from toolkit.ir import node as nd

Scope = TypeVar("Scope", bound="DefUse[Any]")
"""The class of a graph, which extends this index."""


class CycleError(ValueError):
    """The nodes of a graph form a cycle; args[0] names one of them."""


class DefUse(Generic[Scope]):
    """The def-use index of one graph; subclasses add values without a producer, and subgraphs."""

    def __init__(self, parent: Scope | None, owner: NodeProto | None) -> None:
        self.parent: Scope | None = parent
        self.owner = owner
        self._nodes: dict[int, NodeProto] = {}
        self._position: dict[int, tuple[int, int]] = {}
        self._producers: dict[str, NodeProto] = {}
        self._users: dict[str, dict[int, NodeProto]] = {}
        self._captures: dict[str, Counter[int]] = {}
        self._output_names: Counter[str] = Counter()
        self._children: dict[int, list[Scope]] = {}
        self._parked: dict[int, tuple[NodeProto, list[Scope]]] = {}
        self._sorted: list[NodeProto] | None = None
        self._inserted = 0

    def _is_input_or_stored(self, value: str) -> bool:
        """Return whether `value` is an input or a stored tensor of this graph."""
        raise NotImplementedError

    def _make_children(self, node: NodeProto) -> list[Scope]:
        """Return the subgraphs of a node that is inserted for the first time."""
        raise NotImplementedError

    # -- queries

    @property
    def nodes(self) -> list[NodeProto]:
        """All nodes in topological order, otherwise in the order of insertion."""
        if self._sorted is None:
            self._sorted = self._topological()
        return list(self._sorted)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: NodeProto) -> bool:
        return id(node) in self._nodes

    def producer(self, value: str) -> NodeProto | None:
        """Return the node of this graph whose result is `value`, or None."""
        return self._producers.get(value)

    def users(self, value: str) -> list[NodeProto]:
        """Return the nodes of this graph that use `value`, also by their subgraphs, once each."""
        found = dict(self._users.get(value, {}))
        for owner in self._captures.get(value, ()):
            found[owner] = self._nodes[owner]
        return list(found.values())

    def user_count(self, value: str) -> int:
        """Return the number of nodes with `value` among their operands, in constant time."""
        return len(self._users.get(value, ()))

    def sole_user(self, value: str) -> NodeProto | None:
        """Return the sole user of `value`, or None if there are other uses."""
        return self.users(value)[0] if self.is_used_once(value) else None

    def is_used_once(self, value: str) -> bool:
        """Return whether the only use of `value` is one operand of one node of this graph."""
        return self.user_count(value) == 1 and self.use_count(value) == 1

    def is_output(self, value: str) -> bool:
        """Return whether `value` is an output of this graph."""
        return value in self._output_names

    def is_captured(self, value: str) -> bool:
        """Return whether a subgraph uses `value`."""
        return bool(self._captures.get(value))

    def use_count(self, value: str) -> int:
        """Return the number of operands that are `value`, plus captures, plus graph outputs."""
        slots = sum(list(n.input).count(value) for n in self._users.get(value, {}).values())
        return slots + self._capture_count(value) + self._output_names[value]

    def is_unused(self, value: str) -> bool:
        """Return whether `value` has no users and is not an output."""
        used = self._users.get(value) or self._captures.get(value)
        return not used and value not in self._output_names

    def is_defined(self, value: str) -> bool:
        """Return whether this graph itself defines `value`."""
        return value in self._producers or self._is_input_or_stored(value)

    def scope_of(self, value: str) -> Scope | None:
        """Return the innermost graph, from here outwards, that defines `value`."""
        graph: DefUse[Scope] | None = self
        while graph is not None and not graph.is_defined(value):
            graph = graph.parent
        return cast("Scope | None", graph)

    def subgraphs(self, node: NodeProto) -> list[Scope]:
        """Return the subgraphs of a node."""
        return self._children.get(id(node), [])

    def walk(self) -> Iterator[Scope]:
        """Yield this graph and all graphs inside it, outer first, in the order of their nodes."""
        yield cast("Scope", self)
        for owner in sorted(self._children, key=self._position.__getitem__):
            for child in self._children.get(owner, ()):  # a pass may have removed it
                yield from child.walk()

    def captures_of(self, node: NodeProto) -> list[str]:
        """Return the outer values that the subgraphs of a node use."""
        found: dict[str, None] = {}
        for child in self._children.get(id(node), ()):
            found.update(dict.fromkeys(child.captured()))
        return list(found)

    def captured(self) -> list[str]:
        """Return the outer values that this graph, or one inside it, uses."""
        names = {**dict.fromkeys(self._users), **dict.fromkeys(self._captures)}
        names.update(dict.fromkeys(self._output_names))
        return [name for name in names if not self.is_defined(name)]

    def require_sound(self) -> None:
        """Raise ModelError for a use of an undefined value and for a cycle."""
        for name, users in self._users.items():
            if self.scope_of(name) is None:
                user = next(iter(users.values()))
                raise ModelError(f"{nd.label(user)} uses '{name}', which is not defined")
        try:
            self._sorted = self._sorted or self._topological()
        except CycleError as error:
            raise ModelError(f"the graph has a cycle through {error.args[0]}") from error

    # -- updates, called by the edits of a graph

    def _position_near(self, node: NodeProto, at: NodeProto | None) -> tuple[int, int]:
        """Return a position in the stable order: that of `at`, or behind the node's producers."""
        self._inserted += 1
        if at is not None and id(at) in self._position:
            return self._position[id(at)][0], self._inserted
        producers = (self._producers.get(name) for name in node.input)
        positions = [self._position[id(p)][0] for p in producers if p is not None]
        return max(positions, default=0), self._inserted

    def _attach(self, node: NodeProto, position: tuple[int, int]) -> None:
        self._define(node)
        self._connect(node, position)

    def _connect(self, node: NodeProto, position: tuple[int, int]) -> None:
        """Add a node whose results are defined already."""
        key = id(node)
        self._nodes[key] = node
        self._position[key] = position
        self._sorted = None
        for name in node.input:
            if name:
                self._add_user(node, name)
        if not node.attribute:
            return
        if key in self._parked:
            _, self._children[key] = self._parked.pop(key)
            for child in self._children[key]:
                child._report_captures(+1)
        else:
            children = self._make_children(node)
            if children:
                self._children[key] = children

    def _detach(self, node: NodeProto) -> None:
        key = id(node)
        if key in self._children:
            for child in self._children[key]:
                child._report_captures(-1)
            # Kept for an undo: its Graphs hold the only copy of its subgraphs.
            self._parked[key] = node, self._children.pop(key)
        for name in dict.fromkeys(nd.inputs_of(node)):
            self._drop_user(node, name)
        self._undefine(node)
        del self._nodes[key]
        self._sorted = None

    def _set_operands(self, node: NodeProto, values: Sequence[str]) -> None:
        before = set(nd.inputs_of(node))
        node.input[:] = values
        after = dict.fromkeys(nd.inputs_of(node))
        for name in before - after.keys():
            self._drop_user(node, name)
        for name in after:
            if name not in before:
                self._add_user(node, name)
        self._sorted = None

    def _set_operand(self, node: NodeProto, slots: Sequence[int], value: str) -> None:
        """Replace the operand in these slots, which all hold the same value."""
        before = node.input[slots[0]]
        for slot in slots:
            node.input[slot] = value
        if before not in node.input:
            self._drop_user(node, before)
        self._add_user(node, value)
        self._sorted = None

    def _set_results(self, node: NodeProto, values: Sequence[str]) -> None:
        self._undefine(node)
        node.output[:] = values
        self._define(node)
        self._sorted = None

    def _define(self, node: NodeProto) -> None:
        with self._changing_scope(node.output):
            for name in nd.outputs_of(node):
                self._producers[name] = node

    def _undefine(self, node: NodeProto) -> None:
        with self._changing_scope(node.output):
            for name in nd.outputs_of(node):
                if self._producers.get(name) is node:
                    del self._producers[name]

    @contextmanager
    def _changing_scope(self, names: Iterable[str]) -> Generator[None]:
        """Report the uses of names that become, or cease to be, captures of outer values."""
        if self.parent is None:
            yield
            return
        before = {name: self.is_defined(name) for name in names}
        yield
        for name, was_defined in before.items():
            if self.is_defined(name) != was_defined:
                self._report(name, self._reported(name) * (1 if was_defined else -1))

    def _reported(self, name: str) -> int:
        """Return the number of uses of `name` here that count as captures outside."""
        is_output = name in self._output_names
        return len(self._users.get(name, ())) + self._capture_count(name) + is_output

    def _capture_count(self, name: str) -> int:
        return sum(self._captures[name].values()) if name in self._captures else 0

    def _add_user(self, node: NodeProto, name: str) -> None:
        users = self._users.setdefault(name, {})
        if id(node) not in users:
            users[id(node)] = node
            if self.parent is not None:
                self._forward(name, +1)

    def _drop_user(self, node: NodeProto, name: str) -> None:
        users = self._users[name]
        del users[id(node)]
        if not users:
            del self._users[name]
        self._forward(name, -1)

    def _forward(self, name: str, change: int) -> None:
        """Report a change in the number of uses of `name`, if it is an outer value."""
        if self.parent is not None and not self.is_defined(name):
            self._report(name, change)

    def _report(self, name: str, change: int) -> None:
        if self.parent is not None and self.owner is not None and change:
            self.parent._capture(name, self.owner, change)

    def _capture(self, name: str, owner: NodeProto, change: int) -> None:
        counts = self._captures.setdefault(name, Counter())
        counts[id(owner)] += change
        if not counts[id(owner)]:
            del counts[id(owner)]
            if not counts:
                del self._captures[name]
        self._sorted = None
        self._forward(name, change)

    def _report_captures(self, change: int) -> None:
        """Report all captures of this graph when its owner is attached (+1) or detached (-1)."""
        for name in {*self._users, *self._captures, *self._output_names}:
            self._forward(name, change * self._reported(name))

    def _topological(self) -> list[NodeProto]:
        """Sort topologically: by position, except for producers that must move up."""
        captured: dict[int, list[str]] = {}
        for name, owners in self._captures.items():
            for owner in owners:
                captured.setdefault(owner, []).append(name)
        position = self._position
        order: list[NodeProto] = []
        done: set[int] = set()
        for root in sorted(self._nodes.values(), key=lambda node: position[id(node)]):
            stack = [root]
            opened: set[int] = set()
            while stack:
                node = stack[-1]
                key = id(node)
                if key in done:
                    stack.pop()
                    continue
                missing = self._missing(node, captured.get(key, ()), done)
                if not missing:
                    stack.pop()
                    done.add(key)
                    order.append(node)
                elif key in opened:
                    raise CycleError(nd.label(node))
                else:
                    opened.add(key)
                    stack.extend(reversed(missing))
        return order

    def _missing(self, node: NodeProto, captured: Iterable[str], done: set[int]) -> list[NodeProto]:
        """Return the producers of operands and captures of `node` that are not in `done`."""
        producers = self._producers
        names = (*node.input, *captured) if captured else node.input
        return [p for name in names if (p := producers.get(name)) and id(p) not in done]

    def _compare(self, kept: DefUse[Any]) -> None:
        """Assert that this freshly built index equals `kept`, which edits have updated."""

        def contents(graph: DefUse[Any]) -> tuple[dict[str, Any], ...]:
            at = {id(n): i for i, n in enumerate(graph.nodes)}
            users = {v: sorted(at[k] for k in found) for v, found in graph._users.items() if found}
            producers = {v: at[id(node)] for v, node in graph._producers.items()}
            captures = {v: {at[k]: c for k, c in n.items()} for v, n in graph._captures.items()}
            return users, producers, captures

        for what, found, wanted in zip(
            ("users", "producers", "captures"), contents(kept), contents(self), strict=True
        ):
            assert found == wanted, f"{what} are stale"
        assert self._output_names == kept._output_names, "outputs are stale"
        for node in kept.nodes:
            for name in nd.inputs_of(node):
                assert kept.scope_of(name) is not None, f"'{name}' is used but not defined"
