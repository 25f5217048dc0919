"""How an operator computes selected rows alone: of which operands they are to be selected.

Throughout, rows of axis `axis` of the node's output are wanted. An operator that works along other
axes gives them when it reads the same rows; an operand that is the same for all rows, because it
has size 1 along that axis or lacks it, stays as it is. None: the operator needs all rows, or it
cannot be told.

Attention gives a row of its output for each row of its query, and needs all keys and values. One
that is causal by its attribute counts rows from the first query: of those, the last row alone,
which reads as many keys as there are queries, can be had without the attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import (
    dims,
    given,
    int_operand,
    int_vector,
    normalized_from,
    permutation,
    reshape_target,
)
from passes.motion.sink_slices.row_selection import Wanted
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.op_traits import BROADCASTING, ELEMENTWISE, REDUCTIONS
from toolkit.ir.tensor_type import Shape
from toolkit.symbolic import Dim


@dataclass(frozen=True, slots=True)
class Moved:
    """An operand that is to come selected along `axis`; `of` is that axis after broadcasting."""

    slot: int
    axis: int
    of: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What changes in a node that computes selected rows alone."""

    moved: tuple[Moved, ...]
    instead: Mapping[int, str | Sequence[int]] = field(default_factory=dict[int, "str"])
    """Operands that are read in place of others: a value, or integers to be stored."""
    without: str = ""
    """An attribute that is left out."""
    keeps_first: bool = True
    """Whether the first axis stays the first, and each of its entries is worked on by itself."""


def plan(g: Graph, node: NodeProto, axis: int, selection: Wanted) -> Plan | None:
    """How `node` computes selected rows of `axis` of its outputs; None when it cannot."""
    planner = _planner(node)
    shape = g.shape(nd.outputs_of(node)[0]) if planner is not None else None
    if planner is None or shape is None:
        return None
    found = planner(_Site(g, node, axis, selection, shape))
    return found if found is not None and found.moved else None


def write_twin(
    g: Graph, node: NodeProto, plan: Plan, rows: Mapping[int, str]
) -> list[tuple[str, str]]:
    """Write the node once more, for the rows in these operands: what it gives, and what that is."""
    inputs = list(node.input)
    for slot, other in {**rows, **plan.instead}.items():
        inputs[slot] = other if isinstance(other, str) else int_vector(g, other, "shape")
    outputs = [g.fresh(name) if name else "" for name in node.output]
    g.add(
        node.op_type, inputs, outputs, {**nd.attrs(node), plan.without: None}, node.domain, at=node
    )
    return [pair for pair in zip(node.output, outputs, strict=True) if pair[0]]


def is_product(node: NodeProto) -> bool:
    """Whether it is one of the operators whose work is worth saving."""
    return nd.qualified(node) in _PRODUCTS


_PRODUCTS = ("MatMul", "Gemm", "Attention", "com.microsoft::MultiHeadAttention")


@dataclass(frozen=True, slots=True, eq=False)
class _Site:
    """A node, and the axis of its output whose rows are wanted."""

    g: Graph
    node: NodeProto
    axis: int
    selection: Wanted
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Dim:
        return self.shape[self.axis]

    def only_output(self) -> bool:
        """Whether nothing but the first output is used."""
        return all(map(self.g.is_unused, nd.without_blanks(self.node.output)[1:]))

    def along(self, axis: int, keeps_first: bool = True) -> Plan | None:
        """The plan of an operator whose first operand alone has rows, along this axis."""
        found = self.operand(0, axis)
        return None if found is None else Plan((found,), keeps_first=keeps_first)

    def operand(self, slot: int, axis: int) -> Moved | None:
        """An operand that has all rows along `axis`; None when that is not known."""
        shape = self.g.shape(self.node.input[slot])
        if shape is None or not 0 <= axis < len(shape) or shape[axis] != self.size:
            return None
        return Moved(slot, axis, axis)

    def broadcast(self, slots: Sequence[int]) -> Plan | None:
        """Operands that line up with the output's last axes."""
        moved: list[Moved] = []
        for slot in slots:
            shape = self.g.shape(self.node.input[slot])
            if shape is None or len(shape) > self.rank:
                return None
            axis = self.axis - self.rank + len(shape)
            if axis < 0 or shape[axis] == 1:
                continue
            if self.operand(slot, axis) is None:
                return None
            moved.append(Moved(slot, axis, self.axis))
        return Plan(tuple(moved))


def _planner(node: NodeProto) -> Callable[[_Site], Plan | None] | None:
    name = nd.qualified(node)
    if name in BROADCASTING or name == "PRelu":
        return _broadcasting
    if name in ELEMENTWISE:
        return _elementwise
    if name in REDUCTIONS:
        return _reduction
    return _PLANNERS.get(name)


def _elementwise(site: _Site) -> Plan | None:
    return site.along(site.axis)


def _broadcasting(site: _Site) -> Plan | None:
    return site.broadcast(range(len(site.node.input)))


def _biased(site: _Site) -> Plan | None:
    """An activation with a bias along the last axis."""
    return site.along(site.axis) if site.axis != site.rank - 1 else None


def _along_axis(default: int) -> Callable[[_Site], Plan | None]:
    """An operator along the axis in its attribute `axis`, which must be another one."""

    def planned(site: _Site) -> Plan | None:
        axes = positive_axes([nd.attr(site.node, "axis", default)], site.rank)
        if axes is None or axes == [site.axis]:
            return None
        return site.along(site.axis, keeps_first=axes != [0])

    return planned


def _concat(site: _Site) -> Plan | None:
    axes = positive_axes([nd.attr(site.node, "axis", 0)], site.rank)
    if axes is None or axes == [site.axis]:
        return None
    found = [site.operand(slot, site.axis) for slot in range(len(site.node.input))]
    moved = tuple(one for one in found if one is not None)
    return Plan(moved, keeps_first=axes != [0]) if len(moved) == len(found) else None


def _quantize(site: _Site) -> Plan | None:
    """By one scale, or by scales along another axis; blocks of scales have rows of their own."""
    rank = site.g.rank(site.node.input[1])
    if rank is None or rank > 1:
        return None
    return _elementwise(site) if site.g.shape(site.node.input[1]) in ((), (1,)) else _by_axis(site)


_by_axis = _along_axis(1)


def _norm(site: _Site) -> Plan | None:
    """Along all axes from its own on."""
    first = normalized_from(site.g, site.node)
    if first is None or site.axis >= first or not site.only_output():
        return None
    return site.along(site.axis)


def _reduction(site: _Site) -> Plan | None:
    node, rank = site.node, site.g.rank(site.node.input[0])
    axes = positive_axes(int_operand(site.g, node, "axes", 1), rank)
    if not axes or rank is None:
        return None
    if nd.attr(node, "keepdims", 1):
        return None if site.axis in axes else site.along(site.axis, 0 not in axes)
    left = [axis for axis in range(rank) if axis not in axes]
    return site.along(left[site.axis], 0 not in axes)


def _matmul(site: _Site) -> Plan | None:
    """Rows of the first operand; of the axes in front, entries of both."""
    first, second = (site.g.rank(name) or 0 for name in site.node.input)
    if min(first, second) < 2 or site.axis == site.rank - 1:
        return None
    if site.axis < site.rank - 2:
        return site.broadcast((0, 1))
    if site.g.is_const(site.node.input[0]):
        return None  # rows of a stored matrix would be stored beside it
    return site.along(first - 2, keeps_first=first == site.rank)


def _gemm(site: _Site) -> Plan | None:
    if site.axis != 0:
        return None
    rows = site.along(1 if nd.attr(site.node, "transA", 0) else 0)
    if rows is None or not given(site.node, 2):
        return rows
    added = site.broadcast([2])
    return None if added is None else Plan((*rows.moved, *added.moved))


# -- views


def _transpose(site: _Site) -> Plan | None:
    perm = permutation(site.g, site.node)
    if perm is None or len(perm) != site.rank:
        return None
    return site.along(perm[site.axis], keeps_first=perm[0] == 0)


def _unsqueeze(site: _Site) -> Plan | None:
    axes = positive_axes(int_operand(site.g, site.node, "axes", 1), site.rank)
    if axes is None or site.axis in axes:
        return None
    return site.along(site.axis - sum(axis < site.axis for axis in axes), 0 not in axes)


def _squeeze(site: _Site) -> Plan | None:
    rank = site.g.rank(site.node.input[0])
    axes = positive_axes(int_operand(site.g, site.node, "axes", 1), rank)
    if not axes or rank is None:
        return None
    left = [axis for axis in range(rank) if axis not in axes]
    return site.along(left[site.axis], 0 not in axes)


def _reshape(site: _Site) -> Plan | None:
    """Where no axis in front of the rows changes, their own is one axis before and after."""
    g, node, axis = site.g, site.node, site.axis
    before = g.shape(node.input[0])
    if before is None or before[: axis + 1] != site.shape[: axis + 1]:
        return None
    few = [site.selection.shape(shape, axis, axis) for shape in (before, site.shape)]
    target = reshape_target(few[0], few[1])
    if target is None:
        return None
    return Plan((Moved(0, axis, axis),), {1: target}, "allowzero")


def _expand(site: _Site) -> Plan | None:
    """One that leaves the rows as they are, and says so by 1 or by not naming them."""
    rank, sizes = site.g.rank(site.node.input[0]), dims(site.g, site.node.input[1])
    if rank != site.rank or sizes is None:
        return None
    place = site.axis - site.rank + len(sizes)
    return site.along(site.axis) if place < 0 or sizes[place] == 1 else None


def _slice(site: _Site) -> Plan | None:
    """A part of other axes."""
    starts = site.g.shape(site.node.input[1])
    absent = range(starts[0]) if starts and isinstance(starts[0], int) else None
    axes = positive_axes(int_operand(site.g, site.node, "axes", 3, absent), site.rank)
    if axes is None or site.axis in axes:
        return None
    return site.along(site.axis, 0 not in axes)


def _gather(site: _Site) -> Plan | None:
    """Entries of another axis, or of any by rows of the index, as of a table of words."""
    ranks = [site.g.rank(name) for name in site.node.input]
    axes = positive_axes([nd.attr(site.node, "axis", 0)], ranks[0])
    if axes is None or ranks[1] is None:
        return None
    [first], last = axes, axes[0] + ranks[1]
    if first <= site.axis < last:
        found = site.operand(1, site.axis - first)
        return None if found is None else Plan((found,), keeps_first=first == 0)
    if site.g.is_const(site.node.input[0]):
        return None  # columns of a table of words, to be copied for all that it has
    own = site.axis if site.axis < first else site.axis - ranks[1] + 1
    return site.along(own, first != 0)


# -- attention


def _attention(site: _Site) -> Plan | None:
    if site.axis != site.rank - 2 or not site.only_output():
        return None
    if nd.attr(site.node, "is_causal", 0) and not _reads_all_keys(site):
        return None
    return _masked(site, {3: 2}, without="is_causal")


def _reads_all_keys(site: _Site) -> bool:
    """Whether the selected row is the last of as many queries as there are keys."""
    shape = site.g.shape(site.node.input[1])
    if shape is None or len(shape) != site.rank or any(site.node.input[4:]):
        return False
    return shape[site.axis] == site.size and site.selection.is_last(site.size)


def _multi_head(site: _Site) -> Plan | None:
    """The contributed operator, on a query apart from key and value."""
    g, node = site.g, site.node
    if site.axis != 1 or nd.attr(node, "unidirectional", 0) or not site.only_output():
        return None
    padding = given(node, 4)
    if not given(node, 1) or g.rank(node.input[0]) != 3 or (padding and not g.rank(padding)):
        return None
    return _masked(site, {4: 1, 5: 2} if padding and g.rank(padding) == 3 else {5: 2})


def _masked(site: _Site, masks: Mapping[int, int], without: str = "") -> Plan | None:
    """The rows of the query, and of the masks, whose last two axes are queries and keys.

    `masks` are their slots, each with the axis of queries in what the mask is broadcast to.
    """
    query = site.operand(0, site.axis)
    if query is None:
        return None
    moved, instead = [query], dict[int, str | Sequence[int]]()
    for slot, of in masks.items():
        mask = given(site.node, slot)
        shape = site.g.shape(mask) if mask else (1, 1)
        if shape is None or len(shape) < 2:
            return None
        axis = len(shape) - 2
        if shape[axis] == 1:
            continue
        alike = _one_row(site.g, mask, axis) if site.selection.count == 1 else ""
        if alike:
            instead[slot] = alike
        elif shape[axis] == site.size:
            moved.append(Moved(slot, axis, of))
        else:
            return None
    return Plan(tuple(moved), instead, without)


def _one_row(g: Graph, mask: str, axis: int) -> str:
    """What an Expand has made the rows of a mask of, all alike; blank where it did not."""
    node = g.producer(mask)
    if node is None or not nd.is_op(node, "Expand"):
        return ""
    before, after = g.shape(node.input[0]), g.shape(mask)
    if before is None or after is None:
        return ""
    return node.input[0] if before == (*after[:axis], 1, *after[axis + 1 :]) else ""


def _rotary(site: _Site) -> Plan | None:
    """Each row has its angles, or the number of its position."""
    if site.axis != site.rank - 2:
        return None
    ranks = {3: 2} if given(site.node, 3) else {1: 3, 2: 3}
    if any(site.g.rank(site.node.input[slot]) != rank for slot, rank in ranks.items()):
        return None
    found = [site.operand(0, site.axis), *(site.operand(slot, 1) for slot in ranks)]
    moved = tuple(one for one in found if one is not None)
    return Plan(moved) if len(moved) == len(found) else None


_PLANNERS: dict[str, Callable[[_Site], Plan | None]] = {
    "Attention": _attention,
    "Concat": _concat,
    "DequantizeLinear": _quantize,
    "Expand": _expand,
    "Gather": _gather,
    "Gemm": _gemm,
    "Hardmax": _along_axis(-1),
    "LayerNormalization": _norm,
    "LogSoftmax": _along_axis(-1),
    "MatMul": _matmul,
    "QuantizeLinear": _quantize,
    "RMSNormalization": _norm,
    "Reshape": _reshape,
    "RotaryEmbedding": _rotary,
    "Slice": _slice,
    "Softmax": _along_axis(-1),
    "Split": _along_axis(0),
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "com.microsoft::BiasGelu": _biased,
    "com.microsoft::FastGelu": _biased,
    "com.microsoft::Gelu": _elementwise,
    "com.microsoft::MultiHeadAttention": _multi_head,
    "com.microsoft::QuickGelu": _elementwise,
}
