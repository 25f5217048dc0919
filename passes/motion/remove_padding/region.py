"""What is computed for real rows alone, and how it is written.

A node is a member when all that it gives is free in rows of padding, and it works on each row by
itself, whichever text that belongs to. Members that read one another, or the same from outside, go
together, and are worth it when their products are worth the copies around them: what is padding is
saved, and the copies are paid by those too who pad nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onnx import NodeProto

from passes.motion.remove_padding.dont_care import Free
from passes.motion.remove_padding.masked_values import MaskedValues, ancestors
from passes.motion.remove_padding.packing import Packing, RealRows
from passes.motion.sink_slices.operators import RowPlan, is_product, row_plan, write_twin
from toolkit.ir import node as nd
from toolkit.ir.tensor_type import TensorType

WORK_OF_A_COPY = 600
"""How many multiplications there must be for each number that is copied.

onnxruntime copies a number of a row in the time of 20 multiplications in int8, or of 6 in floats:
this leaves 3 % at most of what the products take, and a third of that in floats. Layers of 256
features or more are worth it; keys and values alone, where all rows are an output, hardly ever.
"""


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    node: NodeProto
    plan: RowPlan

    @property
    def slots(self) -> set[int]:
        return {moved.slot for moved in self.plan.moved}

    @property
    def reads(self) -> list[str]:
        """What it reads row by row."""
        return [self.node.input[moved.slot] for moved in self.plan.moved]


class Region:
    """The members by one mask, each after those that it reads."""

    def __init__(self, padding: MaskedValues) -> None:
        self._g, self._mask = padding.g, padding.mask
        self._texts = padding.sizes[0]
        self._free = Free(padding)
        self._mask_is_of = set(ancestors(padding.g, padding.mask))
        self._rows = RealRows()
        found = (self._joined(node) for node in self._g.nodes)
        self._members = self._worthwhile([member for member in found if member is not None])

    def __bool__(self) -> bool:
        return bool(self._members)

    @property
    def first(self) -> NodeProto:
        return self._members[0].node

    # -- finding

    def _joined(self, node: NodeProto) -> _Member | None:
        if self._free.axis(node) != 1 or not self._mask_is_of.isdisjoint(node.output):
            return None
        found = self._along(node, 1)
        if found is None or not all(self._free.has_rows(name, 1) for name in found.reads):
            return None
        if self._texts != 1:
            by_text = self._along(node, 0)
            if by_text is None or by_text.slots != found.slots:
                return None  # something is the same for all texts, or for all rows of one
        return found

    def _along(self, node: NodeProto, axis: int) -> _Member | None:
        """The node as it works on each entry of an axis that it leaves where it is."""
        found = row_plan(self._g, node, axis, self._rows)
        if found is None or any((one.axis, one.of) != (axis, axis) for one in found.moved):
            return None
        return _Member(node, found)

    def _worthwhile(self, members: Sequence[_Member]) -> list[_Member]:
        """Those whose products are worth the copies around all that goes together with them."""
        own = {id(member.node): member for member in members}
        left, found = dict(own), set[int]()
        while left:
            together = self._together(next(iter(left.values())), own)
            for key in together:
                del left[key]
            if self._work(together) >= WORK_OF_A_COPY * self._copies(together):
                found.update(together)
        return [member for member in members if id(member.node) in found]

    def _together(self, start: _Member, own: dict[int, _Member]) -> dict[int, _Member]:
        """The members that read one another, or what others read, from this one on."""
        found: dict[int, _Member] = {}
        seen: set[str] = set()
        pending = [start.node]
        while pending:
            member = own.get(id(pending.pop()))
            if member is None or id(member.node) in found:
                continue
            found[id(member.node)] = member
            for name in {*member.reads, *nd.outputs_of(member.node)} - seen:
                seen.add(name)
                maker = self._g.producer(name)
                pending.extend(
                    self._g.users(name) if maker is None else [maker, *self._g.users(name)]
                )
        return found

    def _work(self, members: dict[int, _Member]) -> int:
        """Multiplications for each row."""
        products = (one.node for one in members.values() if is_product(one.node))
        return sum(self._size(node.input[1]) for node in products)

    def _copies(self, members: dict[int, _Member]) -> int:
        """Numbers that are copied for each row, into the members and out of them."""
        g = self._g
        read = {name for one in members.values() for name in one.reads}
        made = {name for one in members.values() for name in nd.outputs_of(one.node)}
        back = {name for name in made if any(id(user) not in members for user in g.users(name))}
        return sum(self._size(name, 2) for name in (read - made) | back)

    def _size(self, value: str, first: int = 0) -> int:
        """How many elements there are along these axes, as far as that is known."""
        sizes = (self._g.shape(value) or ())[first:]
        return math.prod(size for size in sizes if isinstance(size, int))

    # -- writing

    def write(self) -> None:
        """Compute the members for real rows alone."""
        g = self._g
        packing = Packing(g, self._mask, self._rows, self.first)
        twins: dict[str, str] = {}
        for member in self._members:
            node = member.node
            for name in member.reads:
                if name not in twins:
                    twins[name] = packing.pack(name, node)
            instead = {moved.slot: twins[node.input[moved.slot]] for moved in member.plan.moved}
            for name, twin in write_twin(g, node, member.plan, instead):
                shape = self._rows.shape(g.shape(name) or (), 1, 1)
                g.learn_type(twin, TensorType(g.dtype(name), shape))
                twins[name] = twin
        own = {id(member.node) for member in self._members}
        for member in self._members:
            for name in nd.outputs_of(member.node):
                if any(id(user) not in own for user in g.users(name)):
                    g.replace(name, packing.unpack(twins[name], member.node))
        for member in reversed(self._members):
            g.prune(member.node)
