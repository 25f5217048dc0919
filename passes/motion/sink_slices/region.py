"""Regions of operators above a selection that need not compute all rows.

A node is a member if each of its users is a member or makes the same selection, and if it can
compute the selected rows alone. So the region grows upwards from the selection, each member after
all of its users, and rows are selected once of each value that enters. Nothing is computed twice,
and the index of the selection does not depend on members.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import squeeze
from passes.motion.sink_slices.find_slices import MOST_USERS, find_slice_behind_view
from passes.motion.sink_slices.operators import RowMember, RowPlan, is_product, row_plan
from passes.motion.sink_slices.row_selection import (
    Entries,
    RowPerEntry,
    SelectedRows,
    SelectionWriter,
)
from toolkit.ir import Graph, TensorType, node as nd

_Rows = tuple[str, int, int]
"""A value, the axis of its rows, and the same axis of the selected result, which may have more axes
(see `RowPerEntry`)."""


class SlicedRegion:
    """The operators that can compute selected rows alone."""

    def __init__(self, g: Graph, start: SelectedRows) -> None:
        self.g = g
        self.selection = start.selection
        self.ends: list[SelectedRows] = []
        """The selections that the region replaces."""
        self.obstacles: list[str] = []
        """Why it did not grow further, one reason per value."""
        self._members: dict[int, RowMember] = {}
        self._uses: Counter[_Rows] = Counter()
        self._made: dict[object, str] = {}
        self._grow((start.value, start.axis, start.axis))

    @property
    def saves_products(self) -> bool:
        """Whether a member saves enough work to pay for selecting rows of its operands."""
        return any(is_product(member.node) for member in self._members.values())

    # -- finding

    def _grow(self, start: _Rows) -> None:
        pending = [start]
        while pending:
            member = self._joined(*pending.pop())
            if member is None:
                continue
            self._members[id(member.node)] = member
            for rows in self._operand_rows(member.node, member.plan).values():
                self._uses[rows] += 1
                pending.append(rows)

    def _operand_rows(self, node: NodeProto, plan: RowPlan) -> dict[int, _Rows]:
        each = isinstance(self.selection, RowPerEntry)
        return {
            one.slot: (node.input[one.slot], one.axis, one.result_axis if each else one.axis)
            for one in plan.sliced
        }

    def _joined(self, value: str, axis: int, result_axis: int) -> RowMember | None:
        """Return the producer of `value` as a member if all uses are these rows."""
        g, node = self.g, self.g.producer(value)
        if node is None or id(node) in self._members:
            return None
        if not self.selection.passes_producer(g, value, axis, result_axis):
            self.obstacles.append(f"the output of {nd.label(node)} is shared by the whole batch")
            return None
        made = [name for name in nd.outputs_of(node) if not g.is_unused(name)]
        if not all(self._uses_are_rows(name, axis) for name in made):
            self.obstacles.append(f"all rows of {nd.label(node)} are used")
            return None
        plan = row_plan(g, node, axis, self.selection)
        if plan is None or not self._applies(node, plan):
            self.obstacles.append(f"{nd.label(node)} may not compute its rows independently")
            return None
        for name in made:
            self.ends.extend(self._ends_of(name, axis))
        return RowMember(node, axis, plan)

    def _uses_are_rows(self, value: str, axis: int) -> bool:
        g = self.g
        if g.is_output(value) or g.is_captured(value) or g.user_count(value) > MOST_USERS:
            return False
        return self._uses[value, axis, axis] + len(self._ends_of(value, axis)) == g.use_count(value)

    def _ends_of(self, value: str, axis: int) -> list[SelectedRows]:
        """Return the selections of the same rows, or of some of them, of `value` itself."""
        found = (find_slice_behind_view(self.g, user) for user in self.g.users(value))
        return [
            end
            for end in found
            if end is not None and (end.value, end.axis) == (value, axis) and self._covers(end)
        ]

    def _covers(self, end: SelectedRows) -> bool:
        one, all_ = end.selection, self.selection
        if isinstance(one, Entries) and isinstance(all_, Entries) and one.numbers:
            return set(one.numbers) <= set(all_.numbers)
        return one == all_

    def _applies(self, node: NodeProto, plan: RowPlan) -> bool:
        if isinstance(self.selection, RowPerEntry) and not plan.keeps_first:
            return False
        return all(
            self.selection.applies(self.g, node.input[one.slot], one.axis, one.result_axis)
            for one in plan.sliced
        )

    # -- moving

    def move(self, root: NodeProto) -> str:
        """Compute the selected rows alone and replace all ends; return the result of `root`."""
        result = ""
        twins: dict[_Rows, str] = {}
        for member in reversed(self._members.values()):
            self._write(member, twins)
        # The root last: rows that become an output of the graph change their name.
        for end in sorted(self.ends, key=lambda end: end.node is root):
            rows = end.value, end.axis, end.axis
            result = self._replacement(end, twins[rows])
            if end.node is not root:
                name = self.g.replace(end.node.output[0], result)
                self.g.prune(end.node)
                twins[rows] = name if result == twins[rows] else twins[rows]
        return result

    def _replacement(self, end: SelectedRows, rows: str) -> str:
        """Select the entries of an end from the rows of the region, and drop their axis."""
        g, one, all_ = self.g, end.selection, self.selection
        if isinstance(one, Entries) and isinstance(all_, Entries) and one != all_:
            places = np.array([all_.numbers.index(number) for number in one.numbers], np.int64)
            index = g.constant(places.reshape(()) if end.drops_axis else places, "index")
            return g.op("Gather", rows, index, at=end.node, axis=end.axis)
        return squeeze(g, rows, [end.axis], at=end.node) if end.drops_axis else rows

    def _write(self, member: RowMember, twins: dict[_Rows, str]) -> None:
        operands = self._operand_rows(member.node, member.plan)
        for rows in operands.values():
            if rows not in twins:
                writer = SelectionWriter(self.g, member.node, self._made)
                self._add_twin(twins, self.selection.take(writer, *rows), rows)
        taken = {slot: twins[rows] for slot, rows in operands.items()}
        for name, twin in member.write(self.g, taken):
            self._add_twin(twins, twin, (name, member.axis, member.axis))

    def _add_twin(self, twins: dict[_Rows, str], twin: str, rows: _Rows) -> None:
        twins[rows] = twin
        known = self.g.type(rows[0])
        if known is not None and known.shape is not None:
            shape = self.selection.shape(known.shape, *rows[1:])
            self.g.learn_type(twin, TensorType(known.dtype, shape))
