"""Plan how an operator computes selected rows alone: which operands to select rows from.

The selected rows lie along `axis` of the node's output. By `axis_flow`, an operator that carries
this axis computes them from the same rows of its operands, while an operand that is broadcast along
the axis stays as it is. A planner returns None if the operator needs all rows, or if that is
unknown.

Attention computes a row of its output from the same row of its query, and needs all keys and
values. With `is_causal` it counts rows from the first query: only the last row, which attends to
all keys if there are as many keys as queries, can be computed without the attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from onnx import NodeProto

from passes.analysis.axis_flow import BROADCAST, MIXED, axis_flow
from passes.analysis.operands import dims, extra_outputs_used, given, int_vector, reshape_target
from passes.motion.sink_slices.row_selection import AnyRows
from toolkit.ir import Graph, Shape, node as nd
from toolkit.symbolic import Dim


@dataclass(frozen=True, slots=True)
class SlicedOperand:
    """An operand to select rows from along `axis`, which is `result_axis` after broadcasting."""

    slot: int
    axis: int
    result_axis: int


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The changes to a node that computes selected rows alone."""

    sliced: tuple[SlicedOperand, ...]
    replaced: Mapping[int, str | Sequence[int]] = field(default_factory=dict[int, "str"])
    """Other operands to replace, by index: with a value, or with a constant of integers."""
    dropped: str = ""
    """An attribute to remove."""
    keeps_first: bool = True
    """Whether the first axis stays first, and each of its entries is computed independently."""


def row_plan(g: Graph, node: NodeProto, axis: int, selection: AnyRows) -> RowPlan | None:
    """Return how `node` computes selected rows of `axis` of its outputs, or None if it cannot."""
    outputs = nd.without_blanks(node.output)
    shape = g.shape(outputs[0]) if outputs[0] else None
    if shape is None or (not nd.is_op(node, "Split") and extra_outputs_used(g, node)):
        return None
    planner = _PLANNERS.get(nd.qualified(node), _carried)
    found = planner(_RowSite(g, node, axis, selection, shape))
    return found if found is not None and found.sliced else None


@dataclass(frozen=True, slots=True, eq=False)
class RowMember:
    """A node that is to compute selected rows of `axis` of its outputs alone."""

    node: NodeProto
    axis: int
    plan: RowPlan

    def write(self, g: Graph, rows: Mapping[int, str]) -> list[tuple[str, str]]:
        """Add the node for these rows of its operands; return each output with its rows."""
        node, inputs = self.node, list(self.node.input)
        for slot, other in {**rows, **self.plan.replaced}.items():
            inputs[slot] = other if isinstance(other, str) else int_vector(g, other, "shape")
        outputs = [g.fresh(name) if name else "" for name in node.output]
        attributes = {**nd.attrs(node), self.plan.dropped: None}
        g.add(node.op_type, inputs, outputs, attributes, node.domain, at=node)
        return [pair for pair in zip(node.output, outputs, strict=True) if pair[0]]


def is_product(node: NodeProto) -> bool:
    """Whether the node is a product or an attention, whose work is worth saving."""
    return nd.qualified(node) in _PRODUCTS


_PRODUCTS = ("MatMul", "Gemm", "Attention", "com.microsoft::MultiHeadAttention")


@dataclass(frozen=True, slots=True, eq=False)
class _RowSite:
    """A node, and the axis of its output along which rows are selected."""

    g: Graph
    node: NodeProto
    axis: int
    selection: AnyRows
    shape: Shape
    """The shape of the node's output."""

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Dim:
        return self.shape[self.axis]


def _carried(site: _RowSite) -> RowPlan | None:
    flow = axis_flow(site.g, site.node)
    if flow is None:
        return None
    sliced, keeps_first = list[SlicedOperand](), True
    for slot, operand in flow.operands.items():
        axis = operand.sources[site.axis]
        if axis == BROADCAST:
            continue
        shape = site.g.shape(site.node.input[slot])
        if axis == MIXED or shape is None or shape[axis] != site.size:
            return None
        sliced.append(SlicedOperand(slot, axis, axis + operand.missing))
        keeps_first = keeps_first and operand.keeps_first()
    return RowPlan(tuple(sliced), keeps_first=keeps_first)


def _product(site: _RowSite) -> RowPlan | None:
    """Select rows, or entries of leading axes; columns would have to be cut from the weights."""
    if site.axis == site.rank - 1:
        return None
    return _unless_constant(site) if site.axis == site.rank - 2 else _carried(site)


def _unless_constant(site: _RowSite) -> RowPlan | None:
    """Refuse to select rows of a constant matrix or table, which would be stored twice."""
    found = _carried(site)
    if found is None or not site.g.is_const(site.node.input[0]):
        return found
    return None if any(operand.slot == 0 for operand in found.sliced) else found


def _reshape(site: _RowSite) -> RowPlan | None:
    """Select rows of a Reshape that changes no axis up to theirs."""
    g, node, axis = site.g, site.node, site.axis
    before = g.shape(node.input[0])
    if before is None or before[: axis + 1] != site.shape[: axis + 1]:
        return None
    few = [site.selection.shape(shape, axis, axis) for shape in (before, site.shape)]
    target = reshape_target(few[0], few[1])
    if target is None:
        return None
    return RowPlan((SlicedOperand(0, axis, axis),), {1: target}, "allowzero")


def _expand(site: _RowSite) -> RowPlan | None:
    """Accept an Expand whose target shape is 1 along the rows or has no such axis."""
    sizes = dims(site.g, site.node.input[1])
    place = None if sizes is None else site.axis - site.rank + len(sizes)
    if sizes is None or place is None or (place >= 0 and sizes[place] != 1):
        return None
    return _carried(site)


def _squeeze(site: _RowSite) -> RowPlan | None:
    """Refuse a Squeeze without axes, which would drop the axis of a single row."""
    return _carried(site) if given(site.node, 1) else None


# -- attention


def _attention(site: _RowSite) -> RowPlan | None:
    if site.axis != site.rank - 2:
        return None
    if nd.attr(site.node, "is_causal", 0) and not _reads_all_keys(site):
        return None
    return _masked(site, {3: 2}, dropped="is_causal")


def _reads_all_keys(site: _RowSite) -> bool:
    """Whether the selected row is the last of as many queries as there are keys."""
    shape = site.g.shape(site.node.input[1])
    if shape is None or len(shape) != site.rank or any(site.node.input[4:]):
        return False
    return shape[site.axis] == site.size and site.selection.is_last(site.size)


def _multi_head(site: _RowSite) -> RowPlan | None:
    """Accept separate query, key and value."""
    g, node = site.g, site.node
    if site.axis != 1 or nd.attr(node, "unidirectional", 0):
        return None
    padding = given(node, 4)
    if not given(node, 1) or g.rank(node.input[0]) != 3 or (padding and not g.rank(padding)):
        return None
    return _masked(site, {4: 1, 5: 2} if padding and g.rank(padding) == 3 else {5: 2})


def _masked(site: _RowSite, masks: Mapping[int, int], dropped: str = "") -> RowPlan | None:
    """Select rows of the query and of the masks, whose last two axes are queries and keys.

    `masks` maps the slot of each mask to the axis of queries in the shape it is broadcast to.
    """
    query = site.g.shape(site.node.input[0])
    if query is None or len(query) != site.rank or query[site.axis] != site.size:
        return None
    sliced = [SlicedOperand(0, site.axis, site.axis)]
    replaced = dict[int, str | Sequence[int]]()
    for slot, result_axis in masks.items():
        mask = given(site.node, slot)
        shape = site.g.shape(mask) if mask else (1, 1)
        if shape is None or len(shape) < 2:
            return None
        axis = len(shape) - 2
        if shape[axis] == 1:
            continue
        repeated = _repeated_row(site.g, mask, axis) if site.selection.count == 1 else ""
        if repeated:
            replaced[slot] = repeated
        elif shape[axis] == site.size:
            sliced.append(SlicedOperand(slot, axis, result_axis))
        else:
            return None
    return RowPlan(tuple(sliced), replaced, dropped)


def _repeated_row(g: Graph, mask: str, axis: int) -> str:
    """Return the single row that an Expand repeats to make `mask`, or blank."""
    node = g.producer(mask)
    if node is None or not nd.is_op(node, "Expand"):
        return ""
    before, after = g.shape(node.input[0]), g.shape(mask)
    if before is None or after is None:
        return ""
    return node.input[0] if before == (*after[:axis], 1, *after[axis + 1 :]) else ""


_PLANNERS: dict[str, Callable[[_RowSite], RowPlan | None]] = {
    "Attention": _attention,
    "Expand": _expand,
    "Gather": _unless_constant,
    "Gemm": _product,
    "MatMul": _product,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "com.microsoft::MultiHeadAttention": _multi_head,
}
"""Planners of operators with conditions beyond `axis_flow`."""
