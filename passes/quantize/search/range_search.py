"""Choose the calibration ranges of activations: minimum to maximum, or clipped.

A range that includes a rare large value spends most of its levels on it. Histograms of a few
samples give clipped ranges per tensor: with the least squared error, or up to a percentile. One
method is chosen for all tensors, by the noise of the model's outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from passes.quantize.search.candidate_eval import Trials
from passes.quantize.search.problem import Problem
from toolkit.accuracy.budgets import decibels
from toolkit.calibrate.histogram import Histogram
from toolkit.calibrate.observers import Mse, Observer, Percentile
from toolkit.quantization.plan import Plan, TensorEntry

_OBSERVERS: tuple[Observer, ...] = (Mse(), Percentile(99.99))
_SAMPLES = 16
"""The number of samples of the histograms, whose shape converges quickly."""
_HISTOGRAM_SECONDS, _TRIAL_SECONDS = 2.0, 1.0
"""CPU seconds of running the model for the histograms and for each trial of an observer."""
_SUFFICIENT = 0.5
"""Fraction of the error budget up to which minimum-to-maximum ranges are kept without a search."""
_LESS = 0.5
"""Upper limit of the noise of clipped ranges, relative to that of full ones: 3 dB less. Clipping
affects rare values, such as the detections of a detector: with least-squares ranges and only 1.5 dB
less noise, 6 % instead of 2 % of the detections of YOLOX-nano changed."""


def with_least_noise(trials: Trials, problem: Problem, best: Plan) -> Problem:
    """Return the problem with the least noisy ranges, tried on a plan of the same tensors."""
    ctx = trials.ctx
    if ctx.calibration is None or ctx.evaluator is None or not best.of_scheme("static"):
        return problem
    if trials.used(best) <= _SUFFICIENT:
        return problem
    ctx.progress("choosing ranges", 0.0)
    most = min(_SAMPLES, trials.affordable(_HISTOGRAM_SECONDS))
    data = ctx.calibration.first(most)
    ranged = [entry.tensor for entry in best.tensors]
    seen = data.collect(trials.model, dict.fromkeys(ranged, _OBSERVERS[0])).statistics
    histograms = {name: cast(Histogram, found) for name, found in seen.items()}
    samples = trials.affordable(_TRIAL_SECONDS)
    whole = least = trials.noise(best, samples)
    chosen = best.tensors
    method = ""
    for observer in _OBSERVERS:
        tensors = tuple(_clipped(entry, histograms, observer) for entry in best.tensors)
        noise = trials.noise(replace(best, tensors=tensors), samples)
        if noise < min(least, _LESS * whole):
            least, chosen, method = noise, tensors, observer.name
    if not method:
        return problem
    better = f"{decibels(least):.0f} dB instead of {decibels(whole):.0f} dB"
    ctx.note(f"ranges of activations by observer={method}: the outputs' SQNR is {better} by minmax")
    return replace(problem, plan=replace(problem.plan, tensors=chosen))


def _clipped(
    entry: TensorEntry, histograms: Mapping[str, Histogram], observer: Observer
) -> TensorEntry:
    """Return the entry with the ends of its range moved inwards as far as the observer does."""
    histogram = histograms.get(entry.tensor)
    if histogram is None or entry.low is None or entry.high is None:
        return entry
    kept = observer.range(histogram)
    low = max(entry.low, kept.low) if kept.low > histogram.low else entry.low
    high = min(entry.high, kept.high) if kept.high < histogram.high else entry.high
    return replace(entry, low=low, high=high)
