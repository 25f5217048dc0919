"""Folders of .wav files: PCM of 8 to 32 bits, mixed down to one channel in [-1, 1]."""

from __future__ import annotations

import wave
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.calibrate.readers.reader import FileSource, sole_input
from toolkit.calibrate.statistics import Array
from toolkit.errors import UsageError
from toolkit.feeds.user_samples import describe
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import FLOATS


@dataclass(frozen=True, slots=True)
class AudioOptions:
    """How clips are read."""

    rate: int | None = None
    """The sample rate in Hz that every file must have; nothing is resampled."""
    seconds: float = 30.0
    """The longest clip in seconds, for a model with a dynamic length."""

    def __post_init__(self) -> None:
        if not self.seconds > 0 or (self.rate is not None and self.rate < 1):
            raise UsageError("the rate and the seconds of audio must be above 0")


class AudioFolder(FileSource):
    """A folder of clips, one sample per file.

    For a model with a fixed length, each clip is split into windows of that length without overlap:
    the remainder is dropped, and a shorter clip is padded with silence.
    """

    def __init__(self, files: Sequence[Path], model: Model, options: AudioOptions) -> None:
        self._options = options
        self._name = sole_input(model, "sounds")
        declared = model.graph.type(self._name)
        sizes = declared.shape if declared is not None else None
        others = [d for d in (sizes or ())[:-1] if isinstance(d, int) and d != 1]
        if declared is None or declared.dtype not in FLOATS or not sizes or others:
            raise UsageError(
                f"input '{self._name}' does not take audio: it is {describe(declared)}"
            )
        self._rank = len(sizes)
        last = sizes[-1]
        self._length = last if isinstance(last, int) and last > 0 else None
        super().__init__(files, options, self._length)

    def count(self) -> int | None:
        return len(self.files) if self._length is None else None

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for path in self.files:
            for window in self._windows(path):
                shaped = window.reshape((1,) * (self._rank - 1) + (-1,))
                yield f"'{path}'", {self._name: shaped}

    def _windows(self, path: Path) -> Iterator[Array]:
        try:
            with wave.open(str(path), "rb") as clip:
                rate, frames = clip.getframerate(), clip.getnframes()
                if self._options.rate not in (None, rate):
                    wanted = self._options.rate
                    raise UsageError(f"'{path}' has {rate} Hz, not {wanted}; resample it")
                if not frames:
                    raise UsageError(f"'{path}' is empty: it has no samples")
                size = self._length or max(int(self._options.seconds * rate), 1)
                whole = max(frames // size, 1) if self._length is not None else 1
                for _ in range(whole):
                    window = _decode(clip.readframes(size), clip)
                    short = (self._length or window.size) - window.size
                    yield np.pad(window, (0, short)) if short > 0 else window
        except (wave.Error, EOFError, OSError) as error:
            raise UsageError(f"'{path}' is not a .wav file of plain PCM: {error}") from error


def _decode(data: bytes, clip: wave.Wave_read) -> Array:
    """Return the mean of all channels as floats in [-1, 1]."""
    width, channels = clip.getsampwidth(), clip.getnchannels()
    raw = np.frombuffer(data, np.uint8)
    raw = raw[: raw.size // (width * channels) * width * channels].reshape(-1, width)
    if width == 1:  # the only unsigned format
        values = raw[:, 0].astype(np.float64) / 128 - 1
    else:
        padded = np.zeros((raw.shape[0], 4), np.uint8)
        padded[:, 4 - width :] = raw  # in the most significant bytes, to keep the sign
        values = padded.view("<i4")[:, 0].astype(np.float64) / 2.0**31
    return values.reshape(-1, channels).mean(axis=1).astype(np.float32)
