"""Softmax of a flattened matrix.

    Reshape(Softmax(Flatten(x)), shape of x) = Softmax(x)

Before opset 13, Softmax flattened its operand; the conversion to newer opsets makes that explicit.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.operands import same_shape
from toolkit.ir import Graph, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.rule import rewrite

_flat = op.any("Flatten", "Reshape")(var("x"), ...).shared().named("flat")
_softmax = op.any("Softmax", "LogSoftmax", "Hardmax")(_flat).named("softmax")


@rewrite(op.Reshape(_softmax, ...), opset=13)
def softmax_of_rows(
    g: Graph, x: str, flat: NodeProto, softmax: NodeProto, node: NodeProto
) -> str | None:
    """Apply a Softmax along the last axis to the unflattened operand."""
    rows, shape = g.shape(flat.output[0]), g.shape(x)
    if not rows or not shape or not same_shape(g, x, node.output[0]) or rows[-1] != shape[-1]:
        return None
    if nd.attr(softmax, "axis", -1) not in (-1, len(rows) - 1):
        return None
    return g.op(softmax.op_type, x, at=node, axis=-1)


RULES = (softmax_of_rows,)
