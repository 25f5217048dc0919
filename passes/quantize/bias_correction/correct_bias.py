"""Bias correction: what quantization shifts on average is taken back by the bias, layer by layer.

    b_c <- b_c - (mean of the quantized layer's output c - mean of the float layer's output c)

A layer is corrected on what the layers before it compute once they are corrected: all at once, each
would take back what those before it have taken back already, and the model is lost. So the samples
walk through the quantized model once (see `walk`), and the float model's means are gathered before.

A channel is corrected where it holds beyond the samples: the shift in one half of them must be that
in the other half, about. A layer is corrected where the error of its means falls, and of the whole
only as many layers from the front as lower the error of the model's outputs (see `outputs`).
`biases` knows the layers, and where their bias is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from passes.quantize.bias_correction.biases import Biased, biased_layers
from passes.quantize.bias_correction.output_error import OutputError
from passes.quantize.bias_correction.stepwise_run import Step, Stuck, Walk
from passes.quantize.layers.channel_means import Means, SampleMeans
from toolkit.calibrate.collector import Feeds, observable
from toolkit.calibrate.statistics import Array
from toolkit.errors import RuntimeRefused, UsageError
from toolkit.feeds import Feed
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.messages import first_of
from toolkit.runtime.session import Session
from toolkit.verification.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_MEMORY = 1 << 28
"""Bytes of values that are kept for all samples; with larger ones, fewer samples go on."""
_FEWEST = 4
_MOST, _SECONDS, _ENOUGH = 32, 0.5, 4
"""Samples to take where nobody says how many. All go through the model about ten times, each time
in so many seconds: of a slow model fewer are taken, down to so many."""
_TRIES = 3
_SETTLED = 0.9
"""A try that leaves more than this share of the squared shift is the last."""


@dataclass(frozen=True, slots=True)
class CorrectBias:
    """Take back, by the biases of quantized layers, what their outputs are shifted by."""

    name: ClassVar[str] = "correct-bias"
    tolerance: ClassVar[Tolerance] = QUANT
    samples: int | None = field(
        default=None,
        metadata={
            "help": "How many feeds of the calibration data are looked at; "
            "none: 32, of a slow model fewer."
        },
    )

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise UsageError(f"correct-bias: samples is {self.samples}; it must be at least 1")

    def run(self, model: Model, ctx: Context) -> None:
        if ctx.calibration is None:
            raise UsageError("correct-bias needs calibration data: name their source with --calib")
        floats = ctx.floats
        if floats is None:
            ctx.note(
                "no float model to compare with: run it in one chain with a pass that quantizes"
            )
            return
        layers, left = biased_layers(model.graph, frozenset(observable(floats)))
        if left:
            names = first_of([nd.label(node) for node in left])
            ctx.note(f"biases not corrected: {names} (no such value in the float model)")
        if not layers:
            return
        data = ctx.calibration.first(
            self.samples or affordable_samples(model, ctx.calibration.feeds, ctx.custom_ops)
        )
        found = data.collect(floats, {layer.counterpart: Means(layer.axis) for layer in layers})
        wanted = {name: cast(SampleMeans, means) for name, means in found.statistics.items()}
        feeds = list(data.feeds)
        ends = [model.journal.position]
        error = OutputError(floats, feeds, ctx.custom_ops)
        before = error.of(model)
        try:
            for _ in corrected(model, layers, wanted, feeds, ctx.custom_ops):
                ends.append(model.journal.position)
        except (Stuck, RuntimeRefused) as stop:
            ctx.note(f"biases corrected as far as it went: {stop}")
        kept = _keep_best(model, ends, before, error)
        if kept < len(ends) - 1:
            some = f"corrected in {kept} of {len(ends) - 1} layers: more"
            ctx.note(f"biases {some if kept else 'stay: others'} would not lower the error")


def affordable_samples(model: Model, feeds: Feeds, custom_ops: tuple[str, ...]) -> int:
    """How many samples to take, by the time that the first one takes."""
    first = next(iter(feeds), None)
    if first is None:
        return _MOST
    session = Session(model, custom_ops=custom_ops)
    started = time.thread_time()
    session.run(first)
    seconds = time.thread_time() - started
    return min(_MOST, max(_ENOUGH, int(_SECONDS / max(seconds, 1e-9))))


def corrected(
    model: Model,
    layers: list[Biased],
    wanted: Mapping[str, SampleMeans],
    feeds: list[Feed],
    custom_ops: tuple[str, ...],
) -> Iterator[Biased]:
    """Correct the layers one after the other; tells each that was."""
    g = model.graph
    walk = Walk(model, feeds, custom_ops)
    for layer in layers:
        floats = wanted.get(layer.counterpart)
        step = walk.step(layer.value, layer.node, layer.slot)
        if step is None or floats is None:
            continue
        old = layer.bias(g)
        new = _corrected(g, layer, step, floats)
        changed = bool((new != old).any()) and g.begin("correct-bias", layer.layer)
        step.go(new if changed else old)
        if changed:
            layer.put(g, new)
            yield layer
        while walk.nbytes() > _MEMORY and len(walk.kept) > _FEWEST:
            walk.forget_from(max(_FEWEST, len(walk.kept) // 2))


def _corrected(g: Graph, layer: Biased, step: Step, floats: SampleMeans) -> Array:
    """The bias with the least shift. Behind a Relu a part of it is lost: hence several tries."""
    bias = layer.bias(g)
    shift = _shift(layer, step.run(bias), floats)
    for _ in range(_TRIES):
        tried = layer.rounded(g, bias - lasting(shift))[1]
        if not (tried != bias).any():
            break
        after = _shift(layer, step.run(tried), floats)
        if not _size(after) < _size(shift):
            break
        settled = _size(after) > _SETTLED * _size(shift)
        bias, shift = tried, after
        if settled:
            break
    return bias


def _size(shift: Shift) -> float:
    return float((_mean(shift) ** 2).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Shift:
    """How far each channel's mean is from the float model's, for every sample, and its weight."""

    means: Array
    weights: Array


def _shift(layer: Biased, values: list[Array], floats: SampleMeans) -> Shift:
    seen = SampleMeans(layer.value, layer.axis)
    for value in values:
        seen.update(value)
    count = min(len(seen.means), len(floats.means))
    if not count or seen.means[0].shape != floats.means[0].shape:
        raise Stuck(f"'{layer.value}' is not what it is in the float model")
    off = np.array(seen.means[:count]) - np.array(floats.means[:count])
    return Shift(off, np.array(floats.counts[:count], np.float64))


def _mean(shift: Shift, part: slice = slice(None)) -> Array:
    return np.average(shift.means[part], axis=0, weights=shift.weights[part])


def lasting(shift: Shift) -> Array:
    """The mean shift of the channels in which correcting by one half helps the other.

    A shift e of one half, taken from one of d, changes its square by e (e - 2 d).
    """
    whole = _mean(shift)
    if len(shift.means) < 2:
        return whole
    one, other = _mean(shift, slice(0, None, 2)), _mean(shift, slice(1, None, 2))
    return np.where(4 * one * other > one**2 + other**2, whole, 0.0)


def _keep_best(model: Model, ends: list[int], before: float, error: OutputError) -> int:
    """Undo corrections from the end until the outputs are not worse than without any."""
    count = len(ends) - 1
    while count and not error.of(model) <= before:
        count //= 2
        model.journal.undo_to(ends[count])
    return count
