"""The float or int8 assignment with the least total time, exact, by a minimum cut.

Each item (a layer with the operators fused into it) has a time in float and in int8. A value whose
producer and users differ in kind costs one conversion, shared by all users of the other kind:

    E(x) = sum_i cost_i(x_i) + sum_v enter_v [producer float, a user int8]
                             + sum_v leave_v [producer int8, a user float]

Every term is submodular, so the minimum is a cut of a network whose source side computes in int8. A
conversion is an auxiliary node between the producer and its users, which is cut at most once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

FLOAT_END = -1
"""The producer of graph inputs and the user of graph outputs, which are always float."""

_SCALE = 1000
"""Network capacity per microsecond: capacities are whole nanoseconds."""

_NEVER = 1 << 50
"""The capacity of an arc that no minimum cut contains."""


@dataclass(frozen=True, slots=True)
class Item:
    """The times of a layer in microseconds; None if it cannot or must not compute in int8."""

    in_float: float
    in_int8: float | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A value between items, given by number, and the microseconds of converting it each way."""

    producer: int
    users: tuple[int, ...]
    enter: float
    leave: float


def best_regions(items: Sequence[Item], values: Iterable[Value]) -> frozenset[int]:
    """Return the items to compute in int8; the fewest among equally fast assignments."""
    network = _Network(len(items) + 2)
    source, sink = len(items), len(items) + 1
    for number, item in enumerate(items):
        network.connect(source, number, _whole(item.in_float))
        network.connect(number, sink, _NEVER if item.in_int8 is None else _whole(item.in_int8))
    for value in values:
        producer = sink if value.producer == FLOAT_END else value.producer
        users = [sink if user == FLOAT_END else user for user in set(value.users)]
        inside = [user for user in users if user != sink]
        if producer != sink:
            leaving = network.node()
            network.connect(producer, leaving, _whole(value.leave))
            for user in users:
                network.connect(leaving, user, _NEVER)
        if inside:
            entering = network.node()
            network.connect(entering, producer, _whole(value.enter))
            for user in inside:
                network.connect(user, entering, _NEVER)
    reached = network.cut(source, sink)
    return frozenset(number for number in range(len(items)) if reached[number])


def total(items: Sequence[Item], values: Iterable[Value], chosen: Iterable[int]) -> float:
    """Return E(x) of an assignment, in microseconds."""
    inside = frozenset(chosen)
    time = 0.0
    for number, item in enumerate(items):
        if number not in inside:
            time += item.in_float
        else:
            time += float("inf") if item.in_int8 is None else item.in_int8
    for value in values:
        kinds = {user in inside for user in value.users}
        if value.producer in inside:
            time += value.leave if False in kinds else 0.0
        else:
            time += value.enter if True in kinds else 0.0
    return time


def _whole(microseconds: float) -> int:
    return max(0, round(microseconds * _SCALE))


@dataclass(slots=True)
class _Network:
    """A flow network, with Dinic's algorithm for the maximum flow."""

    size: int
    heads: list[int] = field(default_factory=list[int])
    room: list[int] = field(default_factory=list[int])
    arcs: list[list[int]] = field(default_factory=list[list[int]])

    def __post_init__(self) -> None:
        self.arcs = [[] for _ in range(self.size)]

    def node(self) -> int:
        self.arcs.append([])
        return len(self.arcs) - 1

    def connect(self, tail: int, head: int, capacity: int) -> None:
        """Add an arc and, at the next index, its reverse."""
        for start, end, room in ((tail, head, capacity), (head, tail, 0)):
            self.arcs[start].append(len(self.heads))
            self.heads.append(end)
            self.room.append(room)

    def cut(self, source: int, sink: int) -> list[bool]:
        """Saturate the network; return for each node whether the source still reaches it."""
        while True:
            level = self._levels(source)
            if level[sink] < 0:
                return [depth >= 0 for depth in level]
            at = [0] * len(self.arcs)
            while self._push(source, sink, level, at):
                pass

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self.arcs)
        level[source] = 0
        waiting = deque([source])
        while waiting:
            tail = waiting.popleft()
            for arc in self.arcs[tail]:
                head = self.heads[arc]
                if self.room[arc] and level[head] < 0:
                    level[head] = level[tail] + 1
                    waiting.append(head)
        return level

    def _push(self, source: int, sink: int, level: list[int], at: list[int]) -> bool:
        """Augment the flow along one shortest path; return whether there was one."""
        path: list[int] = []
        node = source
        while node != sink:
            arcs = self.arcs[node]
            while at[node] < len(arcs):
                arc = arcs[at[node]]
                if self.room[arc] and level[self.heads[arc]] == level[node] + 1:
                    break
                at[node] += 1
            if at[node] < len(arcs):
                path.append(arcs[at[node]])
                node = self.heads[path[-1]]
            elif node == source:
                return False
            else:  # a dead end: step back to the next arc
                node = self.heads[path.pop() ^ 1]
                at[node] += 1
        flow = min(self.room[arc] for arc in path)
        for arc in path:
            self.room[arc] -= flow
            self.room[arc ^ 1] += flow
        return True
