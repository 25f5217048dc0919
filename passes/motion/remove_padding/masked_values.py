"""Bounds of values at the positions where a mask is zero.

    mask [b, s] = 0    =>    Where(Cast(Unsqueeze(mask, [1, 2])), 0, -inf) [b, :, :, s] = -inf

`MaskAxes` are the axes of a value along which batch and length of the mask lie, counted from the
last axis as broadcasting does. The same analysis bounds values at real tokens: for each of them
against all others, and against itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.intervals import (
    BOOLEAN,
    ELEMENTWISE_BOUNDED,
    NAN,
    ON_EQUAL_INTEGERS,
    ONE,
    UNKNOWN,
    ZERO,
    Interval,
    bounds_of,
    rounded_to,
    transfer_function,
)
from passes.motion.remove_padding.mask_axes import MaskAxes
from toolkit.ir import FLOATS, Graph, Shape, node as nd
from toolkit.ir.op_traits import MOVEMENT

_DEPTH = 48
"""The analysis stops this many nodes above a value; exporters build masks in far fewer."""
_MOST_ELEMENTS = 1 << 24
"""Larger constants are not read."""

REAL = Interval(1, 1 << 20)
"""Mask values at real tokens, token ids among them."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskedValues:
    """Bounds of a graph's values at the positions where `mask`, of [batch, length], is zero."""

    g: Graph
    mask: str
    sizes: Shape
    _known: dict[tuple[str, MaskAxes], Interval] = field(
        default_factory=dict[tuple[str, MaskAxes], Interval]
    )

    def padded(self, batch: int, row: int) -> MaskAxes:
        """Return the positions where the mask is zero."""
        return MaskAxes(None if self.sizes[0] == 1 else batch, row)

    def real(self, batch: int, row: int, twin: int | None = None) -> MaskAxes:
        """Return the positions where the mask marks real tokens."""
        return self.padded(batch, row)._replace(twin=twin, is_real=True)

    def bounds(self, value: str, axes: MaskAxes, depth: int = _DEPTH) -> Interval:
        """Return the bounds of `value` at the given positions."""
        key = value, axes
        if key not in self._known:
            found = self._find(value, axes, depth) if depth else None
            if found is None:
                found = BOOLEAN if self.g.dtype(value) == TensorProto.BOOL else UNKNOWN
            self._known[key] = found
        return self._known[key]

    def _find(self, value: str, axes: MaskAxes, depth: int) -> Interval | None:
        """Return the bounds, or None where they are unknown."""
        g = self.g
        if value == self.mask:
            return self._of_mask(axes)
        if g.is_const(value):
            return self._of_constant(value, axes)
        node = g.producer(value)
        if node is None:
            return None
        if nd.is_op(node, *MOVEMENT):
            return self.bounds(node.input[0], axes.before(g, node), depth - 1)
        function = transfer_function(node, g.dtype(value))
        if function is None:
            return None
        if nd.is_op(node, *ON_EQUAL_INTEGERS) and self._compares_equal_tokens(node, axes):
            return ON_EQUAL_INTEGERS[node.op_type]
        operands = [
            self.bounds(name, self.aligned(name, axes), depth - 1) for name in nd.inputs_of(node)
        ]
        # Every operator propagates NaN, except a Where with a known condition.
        known = nd.is_op(node, "Where") and operands[0].number is not None
        if not known and any(operand.may_be_nan for operand in operands):
            return rounded_to(NAN, g.dtype(value))
        return rounded_to(function(*operands), g.dtype(value))

    def _of_mask(self, axes: MaskAxes) -> Interval | None:
        if axes.axes != self.padded(-2, -1).axes:
            return None
        real = ONE if self.g.dtype(self.mask) == TensorProto.BOOL else REAL
        return real if axes.is_real else ZERO

    def aligned(self, name: str, axes: MaskAxes) -> MaskAxes:
        """Return the same positions in an operand that is broadcast."""
        return axes.within(self.g.shape(name) or ())

    def _compares_equal_tokens(self, node: NodeProto, axes: MaskAxes) -> bool:
        """Whether both operands hold integers of the same token: as a query, and as a key."""
        if axes.twin is None or self.g.dtype(node.input[0]) in FLOATS:
            return False
        first, second = (self._origin(name, self.aligned(name, axes)) for name in node.input)
        return first == second and first is not None

    def _origin(self, value: str, axes: MaskAxes) -> tuple[str, MaskAxes] | None:
        """Return the single element that data movement brings to these positions, or None."""
        node = self.g.producer(value)
        while node is not None and nd.is_op(node, *MOVEMENT):
            value, axes = node.input[0], axes.before(self.g, node)
            node = self.g.producer(value)
        shape = self.g.shape(value)
        if shape is None or any(
            size != 1 and axis - len(shape) not in axes.axes for axis, size in enumerate(shape)
        ):
            return None
        return value, axes

    def _of_constant(self, value: str, axes: MaskAxes) -> Interval | None:
        stored = self.g.const(value)
        if stored is None or stored.size >= _MOST_ELEMENTS:
            return None
        if axes.row is not None and axes.twin is not None:
            stored = np.diagonal(stored, axis1=axes.row, axis2=axes.twin)
        return bounds_of(stored)


def is_bounded(node: NodeProto) -> bool:
    """Whether bounds of the node's result follow from those of its operands."""
    return nd.is_op(node, "Range", *MOVEMENT, *ELEMENTWISE_BOUNDED)


def ancestors(
    g: Graph, value: str, through: Callable[[NodeProto], bool] = lambda _: True
) -> list[str]:
    """Return `value` and the values, other than constants, that it is computed from.

    The walk enters a producer only if `through` holds for it.
    """
    found: dict[str, None] = {}
    pending = [value]
    while pending:
        value = pending.pop()
        if value and value not in found and not g.is_const(value):
            found[value] = None
            producer = g.producer(value)
            if producer is not None and through(producer):
                pending.extend([*producer.input, *g.captures_of(producer)])
    return list(found)
