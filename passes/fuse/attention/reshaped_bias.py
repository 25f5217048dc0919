"""Move a bias that is added to reshaped scores before the Reshape.

    Reshape(Reshape(x) + a + b) = x + Reshape(a + b)

Relative positions on images are added like this: the scores as [..., rows, columns, rows, columns],
with one term for the rows and one for the columns (SAM, ViTDet, MViT).
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.operands import broadcast, reshape, reshape_target
from passes.fuse.typed_op import typed_op
from toolkit.ir import Graph, node as nd
from toolkit.pattern import op, total, var
from toolkit.rewriting.rule import MatchFailure, rewrite

_scores = op.Reshape(var("x"), ...).named("view")


@rewrite(
    op.Softmax(op.Reshape(total(_scores, var("a"), var("b")), ...).named("back")),
    op.Softmax(op.Reshape(total(_scores, var("a")), ...).named("back")),
)
def bias_in_another_shape(
    g: Graph, x: str, a: str, b: str | None, view: NodeProto, back: NodeProto, node: NodeProto
) -> str:
    """softmax(Reshape(Reshape(x) + a + b)) = softmax(x + Reshape(a + b))"""
    inner, outer = g.shape(view.output[0]), g.shape(x)
    if outer is None or inner is None or g.shape(back.output[0]) != outer:
        raise MatchFailure(f"{nd.label(back)} does not undo {nd.label(view)}")
    shapes = [shape for shape in (g.shape(name) for name in (a, b) if name) if shape is not None]
    if len(shapes) != (2 if b else 1) or broadcast(*shapes) != inner:
        raise MatchFailure("the bias is smaller than the scores")
    target = reshape_target(inner, outer)
    if target is None:
        raise MatchFailure(f"no constant target of a Reshape expresses the shape of '{x}'")
    bias = reshape(g, g.op("Add", a, b, at=node) if b else a, target, at=node, shape=outer)
    biased = typed_op(g, g.type(x), "Add", x, bias, at=node)
    return g.op("Softmax", biased, at=node, **nd.attrs(node))
