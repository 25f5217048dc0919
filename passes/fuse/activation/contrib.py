"""Activations that other tools wrote as contrib operators of onnxruntime."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, helper

from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.pattern import op, var
from toolkit.rewriting.rule import rewrite

x = var("x")
bias = var("bias")
contrib = op("com.microsoft")

_QUICK = 1.702
"""The `alpha` of a QuickGelu that states none."""


@rewrite(contrib.Gelu(x), opset=20)
def contrib_gelu(g: Graph, x: str, node: NodeProto) -> str:
    return g.op("Gelu", x, at=node)


@rewrite(contrib.BiasGelu(x, bias), opset=20)
def bias_gelu(g: Graph, x: str, bias: str, node: NodeProto) -> str:
    """gelu(x + bias)"""
    return g.op("Gelu", g.op("Add", x, bias, at=node), at=node)


@rewrite(contrib.FastGelu(x, bias | None), opset=20)
def fast_gelu(g: Graph, x: str, bias: str | None, node: NodeProto) -> str:
    """gelu(x + bias) by tanh; the bias may be left out."""
    biased = g.op("Add", x, bias, at=node) if bias else x
    return g.op("Gelu", biased, at=node, approximate="tanh")


@rewrite(contrib.QuickGelu(x))
def quick_gelu(g: Graph, x: str, node: NodeProto) -> str | None:
    """x sigmoid(alpha x)"""
    alpha, dtype = nd.attr(node, "alpha", _QUICK), g.dtype(x)
    scaled = x
    if alpha != 1:
        if not dtype:
            return None
        factor = np.array(alpha, dtype=helper.tensor_dtype_to_np_dtype(dtype))
        scaled = g.op("Mul", x, g.constant(factor, "alpha"), at=node)
    return g.op("Mul", x, g.op("Sigmoid", scaled, at=node), at=node)


RULES = (contrib_gelu, bias_gelu, fast_gelu, quick_gelu)
