"""Ranges of activations: all that was seen, or less where less makes less noise.

A range that holds a rare large value spends its levels on it. Where to cut is read off histograms
of some samples, tensor by tensor: at the least squared error, or beyond nearly all values. What a
cut does to the outputs only they can tell: of these ways and the whole ranges, the one with the
least noise in the outputs is taken, for all tensors alike.
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

_WAYS: tuple[Observer, ...] = (Mse(), Percentile(99.99))
_SAMPLES = 16
"""Histograms take long to gather, and the shape of one is known soon."""
_GATHERING, _SECONDS = 2.0, 1.0
"""Of a slow model fewer samples are taken: what running it may take, for histograms and for each
way to be tried."""
_PLENTY = 0.5
"""The share of the budget that whole ranges may use up without others being looked for."""
_LESS = 0.5
"""The share of the noise of whole ranges that a cut must stay below: 3 dB. A cut is at the expense
of what is rare, such as what a detector is there for: with 1.5 dB less noise by least squares, 6 %
of the detections of YOLOX-nano were others than in floats, in place of 2 %."""


def with_least_noise(trials: Trials, problem: Problem, best: Plan) -> Problem:
    """Return the problem with the least noisy ranges, tried on a plan of the same tensors."""
    ctx = trials.ctx
    if ctx.calibration is None or ctx.evaluator is None or not best.of_scheme("static"):
        return problem
    if trials.used(best) <= _PLENTY:
        return problem
    ctx.progress("choosing ranges", 0.0)
    most = min(_SAMPLES, trials.affordable(_GATHERING))
    data = ctx.calibration.first(most)
    ranged = [entry.tensor for entry in best.tensors]
    seen = data.collect(trials.model, dict.fromkeys(ranged, _WAYS[0])).statistics
    histograms = {name: cast(Histogram, found) for name, found in seen.items()}
    samples = trials.affordable(_SECONDS)  # more than the cut was made for, if it can be
    whole = least = trials.noise(best, samples)
    chosen = best.tensors
    way = ""
    for observer in _WAYS:
        tensors = tuple(_cut(entry, histograms, observer) for entry in best.tensors)
        noise = trials.noise(replace(best, tensors=tensors), samples)
        if noise < min(least, _LESS * whole):
            least, chosen, way = noise, tensors, observer.name
    if not way:
        return problem
    better = f"{decibels(least):.0f} dB instead of {decibels(whole):.0f} dB"
    ctx.note(f"ranges of activations by observer={way}: the outputs' SQNR is {better} by minmax")
    return replace(problem, plan=replace(problem.plan, tensors=chosen))


def _cut(
    entry: TensorEntry, histograms: Mapping[str, Histogram], observer: Observer
) -> TensorEntry:
    """The entry with those ends of its range moved in that the observer moves."""
    histogram = histograms.get(entry.tensor)
    if histogram is None or entry.low is None or entry.high is None:
        return entry
    kept = observer.range(histogram)
    low = max(entry.low, kept.low) if kept.low > histogram.low else entry.low
    high = min(entry.high, kept.high) if kept.high < histogram.high else entry.high
    return replace(entry, low=low, high=high)
