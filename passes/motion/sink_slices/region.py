"""How far up a selection can be moved: the operators of which only selected rows are read.

A node is a member when everything that reads it is a member or the selection itself, and it can
compute the selected rows alone. So members are found from the selection upwards, each after all
that read it, and what they read from outside is selected once for all of them. Nothing is computed
twice, and nothing that a member makes is read by what computes the index.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import squeeze
from passes.motion.sink_slices.find_slices import MOST_USERS, read_behind
from passes.motion.sink_slices.operators import Moved, RowPlan, is_product, row_plan, write_twin
from passes.motion.sink_slices.row_selection import Entries, OneEach, Selected, Writer
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import TensorType

_Rows = tuple[str, int, int]
"""Rows of a value, along one of its axes, which is another one of what they are needed for where
that has more axes (see `OneEach`)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    node: NodeProto
    axis: int
    plan: RowPlan


class Region:
    """What is computed for all rows in front of a selection, and need not be."""

    def __init__(self, g: Graph, selected: Selected) -> None:
        self.g = g
        self.selection = selected.selection
        self.ends: list[Selected] = []
        self.stops: list[str] = []
        """Where it went no further, and why."""
        self._members: dict[int, _Member] = {}
        self._reads: Counter[_Rows] = Counter()
        self._made: dict[object, str] = {}
        self._grow((selected.value, selected.axis, selected.axis))

    @property
    def pays(self) -> bool:
        """Whether there is anything in it that is worth a copy of its operands' rows."""
        return any(is_product(member.node) for member in self._members.values())

    # -- finding

    def _grow(self, start: _Rows) -> None:
        pending = [start]
        while pending:
            member = self._joined(*pending.pop())
            if member is None:
                continue
            self._members[id(member.node)] = member
            for moved in member.plan.moved:
                rows = self._rows(member.node, moved)
                self._reads[rows] += 1
                pending.append(rows)

    def _rows(self, node: NodeProto, moved: Moved) -> _Rows:
        of = moved.of if isinstance(self.selection, OneEach) else moved.axis
        return node.input[moved.slot], moved.axis, of

    def _joined(self, value: str, axis: int, of: int) -> _Member | None:
        """The node that makes `value`, if all that is read of it are these rows."""
        g, node = self.g, self.g.producer(value)
        if node is None or id(node) in self._members:
            return None
        if not self.selection.goes_on(g, value, axis, of):
            self.stops.append(f"what {nd.label(node)} gives is the same for all of the batch")
            return None
        made = [name for name in nd.outputs_of(node) if not g.is_unused(name)]
        if not all(self._is_read_by_rows(name, axis) for name in made):
            self.stops.append(f"all of {nd.label(node)} is read")
            return None
        found = row_plan(g, node, axis, self.selection)
        if found is None or not self._fits(node, found):
            self.stops.append(f"{nd.label(node)} is not known to work on each row by itself")
            return None
        for name in made:
            self.ends.extend(self._ends_of(name, axis))
        return _Member(node, axis, found)

    def _is_read_by_rows(self, value: str, axis: int) -> bool:
        g = self.g
        if g.is_output(value) or g.is_captured(value) or g.reader_count(value) > MOST_USERS:
            return False
        reads = self._reads[value, axis, axis] + len(self._ends_of(value, axis))
        return reads == g.use_count(value)

    def _ends_of(self, value: str, axis: int) -> list[Selected]:
        """Where the same rows are selected of `value` itself, or some of them."""
        found = (read_behind(self.g, user) for user in self.g.users(value))
        return [
            end
            for end in found
            if end is not None and (end.value, end.axis) == (value, axis) and self._has(end)
        ]

    def _has(self, end: Selected) -> bool:
        one, all_ = end.selection, self.selection
        if isinstance(one, Entries) and isinstance(all_, Entries) and one.numbers:
            return set(one.numbers) <= set(all_.numbers)
        return one == all_

    def _fits(self, node: NodeProto, found: RowPlan) -> bool:
        if isinstance(self.selection, OneEach) and not found.keeps_first:
            return False
        return all(
            self.selection.applies(self.g, node.input[moved.slot], moved.axis, moved.of)
            for moved in found.moved
        )

    # -- moving

    def move(self, root: NodeProto) -> str:
        """Compute the selected rows alone, for all that read the selection; what is now `root`."""
        result = ""
        twins: dict[_Rows, str] = {}
        for member in reversed(self._members.values()):
            self._write(member, twins)
        # The root last: rows that become an output of the graph change their name.
        for end in sorted(self.ends, key=lambda end: end.result is root):
            place = end.value, end.axis, end.axis
            result = self._given(end, twins[place])
            if end.result is not root:
                name = self.g.replace(end.result.output[0], result)
                self.g.prune(end.result)
                twins[place] = name if result == twins[place] else twins[place]
        return result

    def _given(self, end: Selected, rows: str) -> str:
        """What is left to do at an end: to take some of the rows, to drop their axis."""
        g, one, all_ = self.g, end.selection, self.selection
        if isinstance(one, Entries) and isinstance(all_, Entries) and one != all_:
            places = np.array([all_.numbers.index(number) for number in one.numbers], np.int64)
            index = g.constant(places.reshape(()) if end.drops_axis else places, "index")
            return g.op("Gather", rows, index, at=end.result, axis=end.axis)
        return squeeze(g, rows, [end.axis], at=end.result) if end.drops_axis else rows

    def _write(self, member: _Member, twins: dict[_Rows, str]) -> None:
        g, node = self.g, member.node
        instead = dict[int, str]()
        for moved in member.plan.moved:
            rows = self._rows(node, moved)
            if rows not in twins:
                twins[rows] = self.selection.take(Writer(g, node, self._made), *rows)
                self._learn(twins[rows], *rows)
            instead[moved.slot] = twins[rows]
        for name, twin in write_twin(g, node, member.plan, instead):
            rows = name, member.axis, member.axis
            twins[rows] = twin
            self._learn(twin, *rows)

    def _learn(self, twin: str, value: str, axis: int, of: int) -> None:
        known = self.g.type(value)
        if known is not None and known.shape is not None:
            shape = self.selection.shape(known.shape, axis, of)
            self.g.learn_type(twin, TensorType(known.dtype, shape))
