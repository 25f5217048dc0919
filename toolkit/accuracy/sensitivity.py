"""Quantization sensitivity: the error of each layer alone, and its accumulation along the graph.

`layer_noise` measures the noise at the outputs with a single layer quantized. `value_noise`
measures the noise of every value that both models have, with all layers quantized. Both are noise
power relative to signal power on a few samples; each layer takes one session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import numpy as np

from toolkit.accuracy.budgets import decibels
from toolkit.accuracy.evaluator import Evaluator
from toolkit.accuracy.metrics import Noise
from toolkit.calibrate.collector import BUDGET, Run, observable, pieces_of, sweeps_of
from toolkit.calibrate.statistics import is_float
from toolkit.errors import RuntimeRefused
from toolkit.feeds import Feed
from toolkit.ir.model import Model
from toolkit.verification.compare import json_number

Progress = Callable[[int, int, str], None]
"""Called before each step with (done, total, description)."""

Variant = tuple[str, Callable[[], Model]]
"""A label, and a function that returns the model with only this layer quantized."""


@dataclass(frozen=True, slots=True)
class NoiseRow:
    """The noise of one layer or value; None if the model did not run."""

    label: str
    noise: float | None
    used: float | None = None
    """The fraction of the error budget that a layer uses alone."""
    reason: str = ""

    @property
    def decibels(self) -> float | None:
        return None if self.noise is None else decibels(self.noise)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.label, "decibels": json_number(self.decibels)}
        if self.used is not None:
            found["budget_used"] = json_number(self.used)
        return {**found, "reason": self.reason} if self.reason else found


def layer_noise(
    evaluator: Evaluator,
    variants: Sequence[Variant],
    samples: int,
    progress: Progress | None = None,
) -> list[NoiseRow]:
    """Measure the noise of each variant at the outputs."""
    rows: list[NoiseRow] = []
    for index, (label, make) in enumerate(variants):
        if progress is not None:
            progress(index, len(variants), label)
        try:
            found = evaluator.evaluate(make(), samples=samples)
        except RuntimeRefused as refusal:
            rows.append(NoiseRow(label, None, reason=str(refusal)))
        else:
            rows.append(NoiseRow(label, found.noise, found.used))
    return rows


def value_noise(
    float_model: Model,
    quantized: Model,
    feeds: Iterable[Feed],
    *,
    samples: int,
    custom_ops: Sequence[str] = (),
    budget: int = BUDGET,
) -> list[NoiseRow]:
    """Measure the noise of every value that both models have, in the order of the graph."""
    common = set(observable(quantized)) - set(quantized.graph.inputs)
    names = [name for name in observable(float_model) if name in common]
    chosen = list(islice(feeds, samples))
    noises: dict[str, Noise] = {}
    for sweep in sweeps_of(float_model, chosen, names, budget, custom_ops):
        runs = Run(float_model, sweep, custom_ops), Run(quantized, sweep, custom_ops)
        for index, feed in enumerate(chosen):
            _compare(dict(runs[0](feed, index)), dict(runs[1](feed, index)), noises)
    return [NoiseRow(name, noises[name].loss()) for name in names if name in noises]


def _compare(
    reference: Mapping[str, Any], actual: Mapping[str, Any], noises: dict[str, Noise]
) -> None:
    for name, value in reference.items():
        if isinstance(value, (list, dict)) or isinstance(actual[name], (list, dict)):
            continue
        pieces, others = pieces_of(value), pieces_of(actual[name])
        for piece, other in zip_longest(pieces, others, fillvalue=np.empty(0, np.float32)):
            if not is_float(piece) or not is_float(other) or not (piece.size or other.size):
                continue
            noise = noises.setdefault(name, Noise())
            if piece.shape == other.shape:
                noise.add(piece.reshape(-1, 1), other.reshape(-1, 1))
            else:
                noise.add_incomparable()
