"""Bias correction: biases compensate the mean error of quantized layers, one layer after another.

    b_c <- b_c - (mean of the quantized layer's output c - mean of the float layer's output c)

Each layer is corrected on the outputs of the corrected layers before it. If all were corrected at
once, each would compensate the errors of its predecessors again. So the samples run through the
quantized model once, step by step (see `stepwise_run`); means of the float model come first.

A channel is corrected if its shift agrees in both halves of the samples, and a layer if that lowers
the error of its means. Corrections are undone from the last layer on until the error of the model's
outputs is no larger than without any. `biases` finds the layers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from passes.quantize.bias_correction.biases import Biased, biased_layers
from passes.quantize.bias_correction.stepwise_run import CannotAdvance, RunStep, StepwiseRun
from passes.quantize.layers.channel_means import SampleMeans
from toolkit.calibrate.collector import observable
from toolkit.calibrate.observers import Collect
from toolkit.calibrate.statistics import Array
from toolkit.errors import RuntimeRefused, UsageError
from toolkit.feeds import Feed
from toolkit.ir import Graph, Model, node as nd
from toolkit.messages import first_of
from toolkit.quantization.plan import Plan
from toolkit.runtime.session import Session
from toolkit.verification.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_MEMORY = 1 << 28
"""The most bytes of values to keep for all samples; beyond this, samples are dropped."""
_FEWEST = 4
_MOST, _SECONDS, _ENOUGH = 12, 0.5, 4
"""The default number of samples, the CPU seconds that one run of them may take, and the fewest
samples of a slow model. Each sample runs about five times."""
_COMPARED = 16
"""The number of samples on which the noise of the outputs is compared."""
_TRIES = 3
"""The most iterations per layer."""
_SETTLED = 0.9
"""Iteration stops when it leaves more than this share of the squared shift."""


@dataclass(frozen=True, slots=True)
class CorrectBias:
    """Correct the biases of quantized layers for the mean error of their outputs."""

    name: ClassVar[str] = "correct-bias"
    tolerance: ClassVar[Tolerance] = QUANT
    samples: int | None = field(
        default=None,
        metadata={"help": "Calibration samples to use; none: 12, or fewer for a slow model."},
    )

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise UsageError(f"correct-bias: samples is {self.samples}; it must be at least 1")

    def run(self, model: Model, ctx: Context) -> None:
        if ctx.calibration is None:
            raise UsageError("correct-bias needs calibration data: name their source with --calib")
        floats = ctx.reference
        if floats is None:
            ctx.note(
                "no float model to compare with: run it in one chain with a pass that quantizes"
            )
            return
        layers, left = biased_layers(model.graph, frozenset(observable(floats)))
        if left:
            names = first_of([nd.label(node) for node in left])
            ctx.note(f"biases not corrected: {names} (the float model has no such value)")
        if not layers:
            return
        data = ctx.calibration.first(self.samples or affordable_samples(model, ctx))
        found = data.collect(
            floats, {layer.counterpart: Collect(SampleMeans, (layer.axis,)) for layer in layers}
        )
        wanted = {name: cast(SampleMeans, means) for name, means in found.statistics.items()}
        feeds = list(data.feeds)
        ends = [model.journal.position]
        before = output_noise(model, ctx)
        try:
            for _ in corrected(model, layers, wanted, feeds, ctx.settings.custom_ops):
                ends.append(model.journal.position)
        except (CannotAdvance, RuntimeRefused) as stop:
            ctx.note(f"bias correction stopped early: {stop}")
        kept = _keep_best(model, ends, before, ctx)
        if kept < len(ends) - 1:
            state = f"corrected in {kept} of {len(ends) - 1} layers" if kept else "unchanged"
            ctx.note(f"biases {state}: more corrections would not lower the error")


def affordable_samples(model: Model, ctx: Context) -> int:
    """Return the number of samples to use, by the run time of the first one."""
    first = next(iter(ctx.calibration.feeds), None) if ctx.calibration is not None else None
    if first is None:
        return _MOST
    session = Session(model, custom_ops=ctx.settings.custom_ops)
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
    """Correct the layers in order; yield each one that changed."""
    g = model.graph
    run = StepwiseRun(model, feeds, custom_ops)
    for layer in layers:
        floats = wanted.get(layer.counterpart)
        step = run.step(layer.value, layer.node, layer.slot)
        if step is None or floats is None:
            continue
        old = layer.bias(g)
        new = _corrected(g, layer, step, floats)
        changed = bool((new != old).any()) and g.begin("correct-bias", layer.layer)
        step.advance(new if changed else old)
        if changed:
            layer.put(g, new)
            yield layer
        while run.nbytes() > _MEMORY and len(run.kept) > _FEWEST:
            del run.kept[max(_FEWEST, len(run.kept) // 2) :]


def _corrected(g: Graph, layer: Biased, step: RunStep, floats: SampleMeans) -> Array:
    """Return the bias with the least shift, by iteration: a Relu masks a part of each change."""
    bias = layer.bias(g)
    shift = _shift(layer, step.run(bias), floats)
    for _ in range(_TRIES):
        tried = layer.rounded(g, bias - lasting(shift))[1]
        if not (tried != bias).any():
            break
        after = _shift(layer, step.run(tried), floats)
        if not after.size < shift.size:
            break
        settled = after.size > _SETTLED * shift.size
        bias, shift = tried, after
        if settled:
            break
    return bias


@dataclass(frozen=True, slots=True, eq=False)
class Shift:
    """The shift of channel means from the float model, per sample, and the samples' weights."""

    means: Array
    weights: Array

    def mean(self, part: slice = slice(None)) -> Array:
        """Return the mean over some samples."""
        return np.average(self.means[part], axis=0, weights=self.weights[part])

    @property
    def size(self) -> float:
        return float((self.mean() ** 2).sum())


def _shift(layer: Biased, values: list[Array], floats: SampleMeans) -> Shift:
    seen = SampleMeans(layer.value, layer.axis)
    for value in values:
        seen.update(value)
    count = min(len(seen.means), len(floats.means))
    if not count or seen.means[0].shape != floats.means[0].shape:
        raise CannotAdvance(f"'{layer.value}' has another shape in the float model")
    off = np.array(seen.means[:count]) - np.array(floats.means[:count])
    return Shift(off, np.array(floats.counts[:count], np.float64))


def lasting(shift: Shift) -> Array:
    """Return the mean shift, or 0 for channels where half of the samples predicts the other badly.

    Correcting a shift d by a shift e changes its square by e (e - 2 d).
    """
    whole = shift.mean()
    if len(shift.means) < 2:
        return whole
    one, other = shift.mean(slice(0, None, 2)), shift.mean(slice(1, None, 2))
    return np.where(4 * one * other > one**2 + other**2, whole, 0.0)


def _keep_best(model: Model, ends: list[int], before: float, ctx: Context) -> int:
    """Undo corrections from the end until the output noise is no larger than without any."""
    count = len(ends) - 1
    while count and not output_noise(model, ctx) <= before:
        count //= 2
        model.journal.undo_to(ends[count])
    return count


def output_noise(model: Model, ctx: Context) -> float:
    """Return the noise of the outputs as deployed; 0 without an evaluator."""
    if ctx.evaluator is None:
        return 0.0
    return ctx.evaluator.evaluate(model, samples=_COMPARED, deployed=True).noise


def is_correctable(plan: Plan, ctx: Context) -> bool:
    """Whether the plan has static layers, and there are data and a float model to correct by."""
    known = ctx.calibration is not None and ctx.reference is not None
    return known and bool(plan.of_scheme("static"))


@dataclass(slots=True)
class Corrections:
    """Bias correction of all candidates for one model on the same samples."""

    _samples: int | None = None

    def make(self, model: Model, ctx: Context) -> None:
        """Correct the biases of one candidate; the first call decides the number of samples."""
        if self._samples is None:
            self._samples = affordable_samples(model, ctx)
        CorrectBias(self._samples).run(model, ctx)
