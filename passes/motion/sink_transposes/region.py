"""Regions of operators that are worth moving to the other side of a Transpose.

Moving a region makes its operators compute on v' where v = Transpose(v', perm). The cost is the
number of Transpose nodes that this adds, value by value:

  v enters the region   from Transpose(x, perm): use x; -1 if the Transpose has no other users
                        from another Transpose: change it; +1 if its result is also used as it was
                        from a constant, or from a value that exists permuted: 0
                        else: +1
  v leaves the region   to Transpose(v, q): becomes Transpose(v', perm . q), -1 if that is a no-op
                        to other users or graph outputs: +1

A region grows from a Transpose over its neighbours, cheapest first, and is cut back to where the
sum was lowest. It moves if the sum is negative, so every move leaves fewer Transposes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import compress

from onnx import NodeProto

from passes.analysis.operands import permutation, transpose
from passes.motion.sink_transposes.operators import (
    Perm,
    PermutedNode,
    is_permutable_constant,
    permuted_constant,
    permuted_node,
)
from toolkit.ir import Graph, TensorType, node as nd

_LOOK_AHEAD = 24
"""Growth stops after this many operators in a row without a gain."""

_MOST_USERS = 64
"""A value with more users than this is assumed to be needed as it is."""

_MOST_WAITING = 8
"""Most rejected operators that are tried again after a gain."""


def inverse_of(perm: Perm) -> Perm:
    return tuple(sorted(range(len(perm)), key=perm.__getitem__))


def compose(first: Perm, second: Sequence[int]) -> Perm:
    """Return the permutation of `first` followed by `second`."""
    return tuple(first[axis] for axis in second)


def _layout_values(node: NodeProto, planned: PermutedNode) -> set[str]:
    """Return the operands and results of a node that are permuted."""
    values = {node.input[i] for i in planned.inputs}
    return values if planned.outputs_stay else values.union(nd.outputs_of(node))


def is_identity(perm: Sequence[int]) -> bool:
    return list(perm) == list(range(len(perm)))


class TransposeRegion:
    """Operators that would compute on their operands before `perm`."""

    def __init__(self, g: Graph, perm: Perm) -> None:
        self.g = g
        self.perm = perm
        self.inverse = inverse_of(perm)
        self.members: dict[int, tuple[NodeProto, PermutedNode]] = {}

    # -- counting

    def grow(self, seeds: Iterable[NodeProto]) -> bool:
        """Add neighbours of `seeds` while that may pay; return whether it does."""
        eager = deque(seeds)
        waiting: deque[NodeProto] = deque()
        rejected: set[int] = set()
        best, best_size, stalled, cost = 0, 0, 0, 0
        while stalled < _LOOK_AHEAD and (eager or waiting):
            reluctant = not eager
            node = waiting.popleft() if reluctant else eager.popleft()
            if id(node) in self.members or id(node) in rejected:
                continue
            planned = permuted_node(self.g, node, self.perm)
            if planned is None:
                rejected.add(id(node))
                continue
            change = self._join(node, planned)
            if change > 0 and not reluctant:
                del self.members[id(node)]
                if len(waiting) < _MOST_WAITING:
                    waiting.append(node)
                continue
            cost += change
            stalled += 1
            if cost < best:
                best, best_size, stalled = cost, len(self.members), 0
            eager.extend(self._neighbours(node, planned))
            eager.extend(waiting)  # they may pay now
            waiting.clear()
        self.members = dict(list(self.members.items())[:best_size])
        # Counted again as a whole: a Transpose between two members changes at both of its ends.
        values = set[str]().union(*(_layout_values(*member) for member in self.members.values()))
        return sum(map(self._cost, values)) < 0

    def _join(self, node: NodeProto, planned: PermutedNode) -> int:
        """Add a node; return the change of the cost."""
        values = _layout_values(node, planned)
        before = sum(map(self._cost, values))
        self.members[id(node)] = node, planned
        return sum(map(self._cost, values)) - before

    def _neighbours(self, node: NodeProto, planned: PermutedNode) -> list[NodeProto]:
        around: list[NodeProto] = []
        for index in planned.inputs:
            producer = self.g.producer(node.input[index])
            if producer is not None:
                around.append(producer)
        if not planned.outputs_stay:
            for value in nd.outputs_of(node):
                if self.g.user_count(value) <= _MOST_USERS:
                    around.extend(self.g.users(value))
        return around

    def _cost(self, value: str) -> int:
        """Return the Transposes that `value` adds (or removes, if negative)."""
        g = self.g
        if g.user_count(value) > _MOST_USERS:
            return (
                1  # one Transpose for all users; visiting each of them again and again is quadratic
            )
        users = g.users(value)
        others = [u for u in users if not self._uses_permuted(u, value)]
        needed = g.is_output(value) or g.is_captured(value)
        if self._is_moved(value):
            perms = [self._perm_of(user) for user in others]
            undone = [p is not None and is_identity(compose(self.perm, p)) for p in perms]
            outputs = sum(g.is_output(user.output[0]) for user in compress(others, undone))
            # A value has one name: a second output that equals it would need an Identity.
            return (needed or None in perms) - sum(undone) + max(outputs - 1, 0)
        if len(others) == len(users) or is_permutable_constant(g, value):
            return 0
        produced_by = self._produced_by(value)
        if produced_by is not None:
            return int(bool(others) or needed) - (produced_by == self.perm)
        return int(not any(map(self._is_ready_made, others)))

    def _is_ready_made(self, user: NodeProto) -> bool:
        """Whether `user` permutes its operand as members need it, and has users besides members.

        If all its users are members, it counts as removed where its own output enters the region.
        """
        if self._perm_of(user) != self.inverse:
            return False
        g, value = self.g, user.output[0]
        if g.is_output(value) or g.is_captured(value) or g.user_count(value) > _MOST_USERS:
            return True
        return any(not self._uses_permuted(other, value) for other in g.users(value))

    def _is_moved(self, value: str) -> bool:
        producer = self.g.producer(value)
        member = None if producer is None else self.members.get(id(producer))
        return member is not None and not member[1].outputs_stay

    def _uses_permuted(self, node: NodeProto, value: str) -> bool:
        """Whether `node` is a member all of whose uses of `value` are permuted operands."""
        member = self.members.get(id(node))
        if member is None:
            return False
        slots = {i for i, name in enumerate(node.input) if name == value}
        return bool(slots) and slots <= set(member[1].inputs)

    def _produced_by(self, value: str) -> Perm | None:
        """Return the permutation of the Transpose that defines an entering value, or None.

        Also None if the operand of the Transpose moves with the region.
        """
        producer = self.g.producer(value)
        if producer is None or self._is_moved(producer.input[0] if producer.input else ""):
            return None
        return self._perm_of(producer)

    def _perm_of(self, node: NodeProto | None) -> Perm | None:
        if node is None or not nd.is_op(node, "Transpose"):
            return None
        found = permutation(self.g, node)
        return found if found is not None and len(found) == len(self.perm) else None

    # -- moving

    def move(self) -> list[NodeProto]:
        """Make the members compute on permuted operands; return the Transposes added or changed."""
        touched: list[NodeProto] = []
        twins = {v: self.g.fresh(v) for v in self._outputs()}
        made = list(twins)
        for node, planned in self.members.values():
            for index in planned.inputs:
                value = node.input[index]
                if value not in twins:
                    twins[value] = self._permuted(node, value)
        sources = {v: self.g.producer(v) for v in twins if v not in made}
        for node, planned in self.members.values():
            inputs = list(node.input)
            for index in planned.inputs:
                inputs[index] = twins[inputs[index]]
            self.g.set_inputs(node, inputs)
            planned.edit()
            if not planned.outputs_stay:
                self.g.set_outputs(node, [twins.get(v, "") for v in node.output])
        for value in made:
            touched.extend(self._leave(value, twins[value]))
        for value, producer in sources.items():
            if producer is not None and nd.is_op(producer, "Transpose"):
                self.g.prune(producer)
            made_now = self.g.producer(twins[value])
            if made_now is not None:
                touched.append(made_now)
        return [node for node in touched if node in self.g and nd.is_op(node, "Transpose")]

    def _outputs(self) -> list[str]:
        moved = (n for n, planned in self.members.values() if not planned.outputs_stay)
        return [value for node in moved for value in nd.outputs_of(node)]

    def _permuted(self, user: NodeProto, value: str) -> str:
        """Return the name of an entering value as it is before `perm`."""
        g = self.g
        array = permuted_constant(g, value, self.inverse)
        if array is not None:
            return g.constant(array, value)
        producer = g.producer(value)
        produced_by = self._produced_by(value)
        if producer is not None and produced_by is not None:
            whole = compose(produced_by, self.inverse)
            source = producer.input[0]
            if is_identity(whole):
                return source
            return self._typed(transpose(g, source, whole, at=user), value)
        for other in g.users(value):
            if self._perm_of(other) == self.inverse:
                return other.output[0]
        return self._typed(transpose(g, value, self.inverse, at=user), value)

    def _typed(self, twin: str, value: str) -> str:
        known = self.g.type(value)
        if known is not None and known.shape is not None:
            shape = tuple(known.shape[axis] for axis in self.inverse)
            self.g.learn_type(twin, TensorType(known.dtype, shape))
        return twin

    def _leave(self, value: str, twin: str) -> list[NodeProto]:
        """Rewire the users outside the region; return the Transposes added or changed."""
        g = self.g
        self._typed(twin, value)
        touched: list[NodeProto] = []
        for user in g.users(value):
            perm = self._perm_of(user)
            if perm is None:
                continue
            whole = compose(self.perm, perm)
            if not is_identity(whole):
                g.set_inputs(user, [twin])
                g.set_attr(user, "perm", list(whole))
                touched.append(user)
                continue
            result = user.output[0]
            g.replace(result, twin)
            g.remove(user)
            if g.producer(twin) is None:
                twin = result  # a graph output kept its name
        if not g.is_unused(value):
            touched.append(g.add("Transpose", [twin], [value], {"perm": list(self.perm)}))
        return touched
