"""Identity, and Shape of values that need not be computed for it."""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.operands import ints, slice_range
from toolkit.ir import Graph, node as nd
from toolkit.ir.op_traits import ELEMENTWISE
from toolkit.pattern import op, var
from toolkit.rewriting.rule import rewrite

x = var("x")


@rewrite(op.Identity(x))
def identity(g: Graph, x: str, node: NodeProto) -> str | None:
    """Remove an Identity, unless it names a graph output after an input or another output."""
    if g.is_output(node.output[0]) and (g.producer(x) is None or g.is_output(x)):
        return None
    return x


@rewrite(op.Shape(op.any(*sorted(ELEMENTWISE))(x)))
def shape_of_elementwise(g: Graph, x: str, node: NodeProto) -> str:
    """Take the shape of the operand of an elementwise operator that has no other users."""
    return g.op("Shape", x, at=node, **nd.attrs(node))


whole_shape = op.Shape(x).shared().when(lambda g, value: not _is_part(g, value), "all of the shape")


@rewrite(op.any("Gather", "Slice")(whole_shape, ...), opset=15)
def part_of_shape(g: Graph, x: str, node: NodeProto) -> str | None:
    """Select consecutive sizes with start and end of the Shape, which may count from the back."""
    places = _taken(g, node)
    if not places or places != list(range(places[0], places[-1] + 1)):
        return None
    if places[0] < 0 <= places[-1]:
        return None
    end = places[-1] + 1 or None  # -1 is the last size: no end
    return g.op("Shape", x, at=node, start=places[0], end=end)


def _is_part(g: Graph, value: str) -> bool:
    producer = g.producer(value)
    return producer is not None and bool(nd.attrs(producer))


def _taken(g: Graph, node: NodeProto) -> list[int] | None:
    """Return the elements of a vector that a Gather or Slice takes, or None.

    A Gather may count them from the back.
    """
    if nd.is_op(node, "Gather"):
        return ints(g, node.input[1]) if g.rank(node.input[1]) == 1 else None
    found = slice_range(g, node)
    return None if found is None else list(range(*found[1:]))


RULES = (identity, shape_of_elementwise, part_of_shape)
