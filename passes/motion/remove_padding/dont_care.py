"""Find values whose rows of padding do not affect the outputs of the model.

The padding of a value does not matter if it does not matter to any of its users, which

    ignore keys of padding            Attention(q, value, value, mask)
    replace them by something else    value * mask, Where(mask, value, -inf)
    use the first row alone           value[:, 0], which is always kept, see `packing`
    compute each row independently    f(value), if the padding of the result does not matter

so the analysis runs from the outputs to the inputs, each node after all of its users.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from onnx import NodeProto, TensorProto

from passes.analysis.axes import positive_axes
from passes.analysis.intervals import ONE, ZERO
from passes.analysis.operands import extra_outputs_used, given, ints, slice_ranges
from passes.motion.remove_padding.masked_values import MaskedValues
from passes.motion.sink_slices.operators import row_plan
from passes.motion.sink_slices.row_selection import Entries
from toolkit.ir import Graph, node as nd

MASKED = -1e4
"""A key whose score is lower than the others by at least this much has weight 0 in float32."""

_ANY_ROW = Entries(1, (0,))
"""An arbitrary selected row, to ask which rows of its operands an operator needs for it."""

MASK, _CACHE = 3, 4
"""Operands of an Attention: the mask, and the first of those that hold a cache."""


def ignores_padded_keys(values: MaskedValues, mask: str, results_matter: bool = True) -> bool:
    """Whether attention with this mask, [batch, heads, queries, keys], reads no key of padding.

    Masked keys count if a query has no other. So all queries must see the first token, or, if the
    results at padding do not matter, real ones must see themselves.
    """
    g = values.g
    shape = (g.shape(mask) or ()) if mask else ()
    if len(shape) != 4 or shape[3] != values.sizes[1]:
        return False
    padded = values.bounds(mask, values.padded(-4, -1))
    seen = [values.bounds(mask, values.real(-4, -1))]
    if not results_matter and shape[2] == shape[3]:
        seen.append(values.bounds(mask, values.real(-4, -1, twin=-2)))
    if g.dtype(mask) == TensorProto.BOOL:
        return padded == ZERO and ONE in seen
    return any(padded.high - key.low <= MASKED for key in seen)


@dataclass(slots=True)
class DontCareRows:
    """The values whose rows of padding do not matter, each with the axis of its rows."""

    values: MaskedValues
    _uses: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """The number of uses of a value that do not depend on its padding, by axis."""

    def __post_init__(self) -> None:
        for node in reversed(self._g.nodes):
            for slot, axis in self._dont_care_operands(node).items():
                if self.has_rows(node.input[slot], axis):
                    self._uses[node.input[slot], axis] += 1

    @property
    def _g(self) -> Graph:
        return self.values.g

    def axis(self, node: NodeProto) -> int | None:
        """Return the axis of rows if the padding of all outputs does not matter, or None."""
        axes = {self._axis_of(name) for name in nd.outputs_of(node) if not self._g.is_unused(name)}
        return axes.pop() if len(axes) == 1 else None

    def has_rows(self, value: str, axis: int) -> bool:
        """Whether the value has a batch axis, and the rows of its texts along `axis`."""
        shape = self._g.shape(value)
        if shape is None or not 0 < axis < len(shape):
            return False
        return (shape[0], shape[axis]) == self.values.sizes

    def _axis_of(self, value: str) -> int | None:
        g = self._g
        if g.is_output(value) or g.is_captured(value):
            return None
        count, axes = g.use_count(value), range(1, g.rank(value) or 0)
        return next((axis for axis in axes if self._uses[value, axis] == count), None)

    def _dont_care_operands(self, node: NodeProto) -> dict[int, int]:
        """Return the operands whose padding does not matter here, with the axes of their rows."""
        axis = self.axis(node)
        if nd.is_op(node, "Attention"):
            return self._attention(node, axis)
        found = dict[int, int]()
        if axis is not None:
            plan = row_plan(self._g, node, axis, _ANY_ROW)
            if plan is not None and plan.keeps_first:
                found = {one.slot: one.axis for one in plan.sliced if one.axis == one.result_axis}
        if nd.is_op(node, "Mul", "Where"):
            found |= self._replaced(node)
        elif nd.is_op(node, "Gather", "Slice"):
            found |= self._first_row(node)
        return found

    def _attention(self, node: NodeProto, axis: int | None) -> dict[int, int]:
        """Return masked keys and values, and the query if padding of the result does not matter."""
        g = self._g
        if any(node.input[_CACHE:]) or extra_outputs_used(g, node):
            return {}
        rows = [(g.rank(name) or 0) - 2 for name in node.input[:3]]
        dont_care = axis is not None and axis == (g.rank(node.output[0]) or 0) - 2
        found = {0: rows[0]} if dont_care else {}
        if ignores_padded_keys(self.values, given(node, MASK), results_matter=not dont_care):
            found |= {1: rows[1], 2: rows[2]}
        return found

    def _replaced(self, node: NodeProto) -> dict[int, int]:
        """Return the operand that a factor of 0 or the choice of a Where replaces at padding."""
        g, values = self._g, self.values
        rank = g.rank(node.output[0]) or 0
        for axis in range(1, rank):
            if not self.has_rows(node.output[0], axis):
                continue
            axes = values.padded(-rank, axis - rank)
            padded = [values.bounds(name, values.aligned(name, axes)) for name in node.input]
            if nd.is_op(node, "Where"):
                unused = [1] if padded[0] == ZERO else [2] if padded[0] == ONE else []
            else:
                unused = [1 - slot for slot in (0, 1) if padded[slot] == ZERO][:1]
            if unused and g.rank(node.input[unused[0]]) == rank:
                return {unused[0]: axis}  # along this axis alone: another may be padding as well
        return {}

    def _first_row(self, node: NodeProto) -> dict[int, int]:
        """Return the operand if the node selects its first row alone."""
        g, value = self._g, node.input[0]
        if nd.is_op(node, "Gather"):
            axes = positive_axes([nd.attr(node, "axis", 0)], g.rank(value))
            is_first = set(ints(g, node.input[1]) or ()) == {0}
        else:
            cut = slice_ranges(g, node) or {}
            axes = positive_axes(list(cut), g.rank(value))
            is_first = list(cut.values()) == [(0, 1, 1)]
        return {0: axes[0]} if axes and is_first else {}
