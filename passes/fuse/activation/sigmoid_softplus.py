"""Fuse Sigmoid, Softplus, Elu and the activations built from them.

    Sigmoid      1 / (1 + exp(-x)),  exp(x) / (1 + exp(x)),  (1 + tanh(x / 2)) / 2
    Swish        x / (1 + exp(-x)) as Mul(x, Sigmoid(x)): no standard operator before opset 24
    HardSigmoid  clip(a x + b, 0, 1)
    HardSwish    x clip(x + 3, 0, 6) / 6
    Softplus     log(1 + exp(x))
    Mish         x tanh(softplus(x))
    Elu          x where x > 0 else a (exp(x) - 1)

Where exp overflows, the formulas give inf or NaN, but the operators the correct limit. On
onnxruntime's CPU kernels, Softplus and Elu are 2 to 5 times slower than their formulas: they are
only written for the target `onnx`.
"""

from __future__ import annotations

import math

from onnx import NodeProto, TensorProto

from passes.analysis.operands import scalar
from passes.fuse.activation.relu_clip import SINGLE_AND_HALF, negative, positive, require_type
from toolkit.ir import FLOATS, Graph
from toolkit.pattern import number, op, product, total, var
from toolkit.rewriting.rule import MatchFailure, rewrite

x = var("x")
exp_x = op.Exp(x)
one_plus_decay = total(op.Exp(product(x, number("rate", where=lambda rate: rate < 0))), 1)


# -- sigmoids


@rewrite(
    1 / one_plus_decay,
    op.Reciprocal(one_plus_decay),
    exp_x / total(exp_x, 1),
    product(0.5, op.Tanh(product(x, 0.5)) + 1),
    total(product(0.5, op.Tanh(product(x, 0.5))), 0.5),
    var("a") / one_plus_decay,
)
def sigmoid(g: Graph, x: str, rate: float | None, a: str | None, node: NodeProto) -> str:
    """1 / (1 + exp(-x)), and a / (1 + exp(-x)) = a sigmoid(x), a Swish for a = x"""
    dtype = require_type(g, x, FLOATS)
    if rate is not None and rate != -1:
        x = g.op("Mul", x, scalar(g, -rate, dtype, "factor"), at=node)
    result = g.op("Sigmoid", x, at=node)
    return g.op("Mul", a, result, at=node) if a else result


# -- hard sigmoids

a, b, top = number("a"), number("b"), number("top")
slope = number("a", where=lambda a: a != 1)
"""A slope of 1 would leave an inner slope unmatched."""


@rewrite(
    product(op.Clip(total(x, b), 0, top), slope),
    op.Clip(product(total(x, b), slope), 0, 1),
    op.Clip(total(product(x, a), number("shift", where=lambda shift: shift != 0)), 0, 1),
)
def hard_sigmoid(
    g: Graph,
    x: str,
    a: float,
    b: float | None,
    top: float | None,
    shift: float | None,
    node: NodeProto,
) -> str:
    """clip(x + b, 0, 1 / a) a = clip(a (x + b), 0, 1) = clip(a x + shift, 0, 1)"""
    slack = 1e-5 if g.dtype(x) == TensorProto.FLOAT else 1e-3  # 1 / 6 rounded to half precision
    if top is not None and not (top > 0 and math.isclose(a * top, 1, rel_tol=slack)):
        raise MatchFailure(f"the maximum is {a * top:g}, not 1")
    require_type(g, x, SINGLE_AND_HALF)
    beta = a * (b or 0.0) if shift is None else shift
    return g.op("HardSigmoid", x, at=node, alpha=a, beta=beta)


@rewrite(
    product(x, 1 / 6, op.Clip(total(x, 3), 0, 6)),
    product(x, op.HardSigmoid(x, alpha=1 / 6, beta=0.5)),
    opset=14,
)
def hard_swish(g: Graph, x: str, node: NodeProto) -> str:
    """x clip(x + 3, 0, 6) / 6"""
    require_type(g, x, SINGLE_AND_HALF)
    return g.op("HardSwish", x, at=node)


# -- softplus

log_of_one_plus_exp = op.Log(total(exp_x, 1))
_FAR = 15.0
"""Above this x, softplus(x) = x to the precision of a float."""


@rewrite(product(x, op.Tanh(op.Softplus(x))), opset=18)
def mish(g: Graph, x: str, node: NodeProto) -> str:
    """x tanh(softplus(x))"""
    require_type(g, x, SINGLE_AND_HALF)
    return g.op("Mish", x, at=node)


@rewrite(op.Where(op.Greater(x, number("far", where=lambda far: far >= _FAR)), x, op.Softplus(x)))
def guarded_softplus(g: Graph, x: str, node: NodeProto) -> str:
    """softplus(x) where x is small, x elsewhere: the operator itself does not overflow"""
    return g.op("Softplus", x, at=node)


@rewrite(log_of_one_plus_exp)
def softplus(g: Graph, x: str, node: NodeProto) -> str:
    """log(1 + exp(x))"""
    require_type(g, x, SINGLE_AND_HALF)
    return g.op("Softplus", x, at=node)


below = product(exp_x - 1, number("alpha"))


@rewrite(op.Where(positive, x, below), op.Where(negative, below, x))
def elu(g: Graph, x: str, alpha: float, node: NodeProto) -> str:
    """x where x > 0 else a (exp(x) - 1)"""
    require_type(g, x, SINGLE_AND_HALF)
    return g.op("Elu", x, at=node, alpha=alpha)


RULES = (sigmoid, hard_swish, hard_sigmoid, mish, guarded_softplus)

ONNX_RULES = (softplus, elu)
"""Slower than their formulas on onnxruntime's CPU kernels: for the target `onnx` only."""
