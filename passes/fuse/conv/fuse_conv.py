"""Fold biases, batch normalization, scales and shifts on either side of a Conv into its weights.

Scales and shifts come in many forms (see `affine`); Conv and ConvTranspose of any rank, with groups
and dilations, absorb them (see `weights`), except for a shift before a padded Conv. A Conv whose
result has other users is left alone: none is computed twice. Shared weights are copied only when
small.

Runs after the fusion of activations and norms: otherwise the factor at the end of a GELU or
HardSwish, x clip(x + 3, 0, 6) / 6, would be folded and the activation would no longer match.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.fuse.conv import batch_norm, padding, space_to_depth
from passes.fuse.linear.affine import Affine, chain_before, rewire_input, rounded, variable_operand
from passes.fuse.linear.weights import LinearWeights, absorb_after, absorb_before, why_unchanged
from toolkit.ir import FLOATS, Graph, node as nd
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import MatchFailure, RulePass, rewrite

conv = op.any("Conv", "ConvTranspose")(var("x"), const("w", dtype=tuple(FLOATS)), ...)


@rewrite(conv)
def affine_after_conv(g: Graph, node: NodeProto) -> str:
    """s conv(x, W, b) + t = conv(x, s W, s b + t)"""
    return absorb_after(g, LinearWeights.of(g, node))


@rewrite(conv)
def affine_before_conv(g: Graph, node: NodeProto) -> str:
    """conv(s x + t, W, b) = conv(x, W s, b + W t), with the shift only without padding"""
    weights = LinearWeights.of(g, node)

    def obstacle(total: Affine, _: int) -> str:
        padded = total.shifts and _is_padded(weights)
        return "its padding is not shifted with the rest" if padded else ""

    return absorb_before(g, weights, obstacle)


@rewrite(conv)
def affine_before_padded_conv(g: Graph, node: NodeProto) -> str:
    """conv(s x + t, W, b) = conv(x + t / s, W s, b) with padding: two or more nodes become one"""
    weights = LinearWeights.of(g, node)
    chain = chain_before(g, node.input[0], weights.inputs)
    if len(chain) < 2 or not _is_padded(weights):
        raise MatchFailure("fewer than two per-channel constants are applied to its input alone")
    for total, last in reversed(chain[1:]):
        if not total.shifts or not total.scale.all():
            continue
        offset = rounded(total.shift / total.scale, weights.stored)
        if offset is None or not weights.put_scaled(g, (weights.before(total)[0], weights.bias)):
            continue
        if offset.ndim:
            offset = offset.reshape(-1, *[1] * (weights.rank - 2))
        source = variable_operand(g, last)
        return rewire_input(g, node, g.op("Add", source, g.constant(offset, "shift"), at=last))
    raise MatchFailure(why_unchanged(g, node))


def _is_padded(weights: LinearWeights) -> bool:
    """Return whether some output covers fewer elements of the input than others."""
    node, taps = weights.node, weights.stored.shape[2:]
    if nd.is_op(node, "ConvTranspose"):
        sizes = (*taps, *nd.attr(node, "strides", ()))
        extents = (*nd.attr(node, "pads", ()), *nd.attr(node, "output_padding", ()))
        given_shape = nd.attr(node, "output_shape") is not None
        return any(n != 1 for n in sizes) or any(extents) or given_shape
    auto = nd.attr(node, "auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return any(size != 1 for size in taps)
    return auto != "VALID" and any(nd.attr(node, "pads", ()))


RULES = (
    affine_after_conv,
    affine_before_conv,
    affine_before_padded_conv,
    *batch_norm.RULES,
    *padding.RULES,
    *space_to_depth.RULES,
)


class FuseConv(RulePass):
    """Fold biases, batch normalization, scales, padding and space-to-depth into Conv."""

    name = "fuse-conv"
    rules = RULES
