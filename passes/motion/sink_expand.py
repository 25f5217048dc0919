"""Sink Expands: compute a value before it is repeated, not after.

    f(Expand(x))            Expand(f(x)), for elementwise f
    Reduce(Expand(x))       Expand(Reduce(x)), along axes that are not repeated
    Expand(x) * y           x * y, if that broadcasts to the same shape (`redundant_expand`)

Exporters average the tokens of a text with a mask that is expanded over all features, and divide by
the sum of that. With these rules the mask stays one number per token, and its sum one per text.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto

from passes.analysis.axis_flow import MIXED, axis_flow
from passes.analysis.operands import int_vector
from passes.simplify.canonicalize.slice_concat_pad import redundant_expand
from toolkit.ir import Graph, Shape, TensorType, node as nd
from toolkit.ir.op_traits import ELEMENTWISE, REDUCTIONS
from toolkit.pattern import op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

_expand = op.Expand(var("x"), var("shape")).named("expand")


@rewrite(op.any(*sorted(ELEMENTWISE))(_expand, ...))
def elementwise_of_expand(g: Graph, x: str, shape: str, node: NodeProto) -> str:
    """f(Expand(x)) = Expand(f(x))"""
    before = g.op(node.op_type, x, *node.input[1:], at=node, **nd.attrs(node))
    return _expanded(g, before, shape, node, g.shape(x))


@rewrite(op.any(*sorted(REDUCTIONS))(_expand, ...))
def reduction_of_expand(g: Graph, x: str, shape: str, expand: NodeProto, node: NodeProto) -> str:
    """Reduce(Expand(x)) = Expand(Reduce(x)), along axes that are not repeated"""
    known, repeated = g.shape(x), g.shape(expand.output[0])
    sizes = g.shape(shape)
    if known is None or repeated is None or sizes is None:
        raise MatchFailure("a shape is unknown")
    if not len(known) == len(repeated) == sizes[0]:
        raise MatchFailure("the Expand adds axes")
    flow = axis_flow(g, node)
    if flow is None or not 0 < len(flow.named) < len(known):
        raise MatchFailure("the reduced axes are unknown, or all axes are reduced")
    if any(known[axis] != repeated[axis] for axis in flow.named):
        raise MatchFailure("a reduced axis is repeated")
    reduced = g.op(node.op_type, x, *node.input[1:], at=node, **nd.attrs(node))
    sources = flow.operands[0].sources
    if nd.attr(node, "keepdims", 1):
        ones = g.constant(np.isin(np.arange(len(known)), flow.named), "reduced")
        target = g.op("Where", ones, int_vector(g, [1], "one"), shape, at=node)
    else:
        target = g.op("Gather", shape, int_vector(g, sources, "kept"), at=node, axis=0)
    result_shape = tuple(1 if axis == MIXED else known[axis] for axis in sources)
    return _expanded(g, reduced, target, node, result_shape)


def _expanded(g: Graph, value: str, shape: str, at: NodeProto, own: Shape | None) -> str:
    """Add an Expand of `value`; record its own shape, since other rules need its type."""
    g.learn_type(value, TensorType(g.dtype(at.output[0]), own))
    return g.op("Expand", value, shape, at=at)


RULES = (elementwise_of_expand, reduction_of_expand, redundant_expand)
