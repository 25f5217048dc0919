"""Biases of linear maps that read a LayerNormalization, in their weights.

    y = scale (x - mean x) / deviation + shift    so    sum(y / scale) = sum(shift / scale) = s
    y W + b  =  y (W + (1 / scale) (b / s)^T)

Deviations from the mean sum to zero, so there is a direction in which a normalized row is always
the same, and a bias is a multiple of what it has there. Where s is 0, or nearly so, the norm's
shift first gets a multiple of its scale on top, which makes it `count` larger; the maps take that
back in the same way, and a sum that reads the norm (the residual of a post-norm layer) in a
constant that it adds anyway. A norm with other readers keeps its shift.

The ones that come out of y (1 / scale) / s are as exact as s is large beside what it is summed of,
so a norm with a scale near 0 somewhere is left alone. So is half precision.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto

from passes.fuse.affine import bypass, only_reader
from passes.fuse.norm_forms import LAYER
from passes.operands import given
from toolkit import nodes as nd
from toolkit.graph import Array, Graph

_TYPES = (TensorProto.FLOAT, TensorProto.DOUBLE)

_MOST_NOISE = 4.0
"""Roundings that the ones may be off by."""


@dataclass(frozen=True, slots=True, eq=False)
class Map:
    """A MatMul with a constant matrix, and the Add of its bias where it has one."""

    node: NodeProto
    weight: Array
    add: NodeProto | None
    bias: str

    @property
    def name(self) -> str:
        return self.node.input[1]


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """An Add or Sum of a norm and, among others, of a constant at `place`."""

    node: NodeProto
    place: int
    constant: Array


@dataclass(frozen=True, slots=True, eq=False)
class Absorption:
    """A norm whose readers do without biases: `step` times its scale is added to its shift."""

    norm: NodeProto
    scale: Array
    shift: Array
    step: float
    maps: tuple[Map, ...]
    sums: tuple[Sum, ...]

    def key(self, map_: Map) -> tuple[str, ...]:
        """What the new weight of a map depends on."""
        return (map_.name, map_.bias, self.norm.input[1], given(self.norm, 2), str(self.step))

    @property
    def bytes(self) -> int:
        return sum({map_.name: map_.weight.nbytes for map_ in self.maps}.values())


def absorptions(g: Graph) -> list[Absorption]:
    """All norms that make Adds unnecessary, and no weight to be stored twice."""
    found = [a for node in g.nodes if nd.is_op(node, LAYER) and (a := _absorption(g, node))]
    readers = defaultdict[str, list[tuple[str, ...]]](list)
    for absorption in found:
        for map_ in absorption.maps:
            readers[map_.name].append(absorption.key(map_))
    return [
        absorption
        for absorption in found
        if all(
            g.use_count(map_.name) == len(readers[map_.name]) and len(set(readers[map_.name])) == 1
            for map_ in absorption.maps
        )
    ]


def _absorption(g: Graph, norm: NodeProto) -> Absorption | None:
    scale, value = _scale(g, norm), norm.output[0]
    shift = None if scale is None else _shift(g, norm, scale)
    if scale is None or shift is None:
        return None
    maps: list[Map] = []
    sums: list[Sum] = []
    free = not g.is_output(value) and not g.is_captured(value)
    for reader in g.users(value):
        if (map_ := _map(g, reader, value, scale.size)) is not None:
            maps.append(map_)
        elif (sum_ := _sum(g, reader, value, scale.size)) is not None:
            sums.append(sum_)
        else:
            free = False
    step = _step(scale, shift, free)
    if step is None or not any(map_.add is not None for map_ in maps):
        return None
    return Absorption(norm, scale, shift, step, tuple(maps), tuple(sums))


def _scale(g: Graph, norm: NodeProto) -> Array | None:
    """The scale in float64, of a norm over the last axis."""
    scale, rank = g.const(norm.input[1]), g.rank(norm.input[0])
    if scale is None or scale.ndim != 1 or rank is None or g.dtype(norm.input[0]) not in _TYPES:
        return None
    if nd.attr(norm, "axis", -1) not in (-1, rank - 1) or not np.all(scale):
        return None
    return scale.astype(np.float64)


def _shift(g: Graph, norm: NodeProto, scale: Array) -> Array | None:
    if not given(norm, 2):
        return np.zeros_like(scale)
    shift = g.const(given(norm, 2))
    return None if shift is None or shift.shape != scale.shape else shift.astype(np.float64)


def _map(g: Graph, node: NodeProto, value: str, count: int) -> Map | None:
    if not nd.is_op(node, "MatMul") or node.input[0] != value:
        return None
    weight = g.const(node.input[1])
    if weight is None or weight.ndim != 2 or len(weight) != count:
        return None
    add = only_reader(g, node.output[0])
    if add is not None and nd.is_op(add, "Add"):
        bias = add.input[1] if add.input[0] == node.output[0] else add.input[0]
        if g.is_const(bias) and g.shape(bias) == weight.shape[1:]:
            return Map(node, weight, add, bias)
    return Map(node, weight, None, "")


def _sum(g: Graph, node: NodeProto, value: str, count: int) -> Sum | None:
    """A sum that has a constant with a number for each of the norm's."""
    if not nd.is_op(node, "Add", "Sum") or list(node.input).count(value) != 1:
        return None
    for place, name in enumerate(node.input):
        constant = g.const(name)
        if constant is not None and constant.shape[-1:] == (count,):
            return Sum(node, place, constant)
    return None


def _step(scale: Array, shift: Array, free: bool) -> float | None:
    """How often the scale goes on top of the shift: not at all, if the sum is large without."""
    ratio = shift / scale
    total = float(ratio.sum())
    for step in (0.0, math.copysign(1.0, total)) if free else (0.0,):
        noise = math.sqrt(scale.size) + float(np.linalg.norm(ratio + step))
        if noise <= _MOST_NOISE * abs(total + step * scale.size):
            return step
    return None


def write(g: Graph, absorption: Absorption, stored: dict[tuple[str, ...], str]) -> None:
    """Take the biases out. `stored` has the weights made so far, for layers that share theirs."""
    norm, scale, shift = absorption.norm, absorption.scale, absorption.shift
    lift = absorption.step * scale
    one = 1 / scale / (shift / scale + absorption.step).sum()
    for map_ in absorption.maps:
        key = absorption.key(map_)
        if key not in stored:
            bias = g.const(map_.bias) if map_.bias else None
            whole = g.model.weights.keep(_weight(map_.weight, bias, one, lift))
            stored[key] = g.constant(whole, "weights")
        g.set_input(map_.node, 1, stored[key])
        if map_.add is not None:
            bypass(g, map_.node, map_.add)
    if not absorption.step:
        return
    dtype = absorption.maps[0].weight.dtype
    g.set_inputs(norm, [*norm.input[:2], g.constant((shift + lift).astype(dtype), "shift")])
    for sum_ in absorption.sums:
        changed = (sum_.constant.astype(np.float64) - lift).astype(dtype)
        g.set_input(sum_.node, sum_.place, g.constant(changed, "shift"))


def _weight(weight: Array, bias: Array | None, one: Array, lift: Array) -> Array:
    """W + one (b - lift W)^T"""
    wanted = np.zeros(weight.shape[1]) if bias is None else bias.astype(np.float64)
    if lift.any():
        wanted = wanted - np.einsum("i,ij->j", lift, weight)
    whole = np.outer(one.astype(weight.dtype), wanted.astype(weight.dtype))
    whole += weight
    return whole
