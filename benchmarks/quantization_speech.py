"""Synthetic speech: glottal pulses filtered by the formants of vowels, fricatives and pauses.

A voice activity model detects the voiced parts as speech, and the pauses as silence.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

RATE = 16000
# The first three formants of English vowels, in hertz.
VOWELS = (
    *((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480)),
    *((570, 840, 2410), (660, 1720, 2410), (490, 1350, 1690)),
)
WIDTHS, GAINS = (80, 100, 150), (1.0, 0.6, 0.35)


def speech(seconds: float, seed: int) -> Array:
    """Return a clip that begins with speech."""
    rng = np.random.default_rng(seed)
    length = int(seconds * RATE)
    pieces: list[Array] = []
    while sum(map(len, pieces)) < length:
        pitch = rng.uniform(90, 220)
        for _ in range(rng.integers(4, 12)):
            pieces += [_consonant(rng), _vowel(rng, pitch)]
        pieces.append(np.zeros(int(rng.uniform(0.6, 2) * RATE)))
    clip = np.concatenate(pieces)[:length]
    return (clip + 0.001 * rng.standard_normal(length)).astype(np.float32)


def _vowel(rng: np.random.Generator, pitch: float) -> Array:
    from scipy.signal import lfilter

    count = int(rng.uniform(0.12, 0.28) * RATE)
    time = np.arange(count) / count
    wander = 1 + 0.01 * rng.standard_normal(count).cumsum() / np.sqrt(count)
    moving = pitch * (1 + 0.15 * np.sin(2 * np.pi * rng.random() + 2 * time)) * wander
    pulses = np.diff(np.floor(np.cumsum(moving) / RATE), prepend=0)
    source = lfilter([1], [1, -1.71, 0.81], pulses) + 0.02 * rng.standard_normal(count)
    formants = np.array(VOWELS[rng.integers(len(VOWELS))]) * rng.uniform(0.95, 1.1)
    sound = np.zeros(count)
    for frequency, width, gain in zip(formants, WIDTHS, GAINS, strict=True):
        decay = np.exp(-np.pi * width / RATE)
        poles = [1, -2 * decay * np.cos(2 * np.pi * frequency / RATE), decay**2]
        sound += gain * np.asarray(lfilter([1 - decay], poles, source))
    sound = np.diff(sound, prepend=0) * np.sqrt(np.sin(np.pi * time))
    return sound / (np.abs(sound).max() + 1e-9) * rng.uniform(0.125, 0.25)


def _consonant(rng: np.random.Generator) -> Array:
    count = int(rng.uniform(0.02, 0.08) * RATE)
    return 0.075 * np.diff(rng.standard_normal(count), prepend=0) * np.hanning(count)
