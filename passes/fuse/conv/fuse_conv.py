"""What goes into a Conv: biases, batch normalization, scales and shifts on either side of it.

A convolution is linear in its weights, so with scale s and shift t by channel

    s conv(x, W, b) + t  =  conv(x, s W, s b + t)
    conv(s x + t, W, b)  =  conv(x, W s, b + W t)      where no padding mixes zeros with the shifts

in any spelling of the two (`affine`), for any number of dimensions, strides, dilations and groups,
and for ConvTranspose with its other layout of the weights. A Conv whose result is read elsewhere,
too, stays as it is: none is computed twice. Weights that others read are copied only when small.

Runs behind the fusion of activations and norms: the factor that ends a GELU or HardSwish spelled
out (x clip(x + 3, 0, 6) / 6) looks like any other, and would be taken away from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onnx import NodeProto

from passes.fuse.conv import batch_norm
from passes.fuse.conv import padding as conv_padding
from passes.fuse.conv import space_to_depth as conv_stem
from passes.fuse.linear.affine import (
    bypass,
    chain_after,
    chain_before,
    may_copy,
    read_from,
    rounded,
    source_of,
)
from passes.fuse.linear.weights import Kernel
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import FLOATS
from toolkit.pattern import const, op, var
from toolkit.rewriting.rule import Miss, apply_rules, rewrite
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

conv = op.any("Conv", "ConvTranspose")(var("x"), const("w", dtype=tuple(FLOATS)), ...)


@rewrite(conv)
def affine_after_conv(g: Graph, node: NodeProto) -> str:
    """s conv(x, W, b) + t = conv(x, s W, s b + t)"""
    kernel = Kernel.of(g, node)
    chain = chain_after(g, node.output[0], kernel.outputs)
    if not chain:
        raise Miss("no constant by channel is applied to its result and nothing else")
    for total, last in reversed(chain):
        if kernel.put(g, kernel.behind(total)):
            return bypass(g, node, last)
    raise Miss(_refusal(g, node))


@rewrite(conv)
def affine_before_conv(g: Graph, node: NodeProto) -> str:
    """conv(s x + t, W, b) = conv(x, W s, b + W t), the shift only without padding"""
    kernel = Kernel.of(g, node)
    chain = chain_before(g, node.input[0], kernel.inputs)
    if not chain:
        raise Miss("no constant by channel is applied to its input for it alone")
    fitting = [link for link in chain if not (link[0].shifts and kernel.is_padded)]
    for total, last in reversed(fitting):
        if kernel.put(g, kernel.before(total)):
            return read_from(g, node, source_of(g, last))
    raise Miss(_refusal(g, node) if fitting else "its padding is not shifted with the rest")


@rewrite(conv)
def affine_before_padded_conv(g: Graph, node: NodeProto) -> str:
    """conv(s x + t, W, b) = conv(x + t / s, W s, b) with padding: two nodes and more become one"""
    kernel = Kernel.of(g, node)
    chain = chain_before(g, node.input[0], kernel.inputs)
    if len(chain) < 2 or not kernel.is_padded:
        raise Miss("no two constants by channel are applied to its input for it alone")
    for total, last in reversed(chain[1:]):
        if not total.shifts or not total.scale.all():
            continue
        offset = rounded(total.shift / total.scale, kernel.weight)
        if offset is None or not kernel.put(g, (kernel.before(total)[0], None)):
            continue
        if offset.ndim:
            offset = offset.reshape(-1, *[1] * len(kernel.taps))
        source = source_of(g, last)
        return read_from(g, node, g.op("Add", source, g.constant(offset, "shift"), at=last))
    raise Miss(_refusal(g, node))


def _refusal(g: Graph, node: NodeProto) -> str:
    if not may_copy(g, node.input[1]):
        return "its weights have other readers, and are too large to be copied"
    return "its element type cannot hold the weights"


RULES = (
    affine_after_conv,
    affine_before_conv,
    affine_before_padded_conv,
    *batch_norm.RULES,
    *conv_padding.RULES,
    *conv_stem.RULES,
)


@dataclass(frozen=True, slots=True)
class FuseConv:
    """Take biases, batch normalization, scales, padding and space-to-depth into Conv."""

    name: ClassVar[str] = "fuse-conv"
    tolerance: ClassVar[Tolerance] = FLOAT

    def run(self, model: Model, ctx: Context) -> None:
        apply_rules(model, RULES, ctx)
