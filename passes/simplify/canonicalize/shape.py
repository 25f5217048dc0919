"""Identity, and Shape of what need not be computed for it."""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.operands import int_operand, ints
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.op_traits import ELEMENTWISE
from toolkit.pattern import op, var
from toolkit.rewriting.rule import rewrite

x = var("x")


@rewrite(op.Identity(x))
def identity(g: Graph, x: str, node: NodeProto) -> str | None:
    """Gone, but for one that gives a graph output the name of another value of the interface."""
    if g.is_output(node.output[0]) and (g.producer(x) is None or g.is_output(x)):
        return None
    return x


@rewrite(op.Shape(op.any(*sorted(ELEMENTWISE))(x)))
def shape_of_elementwise(g: Graph, x: str, node: NodeProto) -> str:
    """What works element by element need not run for its shape (if nothing else wants it)."""
    return g.op("Shape", x, at=node, **nd.attrs(node))


whole_shape = op.Shape(x).shared().when(lambda g, value: not _is_part(g, value), "all of the shape")


@rewrite(op.any("Gather", "Slice")(whole_shape, ...), opset=15)
def part_of_shape(g: Graph, x: str, node: NodeProto) -> str | None:
    """Neighbouring sizes: Shape itself takes a start and an end, which may count from the back."""
    places = _places(g, node)
    if not places or places != list(range(places[0], places[-1] + 1)):
        return None
    if places[0] < 0 <= places[-1]:
        return None
    end = places[-1] + 1 or None  # up to the last, counted from the back: no end
    return g.op("Shape", x, at=node, start=places[0], end=end)


def _is_part(g: Graph, value: str) -> bool:
    producer = g.producer(value)
    return producer is not None and bool(nd.attrs(producer))


def _places(g: Graph, node: NodeProto) -> list[int] | None:
    """The elements of a vector that a Gather or Slice takes, each counted from one end."""
    if nd.is_op(node, "Gather"):
        return ints(g, node.input[1]) if g.rank(node.input[1]) == 1 else None
    starts, ends = (int_operand(g, node, name, i) for i, name in ((1, "starts"), (2, "ends")))
    steps = int_operand(g, node, "steps", 4, absent=[1])
    rank = g.shape(node.input[0])
    if starts is None or ends is None or steps != [1] or rank is None:
        return None
    size = rank[0]
    return list(range(size))[starts[0] : ends[0]] if isinstance(size, int) else None


RULES = (identity, shape_of_elementwise, part_of_shape)
