"""Values that an Expand repeats: computed before they are repeated, and not repeated in vain.

    f(Expand(x))            Expand(f(x)), for what works on each element by itself
    Reduce(Expand(x))       Expand(Reduce(x)), along axes that are not repeated
    Expand(x) * y           x * y, where that broadcasts to the same (`redundant_expand`)

That is how a mask is spread over the features of a text, summed, and divided by, when its tokens
are averaged: with this it is a number a token, and one a text.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.analysis.axes import positive_axes
from passes.analysis.operands import int_operand, int_vector
from passes.simplify.canonicalize.slice_concat_pad import redundant_expand
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.op_traits import ELEMENTWISE, REDUCTIONS
from toolkit.ir.tensor_type import Shape, TensorType
from toolkit.pattern import op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

_repeated = op.Expand(var("x"), var("shape")).named("expand")


@rewrite(op.any(*sorted(ELEMENTWISE))(_repeated, ...))
def elementwise_of_repeated(g: Graph, x: str, shape: str, node: NodeProto) -> str:
    """f(Expand(x)) = Expand(f(x))"""
    before = g.op(node.op_type, x, *node.input[1:], at=node, **nd.attrs(node))
    return _repeated_to(g, before, shape, node, g.shape(x))


@rewrite(op.any(*sorted(REDUCTIONS))(_repeated, ...))
def reduction_of_repeated(g: Graph, x: str, shape: str, expand: NodeProto, node: NodeProto) -> str:
    """Reduce(Expand(x)) = Expand(Reduce(x)), along axes that are not repeated"""
    known, repeated = g.shape(x), g.shape(expand.output[0])
    sizes = g.shape(shape)
    if known is None or repeated is None or sizes is None:
        raise MatchFailure("its shapes are not known")
    if not len(known) == len(repeated) == sizes[0]:
        raise MatchFailure("the Expand adds axes")
    axes = positive_axes(int_operand(g, node, "axes", 1), len(known))
    if not axes:
        raise MatchFailure("it is not known which axes are reduced, or all are")
    if any(known[axis] != repeated[axis] for axis in axes):
        raise MatchFailure("a reduced axis is repeated")
    reduced = g.op(node.op_type, x, *node.input[1:], at=node, **nd.attrs(node))
    if nd.attr(node, "keepdims", 1):
        left: Shape = tuple(1 if axis in axes else size for axis, size in enumerate(known))
        ones = g.constant(np.isin(np.arange(len(known)), axes), "reduced")
        target = g.op("Where", ones, int_vector(g, [1], "one"), shape, at=node)
    else:
        kept = [axis for axis in range(len(known)) if axis not in axes]
        left = tuple(known[axis] for axis in kept)
        target = g.op("Gather", shape, int_vector(g, kept, "kept"), at=node, axis=0)
    return _repeated_to(g, reduced, target, node, left)


def _repeated_to(g: Graph, value: str, shape: str, at: NodeProto, before: Shape | None) -> str:
    """The value, of a shape that may be known before, repeated; other rules go by its type."""
    g.learn_type(value, TensorType(g.dtype(at.output[0]), before))
    return g.op("Expand", value, shape, at=at)


RULES = (elementwise_of_repeated, reduction_of_repeated, redundant_expand)
