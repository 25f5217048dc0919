"""Per-channel affine maps y = scale x + shift, and folding them into the weights of an operator.

An affine map is a Mul, Div, Add, Sub, Neg or BatchNormalization by constants that hold one number
per channel, or one for all. Conv, Gemm and MatMul are linear, so a chain of such maps before or
after them can be folded into their weights. Numbers are kept in float64 and rounded once, at the
end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import extra_outputs_used, given
from toolkit.ir import FLOATS, Array, Graph, node as nd
from toolkit.storage.weights import nbytes


@dataclass(frozen=True, slots=True)
class Channels:
    """The channel axis of a tensor: `count` channels along `axis` of `rank` dimensions."""

    rank: int
    axis: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """y = scale x + shift, each a float64 scalar or a vector with one number per channel."""

    scale: Array
    shift: Array

    @property
    def scales(self) -> bool:
        return bool((self.scale != 1).any())

    @property
    def shifts(self) -> bool:
        return bool((self.shift != 0).any())

    def then(self, later: Affine) -> Affine:
        """Return the composition: this map, followed by `later`."""
        return Affine(later.scale * self.scale, later.scale * self.shift + later.shift)


IDENTITY = Affine(np.ones(()), np.zeros(()))

Chain = list[tuple[Affine, NodeProto]]
"""Consecutive nodes, nearest to the linear operator first, with the composed map up to each."""


# -- chains


def chain_after(g: Graph, value: str, where: Channels) -> Chain:
    """Return the affine maps applied to `value`, each the sole user of its operand."""
    found: Chain = []
    total = IDENTITY
    while (node := g.sole_user(value)) is not None:
        step = _step(g, node, value, where)
        if step is None:
            break
        total, value = total.then(step), node.output[0]
        found.append((total, node))
    return found


def chain_before(g: Graph, value: str, where: Channels) -> Chain:
    """Return the affine maps that produce `value`, each with a sole user.

    The source of a chain has the shape of its result: no constant may broadcast it. Constants of a
    GELU or norm that is not fused yet stay with it.
    """
    found: Chain = []
    total = IDENTITY
    while (node := g.producer(value)) is not None and g.sole_user(value) is not None:
        source = variable_operand(g, node)
        shape = g.shape(source)
        if shape is None or len(shape) != where.rank or shape[where.axis] != where.count:
            break
        step = _step(g, node, source, where)
        if step is None or _is_unfused_activation_or_norm(g, source):
            break
        total, value = step.then(total), source
        found.append((total, node))
    return found


def _is_unfused_activation_or_norm(g: Graph, value: str) -> bool:
    """Return whether `value` is x (1 + erf(..)) or x / sqrt(..).

    Without the constants that follow, no fusion of activations or norms, not even the runtime's,
    would recognize it.
    """
    product = g.producer(value)
    if not nd.is_op(product, "Mul", "Div") or product is None:
        return False
    return any(_is_gelu_or_norm_factor(g, g.producer(name)) for name in product.input)


def _is_gelu_or_norm_factor(g: Graph, factor: NodeProto | None) -> bool:
    """Return whether a factor is 1 + erf(..), 1 + tanh(..), sqrt(..) or 1 / sqrt(..)."""
    if factor is None or nd.is_op(factor, "Sqrt", "Reciprocal", "Pow"):
        return factor is not None
    if nd.is_op(factor, "Add"):
        return nd.is_op(g.producer(variable_operand(g, factor)), "Erf", "Tanh")
    return nd.is_op(factor, "Div") and nd.is_op(g.producer(factor.input[1]), "Sqrt")


def variable_operand(g: Graph, node: NodeProto) -> str:
    """Return the operand that is not constant."""
    return next((name for name in node.input if name and not g.is_const(name)), node.input[0])


def bypass(g: Graph, last: NodeProto, value: str) -> str:
    """Replace the result of `last` with `value`, from which it is computed; return `value`."""
    g.replace(last.output[0], value)
    g.prune(last)
    return value


def rewire_input(g: Graph, node: NodeProto, source: str) -> str:
    """Make `source` the first input of `node`; remove the old producer if it becomes dead."""
    before = g.producer(node.input[0])
    g.set_input(node, 0, source)
    if before is not None:
        g.prune(before)
    return node.output[0]


# -- one node


def _step(g: Graph, node: NodeProto, x: str, where: Channels) -> Affine | None:
    """Return the map from `x` to the output of `node`, if it is per channel and finite."""
    if nd.is_op(node, "Neg"):
        return Affine(-np.ones(()), np.zeros(()))
    if nd.is_op(node, "BatchNormalization"):
        found = batch_normalization(g, node, where) if node.input[0] == x else None
    elif nd.is_op(node, "Add", "Sub", "Mul", "Div"):
        found = _arithmetic(g, node, x, where)
    else:
        found = None
    if found is None or not (np.isfinite(found.scale).all() and np.isfinite(found.shift).all()):
        return None
    return found


def _arithmetic(g: Graph, node: NodeProto, x: str, where: Channels) -> Affine | None:
    if list(node.input).count(x) != 1 or g.opset() < 7:  # with axis attributes
        return None
    is_first = node.input[0] == x
    numbers = by_channel(g, node.input[1 if is_first else 0], where)
    if numbers is None:
        return None
    one, zero = np.ones(()), np.zeros(())
    if node.op_type == "Mul":
        return Affine(numbers, zero)
    if node.op_type == "Add":
        return Affine(one, numbers)
    if node.op_type == "Sub":
        return Affine(one, -numbers) if is_first else Affine(-one, numbers)
    with np.errstate(divide="ignore"):
        return Affine(1 / numbers, zero) if is_first else None


def batch_normalization(g: Graph, node: NodeProto, where: Channels) -> Affine | None:
    """scale (x - mean) / sqrt(variance + epsilon) + bias, with the statistics from training"""
    if nd.attr(node, "training_mode", 0) or extra_outputs_used(g, node):
        return None
    if g.opset() < 9 and not (nd.attr(node, "spatial", 1) and g.opset() >= 7):
        return None
    if where.axis != 1 or where.rank < 2:
        return None
    found = [_floats(g, given(node, index)) for index in range(1, 5)]
    arrays = [array for array in found if array is not None and array.shape == (where.count,)]
    if len(arrays) != 4:
        return None
    scale, bias, mean, variance = arrays
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = scale / np.sqrt(variance + nd.attr(node, "epsilon", 1e-5))
        return Affine(factor, bias - factor * mean)


def by_channel(g: Graph, value: str, where: Channels) -> Array | None:
    """Return a constant as one number for all channels or one per channel, or None.

    It must not add dimensions, and its numbers must lie along the channel axis: a plain vector is
    broadcast along the last dimension, even if another one has as many elements.
    """
    array = _floats(g, value)
    if array is None or array.ndim > where.rank or not array.size:
        return None
    if array.size == 1:
        return array.reshape(())
    axis = where.axis - (where.rank - array.ndim)
    if axis < 0 or array.shape[axis] != where.count or array.size != where.count:
        return None
    return array.reshape(-1)


def _floats(g: Graph, value: str) -> Array | None:
    """Return a float constant as float64."""
    tensor = g.tensor(value) if value else None
    if tensor is None or tensor.data_type not in FLOATS:
        return None
    return g.model.weights.array(tensor).astype(np.float64)


# -- weights

_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
_NORMAL = {
    "float16": (2.0**-14, 65504.0),
    "bfloat16": (2.0**-126, 2.0**127),
    "float32": (2.0**-126, 2.0**127),
    "float64": (2.0**-1022, 2.0**1023),
}
"""Range of the largest number in which rounding errors stay below epsilon times that number."""

_MAX_COPIED_BYTES = 1 << 18
"""Bytes that copies of a shared weight, one for each other user, may add."""


def rounded(exact: Array, like: Array) -> Array | None:
    """Return `exact` in the element type of `like`, or None where that loses precision.

    That is when a number overflows, or when all numbers are so small that they lose digits. Small
    numbers that become 0 next to large ones are dead channels.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result = exact.astype(like.dtype)
        largest = max(float(exact.max(initial=0.0)), -float(exact.min(initial=0.0)))
        least, most = _NORMAL[like.dtype.name]
        if least <= largest <= most:
            return result
        error = np.abs(result.astype(np.float64) - exact).max(initial=0.0)
    if not np.isfinite(error):
        return None
    return result if error <= _EPSILON[like.dtype.name] * np.abs(exact).max(initial=0.0) else None


def use_count(g: Graph, constant: str) -> int:
    """Count the uses of a constant in all graphs, including the training info."""
    scope = g.scope_of(constant)
    if scope is None:
        return 0
    return scope.use_count(constant) + scope.is_pinned(constant)


def may_copy(g: Graph, constant: str) -> bool:
    """Return whether a weight may be replaced by a copy: it is small, or has no other user."""
    tensor = g.tensor(constant)
    others = use_count(g, constant) - 1
    return tensor is not None and nbytes(tensor) * max(others, 0) <= _MAX_COPIED_BYTES
