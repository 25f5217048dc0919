"""Linear maps that read one value and meet again in one operator, as a single map.

    x A + a, x B + b, x C + c  =  the parts of x [A B C] + [a b c]

Query, key and value of an attention are three such maps, and so are the halves of a gated MLP with
biases. They are merged where that leaves fewer operators: two maps without a bias are two either
way. What reads one source but belongs to different attentions (the keys of all layers of a decoder
read the encoder's result) stays apart: merged, all of it would be kept from the first layer to the
last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given, int_vector
from passes.fuse.compact.shared_input import Group, groups
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import TensorType

_LONGEST_WAY = 8
"""Operators between a map and the one where it meets the others."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One map: its MatMul or Gemm, and the Add of its bias where that is a node of its own."""

    node: NodeProto
    size: int
    add: NodeProto | None
    bias: str

    @property
    def result(self) -> str:
        return (self.add or self.node).output[0]

    @property
    def weight(self) -> str:
        return self.node.input[1]


@dataclass(frozen=True, slots=True, eq=False)
class Merge:
    """Members that are to become one map, in graph order."""

    members: tuple[Member, ...]

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple(member.weight for member in self.members)

    @property
    def saved(self) -> int:
        """How many nodes fewer there are: one MatMul, one Add and a Split stay."""
        adds = sum(member.add is not None for member in self.members)
        return len(self.members) + adds - 2 - bool(adds)

    def bytes(self, g: Graph) -> int:
        arrays = (g.const(weight) for weight in dict.fromkeys(self.weights))
        return sum(array.nbytes for array in arrays if array is not None)


def merges(g: Graph) -> list[Merge]:
    """Everything in the graph that is worth merging."""
    found = [merge for group in groups(g) for merge in _meeting(g, group) if merge.saved > 0]
    # A weight that another reader keeps would be stored twice.
    readers = Counter(weight for merge in found for weight in merge.weights)
    sets = defaultdict[str, set[tuple[str, ...]]](set)
    for merge in found:
        for weight in merge.weights:
            sets[weight].add(merge.weights)
    return [
        merge
        for merge in found
        if all(
            g.use_count(weight) == readers[weight] and len(sets[weight]) == 1
            for weight in merge.weights
        )
    ]


def _meeting(g: Graph, group: Group) -> Iterator[Merge]:
    """The members of a group by the operator that they meet in."""
    by_meeting: dict[int, list[Member]] = defaultdict(list)
    for node, size in zip(group.nodes, group.outputs, strict=True):
        member = _member(g, node, size)
        meeting = _meets_at(g, member.result) if member is not None else None
        if member is not None and meeting is not None:
            by_meeting[id(meeting)].append(member)
    for members in by_meeting.values():
        if len(members) > 1:
            yield Merge(tuple(members))


def _member(g: Graph, node: NodeProto, size: int) -> Member | None:
    if nd.is_op(node, "Gemm"):
        bias = given(node, 2)
        stored = g.tensor(bias) if bias else None
        by_output = stored is None or list(stored.dims) in ([size], [1, size])
        return Member(node, size, None, bias) if by_output else None
    add = _only_user(g, node.output[0])
    if add is not None and nd.is_op(add, "Add"):
        bias = add.input[1] if add.input[0] == node.output[0] else add.input[0]
        stored = g.tensor(bias)
        if stored is not None and list(stored.dims) == [size]:
            return Member(node, size, add, bias)
    return Member(node, size, None, "")


def _only_user(g: Graph, value: str) -> NodeProto | None:
    """The one node that reads a value, once, if nothing else does."""
    users = g.users(value)
    return users[0] if len(users) == 1 and g.use_count(value) == 1 else None


def _meets_at(g: Graph, value: str) -> NodeProto | None:
    """The first operator behind `value` that reads another varying value beside it."""
    for _ in range(_LONGEST_WAY):
        users = [user for user in g.users(value) if nd.is_op(user, "Attention")]
        reader = users[0] if len(users) == 1 else _only_user(g, value)
        if reader is None or reader.domain not in nd.STANDARD_DOMAINS:
            return None
        others = [name for name in nd.inputs_of(reader) if name != value]
        varies = not all(map(g.is_const, others)) and not nd.is_op(reader, "RotaryEmbedding")
        if varies or nd.is_op(reader, "Attention"):
            return reader
        value = reader.output[0]
    return None


def write(g: Graph, merge: Merge, stored: dict[tuple[str, ...], str]) -> None:
    """Put one map and a Split in place of the members. `stored` has the weights merged so far."""
    members, first = merge.members, merge.members[0].node
    turned = bool(nd.attr(first, "transB", 0))
    joined = _joined(g, merge, stored, axis=0 if turned else 1)
    bias = _bias(g, merge, stored)
    sizes = [member.size for member in members]
    if nd.is_op(first, "Gemm"):
        inputs = nd.without_blanks([first.input[0], joined, bias])
        whole = g.op("Gemm", *inputs, at=first, transB=int(turned) or None)
    else:
        whole = g.op("MatMul", first.input[0], joined, at=first)
        _learn(g, whole, members[0].node.output[0], sum(sizes))
        if bias:
            whole = g.op("Add", whole, bias, at=first)
    _learn(g, whole, members[0].node.output[0], sum(sizes))
    splits = [whole, int_vector(g, sizes, "sizes")]
    parts = g.add("Split", splits, len(members), {"axis": -1}, at=first)
    for member, part in zip(members, parts.output, strict=True):
        g.replace(member.result, part)
        g.prune(member.add or member.node)


def _learn(g: Graph, whole: str, like: str, size: int) -> None:
    shape = g.shape(like)
    if shape is not None:
        g.learn_type(whole, TensorType(g.dtype(like), (*shape[:-1], size)))


def _joined(g: Graph, merge: Merge, stored: dict[tuple[str, ...], str], axis: int) -> str:
    """The members' weights side by side; layers that share theirs share this one too."""
    name = stored.get(merge.weights)
    if name is None:
        arrays = [array for weight in merge.weights if (array := g.const(weight)) is not None]
        whole = g.model.weights.keep(np.concatenate(arrays, axis))
        name = stored[merge.weights] = g.constant(whole, "weights")
    return name


def _bias(g: Graph, merge: Merge, stored: dict[tuple[str, ...], str]) -> str:
    """The members' biases in a row, 0 for one without; blank when none has any."""
    names = ("bias", *(member.bias for member in merge.members), *merge.weights)
    if names in stored:
        return stored[names]
    parts: list[Array | None] = [g.const(m.bias) if m.bias else None for m in merge.members]
    known = next((part for part in parts if part is not None), None)
    if known is None:
        return ""
    filled = [
        np.zeros(member.size, known.dtype) if part is None else part.reshape(-1)
        for part, member in zip(parts, merge.members, strict=True)
    ]
    stored[names] = g.constant(np.concatenate(filled), "bias")
    return stored[names]
