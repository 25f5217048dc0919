"""Affine maps by channel, y = scale x + shift, in whatever way they are spelled.

Mul, Div, Add, Sub, Neg and BatchNormalization, by constants that hold one number for each channel
or one for all. What a Conv or a MatMul computes is linear, so a chain of such maps before or behind
it can go into its weights. Numbers are kept in float64 until the last moment, and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from passes.analysis.operands import given
from toolkit.ir import node as nd
from toolkit.ir.graph import Array, Graph
from toolkit.ir.tensor_type import FLOATS
from toolkit.storage.weights import nbytes


@dataclass(frozen=True, slots=True)
class Channels:
    """Where a tensor's channels lie: `count` of them along `axis` of `rank` dimensions."""

    rank: int
    axis: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """y = scale x + shift, each a float64 scalar or vector of one number a channel."""

    scale: Array
    shift: Array

    @property
    def scales(self) -> bool:
        return bool((self.scale != 1).any())

    @property
    def shifts(self) -> bool:
        return bool((self.shift != 0).any())

    def then(self, later: Affine) -> Affine:
        """This map, and `later` on its result."""
        return Affine(later.scale * self.scale, later.scale * self.shift + later.shift)


IDENTITY = Affine(np.ones(()), np.zeros(()))

Chain = list[tuple[Affine, NodeProto]]
"""Nodes in a row, nearest to the linear operator first, each with the map of all up to it."""


# -- chains


def chain_after(g: Graph, value: str, where: Channels) -> Chain:
    """What is done to `value`, as long as nothing else is done with it."""
    found: Chain = []
    total = IDENTITY
    while (node := only_reader(g, value)) is not None:
        step = _step(g, node, value, where)
        if step is None:
            break
        total, value = total.then(step), node.output[0]
        found.append((total, node))
    return found


def chain_before(g: Graph, value: str, where: Channels) -> Chain:
    """What made `value`, as long as it is made for one reader.

    The source of a chain has the shape of its result: a constant may not have broadcast it. The
    half of a GELU and the scale of a norm that are still spelled out stay where they are.
    """
    found: Chain = []
    total = IDENTITY
    while (node := g.producer(value)) is not None and only_reader(g, value) is not None:
        source = source_of(g, node)
        shape = g.shape(source)
        if shape is None or len(shape) != where.rank or shape[where.axis] != where.count:
            break
        step = _step(g, node, source, where)
        if step is None or _is_part_of_more(g, source):
            break
        total, value = step.then(total), source
        found.append((total, node))
    return found


def _is_part_of_more(g: Graph, value: str) -> bool:
    """Whether `value` is x (1 + erf(..)) or x / sqrt(..): without the constants behind it, neither
    the fusion of activations and norms nor the runtime's own would know it again."""
    product = g.producer(value)
    if not nd.is_op(product, "Mul", "Div") or product is None:
        return False
    return any(_is_telling(g, g.producer(name)) for name in product.input)


def _is_telling(g: Graph, factor: NodeProto | None) -> bool:
    """Whether a factor is 1 + erf(..), 1 + tanh(..), sqrt(..), or one over that."""
    if factor is None or nd.is_op(factor, "Sqrt", "Reciprocal", "Pow"):
        return factor is not None
    if nd.is_op(factor, "Add"):
        return nd.is_op(g.producer(source_of(g, factor)), "Erf", "Tanh")
    return nd.is_op(factor, "Div") and nd.is_op(g.producer(factor.input[1]), "Sqrt")


def source_of(g: Graph, node: NodeProto) -> str:
    """The operand that a map maps: the one that is no constant."""
    return next((name for name in node.input if name and not g.is_const(name)), node.input[0])


def only_reader(g: Graph, value: str) -> NodeProto | None:
    """The node that reads `value`, once, when nothing else does: no graph output, no subgraph."""
    if g.reader_count(value) != 1 or g.use_count(value) != 1:
        return None
    return g.users(value)[0]


def bypass(g: Graph, node: NodeProto, last: NodeProto) -> str:
    """What `node` gives takes the place of what `last`, a node behind it, gave; its name then."""
    g.replace(last.output[0], node.output[0])
    g.prune(last)
    return node.output[0]


def read_from(g: Graph, node: NodeProto, source: str) -> str:
    """Make `source` the first input of `node`; what made the old one goes unless it is read."""
    before = g.producer(node.input[0])
    g.set_input(node, 0, source)
    if before is not None:
        g.prune(before)
    return node.output[0]


# -- one node


def _step(g: Graph, node: NodeProto, x: str, where: Channels) -> Affine | None:
    """The map from `x` to what `node` gives, if it is one by channel, of finite numbers."""
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
    if list(node.input).count(x) != 1 or g.opset() < 7:  # before, attributes told how to broadcast
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
    """scale (x - mean) / sqrt(variance + epsilon) + bias, with the statistics of the training."""
    if nd.attr(node, "training_mode", 0) or any(not g.is_unused(v) for v in node.output[1:] if v):
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
    """A constant as one number for all channels or one for each; None when it is anything else.

    It may not add dimensions, and what looks like one number a channel must lie along the channels:
    a vector meets the last dimension, even where that has as many elements.
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
    """The contents of a constant of a float type, as float64."""
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
"""Between these, a number is rounded by less than epsilon of it, and smaller ones beside it by less
than epsilon of the larger one."""

_MOST_COPIED = 1 << 18
"""A weight that has other readers is copied where copies for all of them add at most this much."""


def rounded(exact: Array, like: Array) -> Array | None:
    """`exact` in the element type of `like`; None when that cannot hold it.

    It cannot when a number overflows, and when all of them are so small that they lose digits. A
    few that vanish beside large ones are what training leaves of dead channels.
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
    """How often a constant is read, in whichever graph, and by the training info too."""
    scope = g.scope_of(constant)
    if scope is None:
        return 0
    return scope.use_count(constant) + scope.is_pinned(constant)


def may_copy(g: Graph, constant: str) -> bool:
    """Whether a changed copy of this weight pays: no one else reads it, or it is small."""
    tensor = g.tensor(constant)
    others = use_count(g, constant) - 1
    return tensor is not None and nbytes(tensor) * max(others, 0) <= _MOST_COPIED
