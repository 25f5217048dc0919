"""The default error budgets: one table, with a row for each kind of output.

Losses are fractions: the fraction of changed predictions for classes and integers, 1 - cosine for
embeddings, and noise power over signal power for numbers (0.01 is an SQNR of 20 dB). For small
noise 1 - cosine is half of the latter: budgets of different kinds are comparable.

The budgets accept every good int8 model and reject every collapsed one. Measured on real samples,
with the loss of accuracy in percentage points where there are labels:

    model                               good                       collapsed
    MiniLM, sentence embeddings         cosine 0.993, dynamic      0.803 (2.6 points), static
    keyword spotting, weighted flips    0.6 % (0 to 0.2 points)    5.5 % (8.8), 5-bit weights
    MNIST, weighted flips               0.1 % (0 points)           2.4 % (3.7), 3-bit weights
    text recognition, probabilities     23 dB (0 points of lines)  7 dB (66), static
    YOLOX-nano, scores                  20 dB, F1 95 %             1 dB, F1 38 %, all int8
    silero-vad, state after 8 windows   30 dB, 8-bit weights       -3.5 dB, dynamic convolutions
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["classes", "text", "scores", "embedding", "regression", "state", "exact"]
"""The kind of an output: see `toolkit.accuracy.output_kinds`."""

Measure = Literal[
    "top1", "answers", "decisions", "cosine", "sqnr", "variance", "agreement", "error", "score"
]
"""The measure of a loss: see `toolkit.accuracy.metrics`."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest loss allowed by one measure, and the reason for it."""

    measure: Measure
    loss: float
    reason: str


BUDGETS: dict[Kind, tuple[Limit, ...]] = {
    "classes": (
        Limit("top1", 0.01, "weighted flips: 0.6 % cost no accuracy, 2.4 % cost 3 points"),
        Limit("answers", 0.1, "weighted flips are blind if all margins are small: 90 % must agree"),
        Limit("sqnr", 0.1, "flips are blind if all samples are of one class: 10 dB"),
    ),
    "text": (
        Limit("top1", 0.01, "as for classes"),
        Limit("sqnr", 0.01, "of probabilities; 20 dB loses 0.4 % of the lines, 19 dB 0.9 %"),
    ),
    "scores": (
        Limit("decisions", 0.01, "each score is a decision at 0.5, as for classes"),
        Limit("sqnr", 0.012, "detections that differ from float: 8 % at 17 dB, 5 % at 20 dB"),
        Limit("variance", 0.2, "the differences between samples must remain"),
    ),
    "embedding": (
        Limit("cosine", 0.02, "similarities change by about its square root, and rankings hold"),
        Limit("variance", 0.2, "nearly parallel vectors differ only by small components"),
    ),
    "regression": (
        Limit("sqnr", 0.01, "20 dB, a tenth of the signal's amplitude: good int8 models meet it"),
        Limit("variance", 0.1, "if values hardly vary, even a constant has a high SQNR"),
    ),
    "state": (Limit("sqnr", 0.1, "10 dB after several steps: a growing error far exceeds it"),),
    "exact": (Limit("agreement", 0.02, "integers are decisions of the model, as for classes"),),
}

_REAL_DEVIATIONS, _SYNTHETIC_DEVIATIONS = 1.0, 3.0
"""Flips may exceed their budget by this many standard deviations of chance, on real samples and on
synthetic inputs, where margins are small."""

DECIDED = 0.5
"""From this margin on, relative to the spread of all classes, a flip counts fully; smaller margins
count in proportion. Random numbers have a mean margin of 0.25."""

MIN_VARYING = 1e-8
"""Below this variance, relative to the signal's power, variation is rounding noise."""


def decibels(loss: float) -> float:
    """Return the SQNR in dB of a noise power relative to the signal."""
    return -10 * math.log10(loss) if loss > 0 else math.inf


def chance(loss: float, count: int, real: bool = True) -> float:
    """Return the loss that `count` predictions may show by chance if their true loss is `loss`."""
    deviations = _REAL_DEVIATIONS if real else _SYNTHETIC_DEVIATIONS
    return loss + deviations * math.sqrt(loss * (1 - loss) / count) if count else loss
