"""Where quantization hurts: each layer alone, and the error as it adds up along the graph.

Alone: the noise at the outputs when one layer is quantized and all others are floats. Added up: the
noise of every value that both models have, when all layers are quantized. Both are noise power in
signal power on a few samples; a layer costs one session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import numpy as np

from toolkit.accuracy.budgets import decibels
from toolkit.accuracy.evaluator import Judge
from toolkit.accuracy.metrics import Noise
from toolkit.calibrate.collector import BUDGET, Run, observable, pieces_of, sweeps_of
from toolkit.calibrate.statistics import is_float
from toolkit.errors import RuntimeRefused
from toolkit.feeds import Feed
from toolkit.ir.model import Model
from toolkit.verification.compare import json_number

Progress = Callable[[int, int, str], None]
"""Told before each step: (done, total, what)."""

Variant = tuple[str, Callable[[], Model]]
"""A label, and what makes the model that has only this quantized."""


@dataclass(frozen=True, slots=True)
class Row:
    """One layer or value: the noise it has, None where the model did not run."""

    label: str
    noise: float | None
    used: float | None = None
    """Of a layer, the share of the budget that it uses up alone."""
    reason: str = ""

    @property
    def decibels(self) -> float | None:
        return None if self.noise is None else decibels(self.noise)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.label, "decibels": json_number(self.decibels)}
        if self.used is not None:
            found["budget_used"] = json_number(self.used)
        return {**found, "reason": self.reason} if self.reason else found


def alone(
    judge: Judge, variants: Sequence[Variant], samples: int, progress: Progress | None = None
) -> list[Row]:
    """What each variant does to the outputs."""
    rows: list[Row] = []
    for index, (label, make) in enumerate(variants):
        if progress is not None:
            progress(index, len(variants), label)
        try:
            found = judge.verdict(make(), samples=samples)
        except RuntimeRefused as refusal:
            rows.append(Row(label, None, reason=str(refusal)))
        else:
            rows.append(Row(label, found.noise, found.used))
    return rows


def added_up(
    floats: Model,
    quantized: Model,
    feeds: Iterable[Feed],
    *,
    samples: int,
    custom_ops: Sequence[str] = (),
    budget: int = BUDGET,
) -> list[Row]:
    """The noise of every value that both models have, in the order of the graph."""
    common = set(observable(quantized)) - set(quantized.graph.inputs)
    names = [name for name in observable(floats) if name in common]
    chosen = list(islice(feeds, samples))
    noises: dict[str, Noise] = {}
    for sweep in sweeps_of(floats, chosen, names, budget, custom_ops):
        runs = Run(floats, sweep, custom_ops), Run(quantized, sweep, custom_ops)
        for index, feed in enumerate(chosen):
            _compare(dict(runs[0](feed, index)), dict(runs[1](feed, index)), noises)
    return [Row(name, noises[name].loss()) for name in names if name in noises]


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
                noise.miss()
