"""Replace activations whose kernels are scalar loops by compositions of vectorized kernels.

All rules are for float32 and agree with the operator to a few units in the last place.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto

from passes.analysis.operands import scalar
from passes.fuse.activation.quick_gelu import scaled_silu
from passes.lower.cost_query import CostQuery, require_float
from toolkit.ir import Graph, node as nd
from toolkit.pattern import const, op, product, var
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import Rule, rewrite

x = var("x")
_MISH_IS_LINEAR = 20.0
"""From this x on, tanh(softplus(x)) is 1 in float32, and exp(x)^2 does not overflow."""


def rules(costs: CostQuery) -> tuple[Rule, ...]:
    @rewrite(op.Mish(x), opset=18)
    def mish_by_exp(g: Graph, x: str, node: NodeProto) -> str:
        """x tanh(log(1 + e)) = x n / (n + 2), with e = exp(x) and n = e (e + 2)."""
        require_float(g, x)
        costs.require("mish", "rational", g, x)
        two = _number(g, 2)
        e = g.op("Exp", g.op("Min", x, _number(g, _MISH_IS_LINEAR), at=node), at=node)
        n = g.op("Mul", e, g.op("Add", e, two, at=node), at=node)
        share = g.op("Div", n, g.op("Add", n, two, at=node), at=node)
        return g.op("Mul", x, share, at=node)

    @rewrite(op.Softplus(x))
    def softplus_by_exp(g: Graph, x: str, node: NodeProto) -> str:
        """log(1 + exp(x)) = relu(x) + log(1 + exp(-|x|)), which does not overflow."""
        require_float(g, x)
        costs.require("softplus", "exp", g, x)
        e = g.op("Exp", g.op("Neg", g.op("Abs", x, at=node), at=node), at=node)
        low = g.op("Log", g.op("Add", e, _number(g, 1), at=node), at=node)
        return g.op("Add", g.op("Relu", x, at=node), low, at=node)

    @rewrite(op.Elu(x))
    def elu_by_exp(g: Graph, x: str, node: NodeProto) -> str:
        """x above 0, alpha (exp(x) - 1) below: for alpha <= 1 that is the larger of the two."""
        require_float(g, x)
        alpha = float(nd.attr(node, "alpha", 1.0))
        if not 0 < alpha <= 1:
            raise MatchFailure("the maximum equals Elu for 0 < alpha <= 1 only")
        costs.require("elu", "exp", g, x)
        e = g.op("Exp", g.op("Min", x, _number(g, 0), at=node), at=node)
        low = g.op("Sub", e, _number(g, 1), at=node)
        if alpha != 1:
            low = g.op("Mul", low, _number(g, alpha), at=node)
        return g.op("Max", x, low, at=node)

    @rewrite(op.PRelu(x, const("slope")), opset=9)
    def prelu_by_max(g: Graph, x: str, slope: str, node: NodeProto) -> str:
        """x above 0, slope x below: LeakyRelu for one slope; max(x, slope x) for 0 < slope <= 1;
        relu(x) + slope min(x, 0) for any."""
        require_float(g, x)
        slopes = g.const(slope)
        if slopes is None or not slopes.size or not np.all(np.isfinite(slopes)):
            raise MatchFailure("a slope is not finite")
        if slopes.min() == slopes.max():
            costs.require("prelu-scalar", "leaky-relu", g, x)
            return g.op("LeakyRelu", x, at=node, alpha=float(slopes.min()))
        if slopes.min() > 0 and slopes.max() <= 1:
            after_conv = nd.is_op(g.producer(x), "Conv")
            costs.require("conv-prelu" if after_conv else "prelu", "max", g, x)
            return g.op("Max", x, g.op("Mul", x, slope, at=node), at=node)
        costs.require("prelu-any", "relu", g, x)
        below = g.op("Mul", g.op("Min", x, _number(g, 0), at=node), slope, at=node)
        return g.op("Add", g.op("Relu", x, at=node), below, at=node)

    @rewrite(product(x, op.Sigmoid(product(x, 1.702))), opset=7)
    def quick_gelu_as_silu(g: Graph, x: str, node: NodeProto) -> str:
        """x sigmoid(a x) = z sigmoid(z) / a with z = a x: the runtime has a fast path for a = 1."""
        require_float(g, x)
        costs.require("quick-gelu", "silu", g, x)
        return scaled_silu(g, x, 1.702, node)

    return mish_by_exp, softplus_by_exp, elu_by_exp, prelu_by_max, quick_gelu_as_silu


def _number(g: Graph, value: float) -> str:
    return scalar(g, value, TensorProto.FLOAT, "number")
