"""Where to compute in int8: the assignment with the least total time, exactly, by a minimum cut.

Each item (a layer with what is fused into it) takes so long in floats and so long in int8. A value
that goes from one kind to the other costs a conversion, once for all of its readers of that kind:

    E(x) = sum_i cost_i(x_i) + sum_v enter_v [maker float, a reader int8]
                             + sum_v leave_v [maker int8, a reader float]

Every term is submodular, so the minimum is a cut of a network: the side of the source computes in
int8. A conversion is a node of its own between the maker and its readers, such that it is cut once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

FLOAT_END = -1
"""The maker of what the caller feeds, and the reader of what it gets: always floats."""

_SCALE = 1000
"""Costs are microseconds; the network counts whole nanoseconds."""

_NEVER = 1 << 50


@dataclass(frozen=True, slots=True)
class Item:
    """What one layer takes, in microseconds; None where it cannot compute in int8, or must not."""

    in_float: float
    in_int8: float | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A value between items, by their numbers, and what converting it takes each way."""

    maker: int
    readers: tuple[int, ...]
    enter: float
    leave: float


def best_regions(items: Sequence[Item], values: Iterable[Value]) -> frozenset[int]:
    """The items to compute in int8. Of equally fast assignments, that with the fewest."""
    network = _Network(len(items) + 2)
    source, sink = len(items), len(items) + 1
    for number, item in enumerate(items):
        network.connect(source, number, _whole(item.in_float))
        network.connect(number, sink, _NEVER if item.in_int8 is None else _whole(item.in_int8))
    for value in values:
        maker = sink if value.maker == FLOAT_END else value.maker
        readers = [sink if reader == FLOAT_END else reader for reader in set(value.readers)]
        inside = [reader for reader in readers if reader != sink]
        if maker != sink:
            leaving = network.node()
            network.connect(maker, leaving, _whole(value.leave))
            for reader in readers:
                network.connect(leaving, reader, _NEVER)
        if inside:
            entering = network.node()
            network.connect(entering, maker, _whole(value.enter))
            for reader in inside:
                network.connect(reader, entering, _NEVER)
    reached = network.cut(source, sink)
    return frozenset(number for number in range(len(items)) if reached[number])


def total(items: Sequence[Item], values: Iterable[Value], chosen: Iterable[int]) -> float:
    """What an assignment takes, in microseconds: E(x)."""
    inside = frozenset(chosen)
    time = 0.0
    for number, item in enumerate(items):
        if number not in inside:
            time += item.in_float
        else:
            time += float("inf") if item.in_int8 is None else item.in_int8
    for value in values:
        kinds = {reader in inside for reader in value.readers}
        if value.maker in inside:
            time += value.leave if False in kinds else 0.0
        else:
            time += value.enter if True in kinds else 0.0
    return time


def _whole(microseconds: float) -> int:
    return max(0, round(microseconds * _SCALE))


@dataclass(slots=True)
class _Network:
    """Arcs with capacities; Dinic's algorithm for the largest flow through them."""

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
        """An arc and, next to it, the one that flow goes back on."""
        for start, end, room in ((tail, head, capacity), (head, tail, 0)):
            self.arcs[start].append(len(self.heads))
            self.heads.append(end)
            self.room.append(room)

    def cut(self, source: int, sink: int) -> list[bool]:
        """Which nodes are still reached from the source when no more flow fits."""
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
        """Send what fits along one shortest path; False when there is none left."""
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
            else:  # a dead end: back, and on with the next arc
                node = self.heads[path.pop() ^ 1]
                at[node] += 1
        flow = min(self.room[arc] for arc in path)
        for arc in path:
            self.room[arc] -= flow
            self.room[arc ^ 1] += flow
        return True
