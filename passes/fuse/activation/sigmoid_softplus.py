"""Sigmoid and what is built of it, Softplus and what is built of that, Elu.

    Sigmoid      1 / (1 + exp(-x)),  exp(x) / (1 + exp(x)),  (1 + tanh(x / 2)) / 2
    Swish        x / (1 + exp(-x)) as Mul(x, Sigmoid(x)): no operator before opset 24
    HardSigmoid  clip(a x + b, 0, 1)
    HardSwish    x clip(x + 3, 0, 6) / 6
    Softplus     log(1 + exp(x))
    Mish         x tanh(softplus(x))
    Elu          x where x > 0 else a (exp(x) - 1)

Where exp overflows, the formulas give inf or NaN and the operators the limit that was meant.
Softplus, Elu and Mish from exponentials are 2 to 5 times slower as operators on the runtime's CPU
kernels, and are only written for the target `onnx`.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.fuse.activation.relu_clip import SINGLE_AND_HALF, negative, positive, require_type
from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import FLOATS
from toolkit.pattern import number, op, product, total, var
from toolkit.rewriting.rule import Miss, rewrite

x = var("x")
exp_x = op.Exp(x)
one_plus_decay = total(op.Exp(product(x, number("rate", where=lambda rate: rate < 0))), 1)


# -- sigmoids


@rewrite(1 / one_plus_decay, op.Reciprocal(one_plus_decay))
def sigmoid(g: Graph, x: str, rate: float, node: NodeProto) -> str:
    """1 / (1 + exp(-x))"""
    return _sigmoid(g, x, -rate, node)


@rewrite(
    exp_x / total(exp_x, 1),
    product(0.5, op.Tanh(product(x, 0.5)) + 1),
    total(product(0.5, op.Tanh(product(x, 0.5))), 0.5),
)
def sigmoid_spelled_otherwise(g: Graph, x: str, node: NodeProto) -> str:
    """exp(x) / (1 + exp(x)), (1 + tanh(x / 2)) / 2"""
    return _sigmoid(g, x, 1.0, node)


@rewrite(var("a") / one_plus_decay)
def times_sigmoid(g: Graph, a: str, x: str, rate: float, node: NodeProto) -> str:
    """a / (1 + exp(-x)) = a sigmoid(x), a Swish for a = x"""
    return g.op("Mul", a, _sigmoid(g, x, -rate, node), at=node)


def _sigmoid(g: Graph, x: str, factor: float, node: NodeProto) -> str:
    dtype = require_type(g, x, FLOATS)
    if factor != 1:
        kind = helper.tensor_dtype_to_np_dtype(dtype)
        x = g.op("Mul", x, g.constant(np.array(factor, dtype=kind), "factor"), at=node)
    return g.op("Sigmoid", x, at=node)


# -- hard sigmoids

a, b, top = number("a"), number("b"), number("top")
slope = number("a", where=lambda a: a != 1)
"""Without one, a line further inside would be left there."""


@rewrite(
    product(op.Clip(total(x, b), 0, top), slope),
    op.Clip(product(total(x, b), slope), 0, 1),
)
def hard_sigmoid(
    g: Graph, x: str, a: float, b: float, top: float | None, node: NodeProto
) -> str | None:
    """clip(x + b, 0, 1 / a) a = clip(a (x + b), 0, 1)"""
    slack = 1e-5 if g.dtype(x) == TensorProto.FLOAT else 1e-3  # of 1 / 6 in half precision
    if top is not None and not (top > 0 and math.isclose(a * top, 1, rel_tol=slack)):
        raise Miss(f"the result goes up to {a * top:g}, not to 1")
    return _hard_sigmoid(g, x, a, a * b, node)


@rewrite(op.Clip(total(product(x, a), number("b", where=lambda b: b != 0)), 0, 1))
def hard_sigmoid_of_line(g: Graph, x: str, a: float, b: float, node: NodeProto) -> str | None:
    """clip(a x + b, 0, 1)"""
    return _hard_sigmoid(g, x, a, b, node)


def _hard_sigmoid(g: Graph, x: str, alpha: float, beta: float, node: NodeProto) -> str | None:
    if alpha == 1 and beta == 0:
        return None  # just a Clip
    require_type(g, x, SINGLE_AND_HALF)
    return g.op("HardSigmoid", x, at=node, alpha=alpha, beta=beta)


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
"""From here on x is its own softplus, as far as a float can tell."""


@rewrite(product(x, op.Tanh(op.Softplus(x))), opset=18)
def mish(g: Graph, x: str, node: NodeProto) -> str:
    """x tanh(softplus(x))"""
    require_type(g, x, SINGLE_AND_HALF)
    return g.op("Mish", x, at=node)


@rewrite(op.Where(op.Greater(x, number("far", where=lambda far: far >= _FAR)), x, op.Softplus(x)))
def guarded_softplus(g: Graph, x: str, node: NodeProto) -> str:
    """The operator needs no guard against overflow."""
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


RULES = (
    sigmoid,
    sigmoid_spelled_otherwise,
    times_sigmoid,
    hard_swish,
    hard_sigmoid,
    hard_sigmoid_of_line,
    mish,
    guarded_softplus,
)

ONNX_RULES = (softplus, elu)
"""Slower than their formulas on the runtime's CPU kernels: for the target `onnx`."""
