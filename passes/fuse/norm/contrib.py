"""Norms that other tools wrote as contrib operators of onnxruntime.

    SkipLayerNormalization(x, skip, w, b, bias)      layer norm of x + skip + bias
    SkipSimplifiedLayerNormalization(x, skip, w, bias)   the same with an rms norm
    SimplifiedLayerNormalization(x, w)               rms norm

The skip kernels take ten times as long as an Add and a norm on the CPU.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.operands import given
from passes.fuse.norm.norm_writer import LAYER, RMS
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.pattern import op, var
from toolkit.rewriting.rule import Miss, rewrite

x = var("x")
contrib = op("com.microsoft")

_SKIP_EPSILON = 1e-12
_EPSILON = 1e-5
"""What the operators take when none is stated."""


@rewrite(contrib.SkipLayerNormalization(x, var("skip"), ...), opset=17)
def skip_layer_norm(g: Graph, x: str, skip: str, node: NodeProto) -> tuple[str | None, ...]:
    """LayerNormalization(x + skip + bias)"""
    added = _sum(g, [x, skip, given(node, 4)], node)
    parameters = nd.without_blanks([added, given(node, 2), given(node, 3)])
    epsilon = nd.attr(node, "epsilon", _SKIP_EPSILON)
    result = g.op(LAYER, *parameters, at=node, axis=-1, epsilon=epsilon)
    return _outputs(g, node, result, added)


@rewrite(contrib.SkipSimplifiedLayerNormalization(x, var("skip"), ...), opset=23)
def skip_rms_norm(g: Graph, x: str, skip: str, node: NodeProto) -> tuple[str | None, ...]:
    """RMSNormalization(x + skip + bias)"""
    added = _sum(g, [x, skip, given(node, 3)], node)
    epsilon = nd.attr(node, "epsilon", _SKIP_EPSILON)
    result = g.op(RMS, added, given(node, 2), at=node, axis=-1, epsilon=epsilon)
    return _outputs(g, node, result, added)


@rewrite(
    op.SimplifiedLayerNormalization(x, var("scale")),
    contrib.SimplifiedLayerNormalization(x, var("scale")),
    opset=23,
)
def simplified_layer_norm(g: Graph, x: str, scale: str, node: NodeProto) -> str:
    """RMSNormalization, by the name that it had before it became standard"""
    if any(not g.is_unused(extra) for extra in node.output[1:] if extra):
        raise Miss("the inverse of the root is used too")
    if g.dtype(x) != g.dtype(scale) or not g.dtype(x):
        raise Miss("the scale is of another type")
    axis, epsilon = nd.attr(node, "axis", -1), nd.attr(node, "epsilon", _EPSILON)
    return g.op(RMS, x, scale, at=node, axis=axis, epsilon=epsilon)


def _sum(g: Graph, terms: list[str], node: NodeProto) -> str:
    """The terms, added up; each sum is of the type of the first."""
    added, *rest = (term for term in terms if term)
    known = g.type(added)
    for term in rest:
        added = g.op("Add", added, term, at=node)
        if known is not None:
            g.learn_type(added, known)
    return added


def _outputs(g: Graph, node: NodeProto, result: str, added: str) -> tuple[str | None, ...]:
    """What takes the place of the node's outputs: the norm, two that must be unused, the sum."""
    for extra in node.output[1:3]:
        if extra and not g.is_unused(extra):
            raise Miss("the mean or the inverse deviation is used too")
    found = (result, None, None, added)
    return tuple(new if old else None for new, old in zip(found, node.output, strict=False))


RULES = (skip_layer_norm, skip_rms_norm, simplified_layer_norm)
