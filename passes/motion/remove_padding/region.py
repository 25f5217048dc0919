"""Operators to compute on packed rows.

A node is a member if the padding of all its outputs does not matter, and if it computes each row
independently, whichever text it belongs to. Members that use values of one another, or the same
value from outside, form a group, which pays if its products save more than the copies around it
cost: the saving is proportional to the padding, while batches without padding pay for the copies as
well.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from onnx import NodeProto

from passes.motion.remove_padding.dont_care import DontCareRows
from passes.motion.remove_padding.masked_values import MaskedValues, ancestors
from passes.motion.remove_padding.packing import Packing, RealRows
from passes.motion.sink_slices.operators import RowMember, is_product, row_plan
from toolkit.ir import TensorType, node as nd

WORK_OF_A_COPY = 600
"""Fewest multiplications per copied number for which packing pays.

onnxruntime copies a number of a row in the time of 20 multiplications in int8, or of 6 in floats,
so the copies take at most 3 % of the time of the products, and a third of that in floats. Layers of
256 features or more pay; keys and values alone, where all rows are an output, hardly ever.
"""


class PackedRegion:
    """The members by one mask, in topological order."""

    def __init__(self, values: MaskedValues) -> None:
        self._g, self._mask = values.g, values.mask
        self._batch = values.sizes[0]
        self._dont_care = DontCareRows(values)
        self._mask_ancestors = set(ancestors(values.g, values.mask))
        self._rows = RealRows()
        found = (self._joined(node) for node in self._g.nodes)
        self._members = self._worthwhile([member for member in found if member is not None])

    def __bool__(self) -> bool:
        return bool(self._members)

    @property
    def first(self) -> NodeProto:
        return self._members[0].node

    # -- finding

    def _joined(self, node: NodeProto) -> RowMember | None:
        if self._dont_care.axis(node) != 1 or not self._mask_ancestors.isdisjoint(node.output):
            return None
        member = self._along(node, 1)
        if member is None or not all(self._dont_care.has_rows(x, 1) for x in _operands(member)):
            return None
        if self._batch != 1:
            by_text = self._along(node, 0)
            if by_text is None or _slots(by_text) != _slots(member):
                return None  # an operand is shared by all texts, or by all rows of one
        return member

    def _along(self, node: NodeProto, axis: int) -> RowMember | None:
        """Return the node as a member if it computes entries of `axis` without moving the axis."""
        plan = row_plan(self._g, node, axis, self._rows)
        if plan is None or any((one.axis, one.result_axis) != (axis, axis) for one in plan.sliced):
            return None
        return RowMember(node, axis, plan)

    def _worthwhile(self, members: Sequence[RowMember]) -> list[RowMember]:
        """Return the members of groups whose products pay for the copies around them."""
        own = {id(member.node): member for member in members}
        left, found = dict(own), set[int]()
        while left:
            group = self._group_of(next(iter(left.values())), own)
            for key in group:
                del left[key]
            if self._work(group) >= WORK_OF_A_COPY * self._copies(group):
                found.update(group)
        return [member for member in members if id(member.node) in found]

    def _group_of(self, start: RowMember, own: dict[int, RowMember]) -> dict[int, RowMember]:
        """Return the members connected to `start` by values that they use or define."""
        found: dict[int, RowMember] = {}
        seen: set[str] = set()
        pending = [start.node]
        while pending:
            member = own.get(id(pending.pop()))
            if member is None or id(member.node) in found:
                continue
            found[id(member.node)] = member
            for name in {*_operands(member), *nd.outputs_of(member.node)} - seen:
                seen.add(name)
                producer = self._g.producer(name)
                pending.extend([*([] if producer is None else [producer]), *self._g.users(name)])
        return found

    def _work(self, members: dict[int, RowMember]) -> int:
        """Return the multiplications per row."""
        products = (one.node for one in members.values() if is_product(one.node))
        return sum(self._size(node.input[1]) for node in products)

    def _copies(self, members: dict[int, RowMember]) -> int:
        """Return the numbers per row that are copied into the group and out of it."""
        used = {name for one in members.values() for name in _operands(one)}
        made = {name for one in members.values() for name in nd.outputs_of(one.node)}
        leaving = {name for name in made if self._is_used_outside(name, members)}
        return sum(self._size(name, 2) for name in (used - made) | leaving)

    def _is_used_outside(self, value: str, members: Container[int]) -> bool:
        return any(id(user) not in members for user in self._g.users(value))

    def _size(self, value: str, first: int = 0) -> int:
        """Return the product of the known sizes from axis `first` on."""
        sizes = (self._g.shape(value) or ())[first:]
        return math.prod(size for size in sizes if isinstance(size, int))

    # -- writing

    def write(self) -> None:
        """Compute the members on packed rows."""
        g = self._g
        packing = Packing(g, self._mask, self._rows, self.first)
        twins: dict[str, str] = {}
        for member in self._members:
            for name in _operands(member):
                if name not in twins:
                    twins[name] = packing.pack(name, member.node)
            rows = {slot: twins[member.node.input[slot]] for slot in _slots(member)}
            for name, twin in member.write(g, rows):
                shape = self._rows.shape(g.shape(name) or (), 1, 1)
                g.learn_type(twin, TensorType(g.dtype(name), shape))
                twins[name] = twin
        own = {id(member.node) for member in self._members}
        for member in self._members:
            for name in nd.outputs_of(member.node):
                if self._is_used_outside(name, own):
                    g.replace(name, packing.unpack(twins[name], member.node))
        for member in reversed(self._members):
            g.prune(member.node)


def _slots(member: RowMember) -> list[int]:
    return [one.slot for one in member.plan.sliced]


def _operands(member: RowMember) -> list[str]:
    """Return the operands with rows."""
    return [member.node.input[slot] for slot in _slots(member)]
