"""Which values may be anything in rows of padding: nothing that the model gives depends on those.

A value is free when everything that reads it

    takes no key out of such a row        Attention(q, value, value, mask)
    takes something else there            value * mask, Where(mask, value, -inf)
    reads the first row alone             value[:, 0], which is never left out, see `packing`
    works on each row by itself           f(value), which is free in turn

so it is found from the outputs towards the inputs, each node after all that read it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from onnx import NodeProto, TensorProto

from passes.analysis.axes import positive_axes
from passes.analysis.intervals import ONE, ZERO
from passes.analysis.operands import given, ints, slice_ranges
from passes.motion.remove_padding.masked_values import MaskedValues
from passes.motion.sink_slices.operators import row_plan
from passes.motion.sink_slices.row_selection import Entries
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph

MASKED = -1e4
"""By how much less a key scores, at least, that is out of attention: it weighs nothing then."""

_ANY_ROW = Entries(1, (0,))
"""Whichever it is: the question is what an operator needs for one row of its output."""

MASK, _PAST = 3, 4
"""Operands of an Attention: the mask, and from there on what earlier runs have left."""


def takes_keys_out(padding: MaskedValues, mask: str, of_real: bool) -> bool:
    """Whether attention with this mask, [batch, heads, queries, keys], reads no key of padding.

    A query that has no other key reads those that are masked: all queries see the first token, or
    those that are real, if no others matter, see themselves.
    """
    g = padding.g
    shape = (g.shape(mask) or ()) if mask else ()
    if len(shape) != 4 or shape[3] != padding.sizes[1]:
        return False
    there = padding.bounds(mask, padding.padded(-4, -1))
    seen = [padding.bounds(mask, padding.real(-4, -1))]
    if of_real and shape[2] == shape[3]:
        seen.append(padding.bounds(mask, padding.real(-4, -1, twin=-2)))
    if g.dtype(mask) == TensorProto.BOOL:
        return there == ZERO and ONE in seen
    return any(there.high - key.low <= MASKED for key in seen)


@dataclass(slots=True)
class Free:
    """The values of a graph that are free, each with the axis along which its rows lie."""

    padding: MaskedValues
    _reads: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """How many of those that read a value do not depend on its padding, by axis."""

    def __post_init__(self) -> None:
        for node in reversed(self._g.nodes):
            for slot, axis in self._harmless(node).items():
                if self.has_rows(node.input[slot], axis):
                    self._reads[node.input[slot], axis] += 1

    @property
    def _g(self) -> Graph:
        return self.padding.g

    def axis(self, node: NodeProto) -> int | None:
        """The axis of rows in what the node gives, where all of that is free."""
        axes = {self._axis_of(name) for name in nd.outputs_of(node) if not self._g.is_unused(name)}
        return axes.pop() if len(axes) == 1 else None

    def has_rows(self, value: str, axis: int) -> bool:
        """Whether the value has rows of the batch along this axis."""
        shape = self._g.shape(value)
        if shape is None or not 0 < axis < len(shape):
            return False
        return (shape[0], shape[axis]) == self.padding.sizes

    def _axis_of(self, value: str) -> int | None:
        g = self._g
        if g.is_output(value) or g.is_captured(value):
            return None
        uses, axes = g.use_count(value), range(1, g.rank(value) or 0)
        return next((axis for axis in axes if self._reads[value, axis] == uses), None)

    def _harmless(self, node: NodeProto) -> dict[int, int]:
        """The operands whose padding does not matter here, each with the axis of its rows."""
        axis = self.axis(node)
        if nd.is_op(node, "Attention"):
            return self._attention(node, axis)
        found = dict[int, int]()
        if axis is not None:
            needed = row_plan(self._g, node, axis, _ANY_ROW)
            if needed is not None and needed.keeps_first:
                found = {one.slot: one.axis for one in needed.moved if one.axis == one.of}
        if nd.is_op(node, "Mul", "Where"):
            found |= self._replaced(node)
        elif nd.is_op(node, "Gather", "Slice"):
            found |= self._first_row(node)
        return found

    def _attention(self, node: NodeProto, axis: int | None) -> dict[int, int]:
        """Keys and values that the mask takes out; queries whose results are free."""
        g = self._g
        if any(node.input[_PAST:]) or any(
            not g.is_unused(name) for name in node.output[1:] if name
        ):
            return {}
        found = dict[int, int]()
        is_free = axis is not None and axis == (g.rank(node.output[0]) or 0) - 2
        if takes_keys_out(self.padding, given(node, MASK), is_free):
            found = {slot: (g.rank(node.input[slot]) or 0) - 2 for slot in (1, 2)}
        if is_free:
            found[0] = (g.rank(node.input[0]) or 0) - 2
        return found

    def _replaced(self, node: NodeProto) -> dict[int, int]:
        """Of a factor that is 0 at all padding, or a choice that is another there."""
        g, padding = self._g, self.padding
        rank = g.rank(node.output[0]) or 0
        for axis in range(1, rank):
            if not self.has_rows(node.output[0], axis):
                continue
            place = padding.padded(-rank, axis - rank)
            there = [padding.bounds(name, padding.aligned(name, place)) for name in node.input]
            if nd.is_op(node, "Where"):
                free = [1] if there[0] == ZERO else [2] if there[0] == ONE else []
            else:
                free = [1 - slot for slot in (0, 1) if there[slot] == ZERO][:1]
            if free and g.rank(node.input[free[0]]) == rank:
                return {free[0]: axis}  # and no other along another axis: both may be padding
        return {}

    def _first_row(self, node: NodeProto) -> dict[int, int]:
        """Of what nothing but the first row is taken."""
        g, value = self._g, node.input[0]
        if nd.is_op(node, "Gather"):
            axes = positive_axes([nd.attr(node, "axis", 0)], g.rank(value))
            is_first = set(ints(g, node.input[1]) or ()) == {0}
        else:
            cut = slice_ranges(g, node) or {}
            axes = positive_axes(list(cut), g.rank(value))
            is_first = list(cut.values()) == [(0, 1, 1)]
        return {0: axes[0]} if axes and is_first else {}
