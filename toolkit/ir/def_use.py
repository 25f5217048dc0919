"""Who defines and who reads each value: the connections of one graph, kept true under change.

Nodes are keyed by identity (NodeProto is unhashable and compares deeply). What the nodes of a
subgraph read from outside is reported to the graph around it as a capture, from there outwards to
the graph that defines the value; so every graph knows all readers of what it defines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

from onnx import NodeProto

from toolkit.errors import ModelError
from toolkit.ir import node as nd

Scope = TypeVar("Scope", bound="Links[Any]")


class CycleError(ValueError):
    """The nodes of a graph depend on each other in a circle; args[0] names one of them."""


class Links(Generic[Scope]):
    """The connections of one graph. A Graph says what it is given, and makes its children."""

    def __init__(self, parent: Scope | None, owner: NodeProto | None) -> None:
        self.parent: Scope | None = parent
        self.owner = owner
        self._nodes: dict[int, NodeProto] = {}
        self._position: dict[int, tuple[int, int]] = {}
        self._producers: dict[str, NodeProto] = {}
        self._readers: dict[str, dict[int, NodeProto]] = {}
        self._captures: dict[str, Counter[int]] = {}
        self._output_names: Counter[str] = Counter()
        self._children: dict[int, list[Scope]] = {}
        self._parked: dict[int, tuple[NodeProto, list[Scope]]] = {}
        self._sorted: list[NodeProto] | None = None
        self._inserted = 0

    def _is_given(self, value: str) -> bool:
        """Whether `value` is defined here without a node: an input or a stored tensor."""
        raise NotImplementedError

    def _make_children(self, node: NodeProto) -> list[Scope]:
        """The subgraphs of a node that comes in for the first time."""
        raise NotImplementedError

    # -- reading

    @property
    def nodes(self) -> list[NodeProto]:
        """All nodes, every producer before its readers, otherwise in the order they came."""
        if self._sorted is None:
            self._sorted = self._topological()
        return list(self._sorted)

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: NodeProto) -> bool:
        return id(node) in self._nodes

    def producer(self, value: str) -> NodeProto | None:
        return self._producers.get(value)

    def users(self, value: str) -> list[NodeProto]:
        """The nodes of this graph that read `value`, also through their subgraphs, once each."""
        found = dict(self._readers.get(value, {}))
        for owner in self._captures.get(value, ()):
            found[owner] = self._nodes[owner]
        return list(found.values())

    def reader_count(self, value: str) -> int:
        """How many nodes of this graph read `value` themselves, however many there are."""
        return len(self._readers.get(value, ()))

    def sole_user(self, value: str) -> NodeProto | None:
        """Return the node that reads `value`, once, if nothing else does: no output, no capture."""
        if self.reader_count(value) != 1 or self.use_count(value) != 1:
            return None
        return self.users(value)[0]

    def is_output(self, value: str) -> bool:
        return value in self._output_names

    def is_captured(self, value: str) -> bool:
        return bool(self._captures.get(value))

    def use_count(self, value: str) -> int:
        """Input slots that read `value`, plus captures by subgraphs, plus graph outputs."""
        slots = sum(list(n.input).count(value) for n in self._readers.get(value, {}).values())
        captures = sum(self._captures[value].values()) if value in self._captures else 0
        return slots + captures + self._output_names[value]

    def is_unused(self, value: str) -> bool:
        used = self._readers.get(value) or self._captures.get(value)
        return not used and value not in self._output_names

    def is_defined(self, value: str) -> bool:
        """Whether `value` is defined in this graph itself."""
        return value in self._producers or self._is_given(value)

    def scope_of(self, value: str) -> Scope | None:
        """The innermost graph, from here outwards, that defines `value`."""
        graph: Links[Scope] | None = self
        while graph is not None and not graph.is_defined(value):
            graph = graph.parent
        return cast("Scope | None", graph)  # every graph of the chain is one

    def subgraphs(self, node: NodeProto) -> list[Scope]:
        return self._children.get(id(node), [])

    def walk(self) -> Iterator[Scope]:
        """This graph and all graphs inside it, outer first, in the order of their nodes."""
        yield cast("Scope", self)
        for owner in sorted(self._children, key=self._position.__getitem__):
            for child in self._children.get(owner, ()):  # a pass may remove it meanwhile
                yield from child.walk()

    def captures_of(self, node: NodeProto) -> list[str]:
        """What the node's subgraphs read from this graph and those around it."""
        found: dict[str, None] = {}
        for child in self._children.get(id(node), ()):
            found.update(dict.fromkeys(child.captured()))
        return list(found)

    def captured(self) -> list[str]:
        """The names that this graph, or one inside it, reads from around it."""
        names = {**dict.fromkeys(self._readers), **dict.fromkeys(self._captures)}
        names.update(dict.fromkeys(self._output_names))
        return [name for name in names if not self.is_defined(name)]

    def require_sound(self) -> None:
        """Raise ModelError when something is read that nothing defines, or nodes go in a circle."""
        for name, readers in self._readers.items():
            if self.scope_of(name) is None:
                reader = next(iter(readers.values()))
                raise ModelError(f"{nd.label(reader)} reads '{name}', which is defined nowhere")
        try:
            self._sorted = self._sorted or self._topological()
        except CycleError as error:
            raise ModelError(f"the graph has a cycle through {error.args[0]}") from error

    # -- changing

    def _place(self, node: NodeProto, at: NodeProto | None) -> tuple[int, int]:
        self._inserted += 1
        if at is not None and id(at) in self._position:
            return self._position[id(at)][0], self._inserted
        read = (self._producers.get(name) for name in node.input)
        places = [self._position[id(p)][0] for p in read if p is not None]
        return max(places, default=0), self._inserted

    def _attach(self, node: NodeProto, position: tuple[int, int]) -> None:
        self._define(node)
        self._connect(node, position)

    def _connect(self, node: NodeProto, position: tuple[int, int]) -> None:
        """Enter a node whose outputs are defined."""
        key = id(node)
        self._nodes[key] = node
        self._position[key] = position
        self._sorted = None
        for name in node.input:
            if name:
                self._read(node, name)
        if not node.attribute:
            return
        if key in self._parked:
            _, self._children[key] = self._parked.pop(key)
            for child in self._children[key]:
                child._announce(+1)
        else:
            children = self._make_children(node)
            if children:
                self._children[key] = children

    def _detach(self, node: NodeProto) -> None:
        key = id(node)
        if key in self._children:
            for child in self._children[key]:
                child._announce(-1)
            # Kept with the node, which an undo attaches again: its graphs hold the only content.
            self._parked[key] = node, self._children.pop(key)
        for name in dict.fromkeys(nd.inputs_of(node)):
            self._unread(node, name)
        self._undefine(node)
        del self._nodes[key]
        self._sorted = None

    def _relink(self, node: NodeProto, values: Sequence[str]) -> None:
        before = set(nd.inputs_of(node))
        node.input[:] = values
        after = dict.fromkeys(nd.inputs_of(node))
        for name in before - after.keys():
            self._unread(node, name)
        for name in after:
            if name not in before:
                self._read(node, name)
        self._sorted = None

    def _reread(self, node: NodeProto, slots: Sequence[int], value: str) -> None:
        """Read `value` in all the slots that one and the same other value has had."""
        before = node.input[slots[0]]
        for slot in slots:
            node.input[slot] = value
        if before not in node.input:
            self._unread(node, before)
        self._read(node, value)
        self._sorted = None

    def _redefine(self, node: NodeProto, values: Sequence[str]) -> None:
        self._undefine(node)
        node.output[:] = values
        self._define(node)
        self._sorted = None

    def _define(self, node: NodeProto) -> None:
        with self._redefining(node.output):
            for name in nd.outputs_of(node):
                self._producers[name] = node

    def _undefine(self, node: NodeProto) -> None:
        with self._redefining(node.output):
            for name in nd.outputs_of(node):
                if self._producers.get(name) is node:
                    del self._producers[name]

    @contextmanager
    def _redefining(self, names: Iterable[str]) -> Generator[None]:
        """Around a change of what is defined here: reads of these names turn inner or outer."""
        if self.parent is None:
            yield
            return
        before = {name: self.is_defined(name) for name in names}
        yield
        for name, was_defined in before.items():
            if self.is_defined(name) != was_defined:
                self._report(name, self._reads(name) * (1 if was_defined else -1))

    def _reads(self, name: str) -> int:
        """How often `_forward` has been called for `name` by what is attached now."""
        captures = sum(self._captures[name].values()) if name in self._captures else 0
        return len(self._readers.get(name, ())) + captures + (name in self._output_names)

    def _read(self, node: NodeProto, name: str) -> None:
        readers = self._readers.setdefault(name, {})
        if id(node) not in readers:
            readers[id(node)] = node
            if self.parent is not None:
                self._forward(name, +1)

    def _unread(self, node: NodeProto, name: str) -> None:
        readers = self._readers[name]
        del readers[id(node)]
        if not readers:
            del self._readers[name]
        self._forward(name, -1)

    def _forward(self, name: str, change: int) -> None:
        """Something in here reads `name`, or no longer does: tell the graph that defines it."""
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

    def _announce(self, change: int) -> None:
        """(Un)report all captures of this graph: its owner enters or leaves the parent."""
        for name in {*self._readers, *self._captures, *self._output_names}:
            self._forward(name, change * self._reads(name))

    def _topological(self) -> list[NodeProto]:
        """Stable topological order: by position, a producer moved up where it has to be."""
        captured: dict[int, list[str]] = {}
        for name, owners in self._captures.items():
            for owner in owners:
                captured.setdefault(owner, []).append(name)
        place = self._position
        order: list[NodeProto] = []
        done: set[int] = set()
        for root in sorted(self._nodes.values(), key=lambda node: place[id(node)]):
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
        """The producers that `node` still waits for."""
        producers = self._producers
        found = [p for name in node.input if (p := producers.get(name)) and id(p) not in done]
        if captured:
            found += [p for name in captured if (p := producers.get(name)) and id(p) not in done]
        return found

    def _compare(self, kept: Links[Any]) -> None:
        """Assert that this freshly built index equals the one that edits maintained."""

        def outline(
            graph: Links[Any], readers: Mapping[str, dict[int, NodeProto]]
        ) -> dict[str, Any]:
            place = {id(n): i for i, n in enumerate(graph.nodes)}
            return {v: sorted(place[k] for k in found) for v, found in readers.items() if found}

        def captures(graph: Links[Any]) -> dict[str, Any]:
            place = {id(n): i for i, n in enumerate(graph.nodes)}
            counted = graph._captures.items()
            return {v: sorted((place[k], c) for k, c in found.items()) for v, found in counted}

        def producers(graph: Links[Any]) -> dict[str, int]:
            place = {id(n): i for i, n in enumerate(graph.nodes)}
            return {value: place[id(node)] for value, node in graph._producers.items()}

        assert outline(self, self._readers) == outline(kept, kept._readers), "readers are stale"
        assert producers(self) == producers(kept), "producers are stale"
        assert captures(self) == captures(kept), "captures are stale"
        assert self._output_names == kept._output_names, "outputs are stale"
        for node in kept.nodes:
            for name in nd.inputs_of(node):
                assert kept.scope_of(name) is not None, f"'{name}' is read but defined nowhere"
