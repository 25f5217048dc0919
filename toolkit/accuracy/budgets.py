"""How much a model may lose when nobody says: one table, a row for each kind of output.

Losses are shares. Of classes and integers it is the share of answers that changed; of embeddings
1 - cosine; of numbers the power of the noise in that of the signal, 0.01 for an SQNR of 20 dB. For
small noise 1 - cosine is half of the latter, so that one number means much the same in each.

The rows are meant to let every good int8 model through, and no collapsed one. Measured on real
samples, with what it cost in accuracy where there are labels:

    model                               good                       collapsed
    MiniLM, sentence embeddings         cosine 0.993, dynamic      0.803 (2.6 points), static
    keyword spotting, flips by weight   0.6 % (0 to 0.2 points)    5.5 % (8.8), weights of 5 bits
    MNIST, flips by weight              0.1 % (0 points)           2.4 % (3.7), weights of 3 bits
    text reader, shares of classes      23 dB (0 points of lines)  7 dB (66), static
    YOLOX-nano, scores                  20 dB, F1 95 %             1 dB, F1 38 %, all int8
    silero-vad, state after 8 windows   30 dB, weights of 8 bits   -3.5 dB, dynamic convolutions
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["classes", "text", "scores", "embedding", "regression", "state", "exact"]
"""What an output is: see `toolkit.quality.kinds`."""

Measure = Literal[
    "top1", "answers", "decisions", "cosine", "sqnr", "variance", "agreement", "error", "score"
]
"""What is measured of it: see `toolkit.quality.measures`."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The loss that one measure allows, and why so much."""

    measure: Measure
    loss: float
    reason: str


BUDGETS: dict[Kind, tuple[Limit, ...]] = {
    "classes": (
        Limit("top1", 0.01, "by weight, what costs no accuracy flips 0.6 %, 3 points cost 2.4 %"),
        Limit("answers", 0.1, "where all is a close call, weights say little: 90 % stay as is"),
        Limit("sqnr", 0.1, "flips say nothing where the samples are all of one class: 10 dB"),
    ),
    "text": (
        Limit("top1", 0.01, "as of classes"),
        Limit("sqnr", 0.01, "20 dB of shares: of lines 0.4 points are lost, at 19 dB 0.9"),
    ),
    "scores": (
        Limit("decisions", 0.01, "each score is an answer at one half, as of classes"),
        Limit("sqnr", 0.012, "of detections at 17 dB 8 % are other than in floats, at 20 dB 5 %"),
        Limit("variance", 0.2, "what tells samples apart must be left"),
    ),
    "embedding": (
        Limit("cosine", 0.02, "similarities move by about the square root of it: ranks hold"),
        Limit("variance", 0.2, "vectors that all point one way are told apart by what is left"),
    ),
    "regression": (
        Limit("sqnr", 0.01, "20 dB: a tenth of the signal's size, what int8 keeps when it works"),
        Limit("variance", 0.1, "a constant has a high SQNR where the values hardly vary"),
    ),
    "state": (
        Limit("sqnr", 0.1, "10 dB after several steps: an error that grows is far above it"),
    ),
    "exact": (Limit("agreement", 0.02, "integers of a decision inside the model, as for classes"),),
}

UNSURE, UNSURE_MADE_UP = 1.0, 3.0
"""Standard deviations of chance that flips may exceed their budget by: on real samples, and on
made-up ones, of which a model need not be sure at all."""

DECIDED = 0.5
"""A class leads for sure when its margin is this share of the spread of all; flips of a lesser one
count in proportion. Between classes of random numbers the mean margin is a quarter."""

LEAST_VARYING = 1e-8
"""Variance in the power of a signal from which on it is looked at by itself: less is rounding."""


def decibels(loss: float) -> float:
    """The SQNR of a share of noise."""
    return -10 * math.log10(loss) if loss > 0 else math.inf


def chance(loss: float, count: int, real: bool = True) -> float:
    """The flips that `count` answers may have when a budget of `loss` is kept on the whole."""
    deviations = UNSURE if real else UNSURE_MADE_UP
    return loss + deviations * math.sqrt(loss * (1 - loss) / count) if count else loss
