"""SmoothQuant: move the scale of large activation channels into weights.

    s_j = max |x_j|^a / max |w_j|^(1 - a),   x W = (x / s) (s W)

A few large channels dominate the one scale of x, while weights have a scale per output. The
producer of x divides by s (see `apply`: scale and bias of a norm, weights of a layer, through all
operators that pass a factor), and every layer that uses x multiplies its weights by s. A channel
without activations or without weights keeps s = 1.

By default `a` is searched: the value with the least int8 error of the layers' outputs on rows of
the calibration data. If no value lowers that error, nothing changes.

    G. Xiao et al., SmoothQuant: accurate and efficient post-training quantization for LLMs, 2022
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import numpy as np

from passes.analysis.node_filter import NodeFilter
from passes.analysis.shapes import Shapes
from passes.quantize.layers.channel_weights import kernel_of
from passes.quantize.rescale.apply import RescaleGroup, ScaledConstant, group_of
from passes.quantize.rescale.propagate import CompensatingLayer, FactorSpread
from passes.quantize.rescale.samples import Sample, Trial
from toolkit.calibrate.observers import Collect
from toolkit.errors import UsageError
from toolkit.ir import Array, Graph, Model, node as nd
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.calibrate.collector import Calibration
    from toolkit.pass_manager.protocol import Context

_ALPHAS = tuple(n / 20 for n in range(4, 20))
_USUAL = 0.5
_GAIN = 0.2
"""The least gain, in dB, of a searched factor."""
_SETTLED = 0.02
"""Factors within this relative distance of 1 do not justify a rewrite."""
_MOST = 2.0**20
"""The largest factor; the least is its inverse."""


@dataclass(frozen=True, slots=True)
class Smooth:
    """Move the scale of large activation channels into weights, without changing float results."""

    name: ClassVar[str] = "smooth"
    tolerance: ClassVar[Tolerance] = FLOAT
    alpha: float | Literal["search"] = field(
        default="search",
        metadata={"help": "The exponent of the activations, 0 to 1; searched by default."},
    )
    insert: float | None = field(
        default=None,
        metadata={
            "help": "Insert a Mul before layers whose producer cannot be scaled if that "
            "gains this many dB in their outputs; none: never."
        },
    )
    include: tuple[str, ...] = field(
        default=("*",), metadata={"help": "Patterns of the layers whose input is smoothed."}
    )
    exclude: tuple[str, ...] = field(
        default=(), metadata={"help": "Patterns of layers whose input stays as it is."}
    )

    def __post_init__(self) -> None:
        if self.insert is not None and not self.insert >= 0:
            raise UsageError(f"smooth: insert is {self.insert}; it must be at least 0 dB, or none")
        if self.alpha != "search" and not 0 <= self.alpha <= 1:
            raise UsageError(f"smooth: alpha is {self.alpha}; it must be from 0 to 1, or 'search'")

    def run(self, model: Model, ctx: Context) -> None:
        if ctx.calibration is None:
            raise UsageError("smooth needs calibration data: name their source with --calib")
        Shapes(annotate=False).run(model, ctx)
        g = model.graph
        groups = list(self._groups(g))
        if not groups:
            return
        axes: dict[str, Collect] = {}
        for group in groups:
            for sink in group.spread.sinks:
                axes[sink.node.input[0]] = Collect(Sample, (-1 if sink.kernel.is_matrix else 1,))
        found = ctx.calibration.collect(model, axes)
        for group in groups:
            try:
                self._smooth(g, group, found)
            except MatchFailure as failure:
                ctx.note(f"{group.label} is not smoothed: {failure}")

    def _groups(self, g: Graph) -> Iterator[RescaleGroup]:
        """Yield groups in graph order; a layer is in one group at most."""
        selection = NodeFilter(self.include, self.exclude)
        taken: set[int] = set()
        for node in g.nodes:
            group = group_of(g, node)
            sinks = [] if group is None else group.spread.sinks
            if group is None or any(id(s.node) in taken for s in sinks):
                continue
            if all(selection.takes(sink.node) for sink in sinks):
                taken.update(id(sink.node) for sink in sinks)
                yield group
        if self.insert is not None:
            yield from _inserted(g, taken, selection)

    def _smooth(self, g: Graph, group: RescaleGroup, found: Calibration) -> None:
        samples = _samples(group, found)
        sizes = _sizes(g, group, samples)
        alphas = _ALPHAS if self.alpha == "search" else (self.alpha,)
        candidates = [group.limited(_factors(*sizes, alpha)) for alpha in alphas]
        least = 0.0
        if isinstance(group, Inserted):
            least = self.insert or 0.0
        elif self.alpha == "search":
            least = _GAIN
        if not all(sink.kernel.is_matrix for sink in group.spread.sinks):
            # Convolutions are not tested on rows.
            factors: Array | None = group.limited(_factors(*sizes, _USUAL))
        elif len(candidates) == 1 and not least:
            (factors,) = candidates
        else:
            factors = best_of(g, group, samples, candidates, least)
        if factors is not None and np.abs(np.log(factors)).max() >= _SETTLED:
            group.apply(g, self.name, factors)


# -- factors


def _samples(group: RescaleGroup, found: Calibration) -> list[Sample]:
    names = [sink.node.input[0] for sink in group.spread.sinks]
    failed = next((found.failed[name] for name in names if name in found.failed), None)
    if failed is not None:
        raise MatchFailure(failed)
    samples = [cast(Sample, found.statistics[name]) for name in names]
    if not all(sample.seen for sample in samples):
        raise MatchFailure("it never ran on the calibration data")
    return samples


def _sizes(g: Graph, group: RescaleGroup, samples: list[Sample]) -> tuple[Array, Array]:
    """Return max |x| and max |w| of each channel over all layers of the group."""
    count = group.spread.count
    largest, weights = np.zeros(count), np.zeros(count)
    for sink, sample in zip(group.spread.sinks, samples, strict=True):
        largest = np.maximum(largest, sink.by_channel(sample.largest, count))
        size = sink.kernel.largest(g, sink.kernel.in_axes)
        weights = np.maximum(weights, sink.by_channel(size, count))
    return largest, weights


def _factors(largest: Array, weights: Array, alpha: float) -> Array:
    present = (largest > 0) & (weights > 0)
    x, w = np.where(present, largest, 1.0), np.where(present, weights, 1.0)
    return np.clip(np.where(present, x**alpha / w ** (1 - alpha), 1.0), 1 / _MOST, _MOST)


def best_of(
    g: Graph, group: RescaleGroup, samples: list[Sample], candidates: list[Array], least: float
) -> Array | None:
    """Return the factors with the least int8 error, or None below a gain of `least` dB."""
    pairs = zip(group.spread.sinks, samples, strict=True)
    trials = [Trial.of(g, sink, sample) for sink, sample in pairs]
    errors = [sum(trial.error(factors) for trial in trials) for factors in candidates]
    best = int(np.argmin(errors))
    before = sum(trial.error(np.ones(group.spread.count)) for trial in trials)
    return candidates[best] if errors[best] * 10 ** (least / 10) < before else None


# -- inserted products


def _inserted(g: Graph, taken: set[int], selection: NodeFilter) -> Iterator[RescaleGroup]:
    """Yield a group with a new Mul for each input of layers that are in no other group."""
    users: dict[str, list[CompensatingLayer]] = {}
    for node in g.nodes:
        kernel = kernel_of(g, node)
        if kernel is None or not kernel.is_matrix or not kernel.reads_channels:
            continue
        if id(node) not in taken and selection.takes(node):
            sink = CompensatingLayer(kernel, np.arange(kernel.inputs))
            users.setdefault(node.input[0], []).append(sink)
    for value, sinks in users.items():
        counts = {sink.index.size for sink in sinks}
        if len(counts) == 1:
            count = counts.pop()
            made = nd.make_node("Mul", [value, ""], [value])
            part = ScaledConstant(1, (count,), (count,))
            yield Inserted(made, (part,), FactorSpread(np.zeros(count, bool), sinks))


@dataclass(frozen=True, slots=True, eq=False)
class Inserted(RescaleGroup):
    """A group whose source is a new Mul before its layers."""

    def write(self, g: Graph, factors: Array) -> None:
        value, sinks = self.node.input[0], self.spread.sinks
        kind = sinks[0].kernel.floats(g).dtype
        ones = g.constant(np.ones(self.spread.count, kind), "smooth")
        made = g.add("Mul", [value, ones])
        for sink in sinks:
            g.set_input(sink.node, 0, made.output[0])
        RescaleGroup(made, self.parts, self.spread).write(g, factors)
