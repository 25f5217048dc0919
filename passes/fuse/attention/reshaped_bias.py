"""A bias that is added to the scores in another shape of theirs.

    Reshape(Reshape(x) + a + b) = x + Reshape(a + b)

Relative positions on images are like this: the scores of all pixels with all pixels as [..., rows,
columns, rows, columns], with one term for the rows and one for the columns (SAM, ViTDet, MViT).
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.operands import broadcast, reshape, reshape_target
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import TensorType
from toolkit.pattern import op, total, var
from toolkit.rewriting.match_failure import Miss
from toolkit.rewriting.rule import rewrite

_scores = op.Reshape(var("x"), ...).named("view")


@rewrite(
    op.Softmax(op.Reshape(total(_scores, var("a"), var("b")), ...).named("back")),
    op.Softmax(op.Reshape(total(_scores, var("a")), ...).named("back")),
)
def bias_in_another_shape(
    g: Graph, x: str, a: str, b: str | None, view: NodeProto, back: NodeProto, node: NodeProto
) -> str:
    """softmax(reshape(reshape(x) + a + b))"""
    inner, outer = g.shape(view.output[0]), g.shape(x)
    if outer is None or inner is None or g.shape(back.output[0]) != outer:
        raise Miss(f"{nd.label(back)} does not give the shape that {nd.label(view)} has changed")
    shapes = [shape for shape in (g.shape(name) for name in (a, b) if name) if shape is not None]
    if len(shapes) != (2 if b else 1) or broadcast(*shapes) != inner:
        raise Miss("what is added is smaller than the scores")
    target = reshape_target(inner, outer)
    if target is None:
        raise Miss(f"the sizes of '{x}' are not known")
    term = g.op("Add", a, b, at=node) if b else a
    g.learn_type(term, TensorType(g.dtype(x), inner))
    bias = reshape(g, term, target, at=node)
    g.learn_type(bias, TensorType(g.dtype(x), outer))
    whole = g.op("Add", x, bias, at=node)
    g.learn_type(whole, TensorType(g.dtype(x), outer))
    return g.op("Softmax", whole, at=node, **nd.attrs(node))
