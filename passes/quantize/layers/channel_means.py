"""Channel means of activations, and the output shift of rounded weights that follows from them.

    E[W^ x] - E[W x] = (W^ - W) E[x]

Each rounding error is small, but with nonzero means, as after a Relu or SiLU, the errors add up to
a constant. This shift, most of the error of rounded weights, follows from the means: the layer's
bias compensates it. Zero padding of images is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
from onnx import NodeProto

from passes.quantize.layers.channel_weights import kernel_of, rows_of
from toolkit.calibrate.observers import Collect
from toolkit.calibrate.statistics import Array, Statistic, finite_bounds
from toolkit.ir import Graph, Model, node as nd
from toolkit.quantization.plan import Plan

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

ChannelMeans = Mapping[str, Array]
"""The channel means of each tensor."""

_WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")
_SAMPLES = 16
"""Samples to average over; means converge quickly."""


def input_means(model: Model, plan: Plan, ctx: Context) -> ChannelMeans:
    """Return the channel means of the inputs of static layers with a bias; empty without data."""
    inputs: dict[str, None] = {}
    for node in model.nodes():
        entry = plan.find(node)
        if entry is not None and entry.scheme == "static" and nd.is_op(node, *_WITH_BIAS):
            inputs[node.input[0]] = None
    if ctx.calibration is None or not inputs:
        return {}
    data = ctx.calibration.first(_SAMPLES)
    found = data.collect(model, dict.fromkeys(inputs, Collect(SampleMeans, (1,)))).statistics
    gathered = {name: cast(SampleMeans, seen) for name, seen in found.items()}
    return {name: seen.mean() for name, seen in gathered.items() if any(seen.counts)}


def rounding_shift(
    g: Graph, node: NodeProto, mean: Array, rounded: Array, scale: Array, alpha: float = 1.0
) -> Array | None:
    """Return (a W - W^) E[x] per output; None if the layer has no bias or no float weights.

    W^ is `scale` times `rounded`; the scale broadcasts against the stored weights.
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


# -- statistics


class SampleMeans(Statistic):
    """The channel means of each sample, with its number of elements per channel."""

    fields = ("means", "counts")

    def __init__(self, tensor: str, axis: int) -> None:
        super().__init__(tensor, f"means:{axis}")
        self.axis = axis
        self.means: list[Array] = []
        self.counts: list[int] = []

    @property
    def seen(self) -> bool:
        return any(self.counts)

    def mean(self) -> Array:
        """Return the means over all samples."""
        return np.average(np.array(self.means), axis=0, weights=np.array(self.counts, np.float64))

    def update(self, values: Array) -> None:
        finite_bounds(values, self.tensor)
        others = tuple(a for a in range(values.ndim) if a != self.axis % values.ndim)
        count = values.size // max(1, values.shape[self.axis])
        mean = values.mean(others, dtype=np.float64) if count else np.zeros(values.shape[self.axis])
        self.means.append(mean)
        self.counts.append(count)

    def _merge(self, other: SampleMeans) -> None:
        self.means += other.means
        self.counts += other.counts

    def restore(self, state: Mapping[str, Array]) -> None:
        self.means, self.counts = list(state["means"]), state["counts"].tolist()
