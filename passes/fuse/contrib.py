"""Replace onnxruntime's contrib operators, written by other tools, with standard operators.

    Gelu, BiasGelu, FastGelu, QuickGelu
    SkipLayerNormalization(x, skip, w, b, bias)          layer norm of x + skip + bias
    SkipSimplifiedLayerNormalization(x, skip, w, bias)   the same with an rms norm
    SimplifiedLayerNormalization(x, w)                   rms norm

The skip kernels take ten times as long as an Add and a norm on the CPU.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.analysis.operands import extra_outputs_used, given, scalar
from passes.fuse.norm.norm_writer import LAYER, RMS
from passes.fuse.typed_op import typed_op
from toolkit.ir import Graph, node as nd
from toolkit.pattern import op, var
from toolkit.rewriting.rule import MatchFailure, rewrite

x, bias, skip, scale = var("x"), var("bias"), var("skip"), var("scale")
contrib = op("com.microsoft")

_QUICK_GELU_ALPHA = 1.702
_SKIP_EPSILON = 1e-12
_EPSILON = 1e-5
"""Default values of the attributes `alpha` and `epsilon`."""


@rewrite(contrib.Gelu(x), contrib.BiasGelu(x, bias), contrib.FastGelu(x, bias | None), opset=20)
def contrib_gelu(g: Graph, x: str, bias: str | None, node: NodeProto) -> str:
    """gelu(x + bias), for FastGelu by tanh; the bias is optional."""
    biased = g.op("Add", x, bias, at=node) if bias else x
    approximate = "tanh" if node.op_type == "FastGelu" else None
    return g.op("Gelu", biased, at=node, approximate=approximate)


@rewrite(contrib.QuickGelu(x))
def quick_gelu(g: Graph, x: str, node: NodeProto) -> str | None:
    """x sigmoid(alpha x)"""
    alpha, dtype, scaled = nd.attr(node, "alpha", _QUICK_GELU_ALPHA), g.dtype(x), x
    if alpha != 1:
        if not dtype:
            return None
        scaled = g.op("Mul", x, scalar(g, alpha, dtype, "alpha"), at=node)
    return g.op("Mul", x, g.op("Sigmoid", scaled, at=node), at=node)


@rewrite(contrib.SkipLayerNormalization(x, skip, ...), opset=17)
def skip_layer_norm(g: Graph, x: str, skip: str, node: NodeProto) -> tuple[str | None, ...]:
    """LayerNormalization(x + skip + bias)"""
    return _skip_norm(g, LAYER, [x, skip, given(node, 4)], [given(node, 2), given(node, 3)], node)


@rewrite(contrib.SkipSimplifiedLayerNormalization(x, skip, ...), opset=23)
def skip_rms_norm(g: Graph, x: str, skip: str, node: NodeProto) -> tuple[str | None, ...]:
    """RMSNormalization(x + skip + bias)"""
    return _skip_norm(g, RMS, [x, skip, given(node, 3)], [given(node, 2)], node)


@rewrite(
    op.SimplifiedLayerNormalization(x, scale),
    contrib.SimplifiedLayerNormalization(x, scale),
    opset=23,
)
def simplified_layer_norm(g: Graph, x: str, scale: str, node: NodeProto) -> str:
    """RMSNormalization, under the name it had before it became standard"""
    if extra_outputs_used(g, node):
        raise MatchFailure("its inverse root output is used")
    if g.dtype(x) != g.dtype(scale) or not g.dtype(x):
        raise MatchFailure("operand and scale differ in element type")
    axis, epsilon = nd.attr(node, "axis", -1), nd.attr(node, "epsilon", _EPSILON)
    return g.op(RMS, x, scale, at=node, axis=axis, epsilon=epsilon)


def _skip_norm(
    g: Graph, norm: str, terms: list[str], parameters: list[str], node: NodeProto
) -> tuple[str | None, ...]:
    """Return replacements for the outputs: norm, mean, inverse deviation (both unused), sum."""
    if any(extra and not g.is_unused(extra) for extra in node.output[1:3]):
        raise MatchFailure("its mean or inverse deviation output is used")
    total, *rest = (term for term in terms if term)
    for term in rest:
        total = typed_op(g, g.type(total), "Add", total, term, at=node)
    epsilon = nd.attr(node, "epsilon", _SKIP_EPSILON)
    inputs = nd.without_blanks([total, *parameters])
    outputs = (g.op(norm, *inputs, at=node, axis=-1, epsilon=epsilon), None, None, total)
    return tuple(new if old else None for new, old in zip(outputs, node.output, strict=False))


ACTIVATIONS = (contrib_gelu, quick_gelu)

NORMS = (skip_layer_norm, skip_rms_norm, simplified_layer_norm)
