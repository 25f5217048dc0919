"""The mean of every channel, and what rounding weights does to a layer whose input has one.

    E[W^ x] - E[W x] = (W^ - W) E[x]

Each error is small, but they add up to a constant where the means are not zero, as behind a Relu or
SiLU. This shift is most of what rounded weights cost, and known before anything runs: the layer's
bias takes it back. Zeros around an image are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
from onnx import NodeProto

from passes.quantize.layers.channel_weights import kernel_of, rows_of
from toolkit.calibrate.statistics import Array, Range, State, Statistic, finite_bounds
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.quantization.plan import Plan

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

ChannelMeans = Mapping[str, Array]
"""By tensor, of each channel."""

_WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")
_SAMPLES = 16
"""Means are known soon."""


def input_means(model: Model, plan: Plan, ctx: Context) -> ChannelMeans:
    """Of all that static layers with a bias read; nothing without calibration data."""
    read: dict[str, None] = {}
    for node in model.nodes():
        entry = plan.find(node)
        if entry is not None and entry.scheme == "static" and nd.is_op(node, *_WITH_BIAS):
            read[node.input[0]] = None
    if ctx.calibration is None or not read:
        return {}
    data = ctx.calibration.first(_SAMPLES)
    found = data.collect(model, dict.fromkeys(read, Means(axis=1))).statistics
    gathered = {name: cast(SampleMeans, seen) for name, seen in found.items()}
    return {name: seen.mean() for name, seen in gathered.items() if any(seen.counts)}


def rounding_shift(
    g: Graph, node: NodeProto, mean: Array, rounded: Array, scale: Array, alpha: float = 1.0
) -> Array | None:
    """(a W - W^) E[x], by output; None where the layer has no bias or its weights are no floats.

    W^ = `scale` times `rounded`, of which the scale is laid along as the weights are stored.
    """
    kernel = kernel_of(g, node) if nd.is_op(node, *_WITH_BIAS) else None
    if kernel is None or mean.size != kernel.inputs:
        return None
    along = kernel.spread(mean.astype(np.float32), kernel.in_axes)
    steps = np.broadcast_to(scale, rounded.shape).reshape(kernel.shape)
    codes = rounded.reshape(kernel.shape)

    def shifts(block: Array, rows: slice) -> Array:
        off: Array = np.multiply(block, np.float32(alpha)) - codes[rows] * steps[rows]
        return np.multiply(off, rows_of(along, rows))

    return kernel.gather(g, kernel.out_axes, shifts, np.add)


# -- what is gathered


class SampleMeans:
    """The mean of every channel, feed by feed, and how many numbers it is the mean of."""

    def __init__(self, tensor: str, axis: int) -> None:
        self.tensor, self.axis = tensor, axis
        self.means: list[Array] = []
        self.counts: list[int] = []

    @property
    def key(self) -> str:
        return f"means:{self.axis}"

    @property
    def seen(self) -> bool:
        return any(self.counts)

    def mean(self) -> Array:
        """Of all feeds."""
        return np.average(np.array(self.means), axis=0, weights=np.array(self.counts, np.float64))

    def update(self, values: Array) -> None:
        finite_bounds(values, self.tensor)
        others = tuple(a for a in range(values.ndim) if a != self.axis % values.ndim)
        count = values.size // max(1, values.shape[self.axis])
        mean = values.mean(others, dtype=np.float64) if count else np.zeros(values.shape[self.axis])
        self.means.append(mean)
        self.counts.append(count)

    def merge(self, other: SampleMeans) -> None:
        self.means += other.means
        self.counts += other.counts

    def state(self) -> State:
        return {"means": np.array(self.means), "counts": np.array(self.counts)}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.means, self.counts = list(state["means"]), state["counts"].tolist()


@dataclass(frozen=True, slots=True)
class Means:
    """The observer that gathers SampleMeans."""

    name: ClassVar[str] = "means"
    axis: int = 1

    def start(self, tensor: str) -> Statistic:
        return SampleMeans(tensor, self.axis)

    def range(self, statistic: Statistic) -> Range:
        raise NotImplementedError("means tell no range")
