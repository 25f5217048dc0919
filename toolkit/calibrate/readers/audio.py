"""Folders of .wav files: PCM of 8 to 32 bits, as one channel of floats from -1 to 1."""

from __future__ import annotations

import wave
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.calibrate.readers.fit import describe
from toolkit.calibrate.readers.reader import file_bytes
from toolkit.calibrate.statistics import Array
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import FLOATS


@dataclass(frozen=True, slots=True)
class AudioOptions:
    """How clips are read."""

    rate: int | None = None
    """Samples a second that every file must have; nothing is resampled."""
    seconds: float = 30.0
    """What is read of a clip at most, where the model leaves the length open."""

    def __post_init__(self) -> None:
        if not self.seconds > 0 or (self.rate is not None and self.rate < 1):
            raise UsageError("the rate and the seconds of audio must be above 0")


class AudioFolder:
    """Clips, one file a sample.

    A model of fixed length gets each clip in windows of that length, without overlap: what is left
    at the end is dropped, and a clip that is shorter is padded with silence.
    """

    def __init__(self, files: Sequence[Path], model: Model, options: AudioOptions) -> None:
        self.notes: list[str] = []
        self._files, self._options = files, options
        graph = model.graph
        if len(graph.feeds) != 1:
            listed = ", ".join(graph.feeds) or "nothing"
            raise UsageError(
                f"sounds fit a model with one input, this takes {listed}; use module:function"
            )
        self._name = graph.feeds[0]
        declared = graph.type(self._name)
        sizes = declared.shape if declared is not None else None
        others = [d for d in (sizes or ())[:-1] if isinstance(d, int) and d != 1]
        if declared is None or declared.dtype not in FLOATS or not sizes or others:
            raise UsageError(f"input '{self._name}' takes no clip: it is {describe(declared)}")
        self._rank = len(sizes)
        last = sizes[-1]
        self._length = last if isinstance(last, int) and last > 0 else None

    def count(self) -> int | None:
        return len(self._files) if self._length is None else None

    def fingerprint(self) -> Iterable[bytes] | None:
        yield repr((self._options, self._length)).encode()
        yield from file_bytes(self._files)

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for path in self._files:
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
            raise UsageError(f"'{path}' is no .wav file of plain PCM: {error}") from error


def _decode(data: bytes, clip: wave.Wave_read) -> Array:
    """Floats from -1 to 1, the mean of all channels."""
    width, channels = clip.getsampwidth(), clip.getnchannels()
    raw = np.frombuffer(data, np.uint8)
    raw = raw[: raw.size // (width * channels) * width * channels].reshape(-1, width)
    if width == 1:  # the only unsigned format
        values = raw[:, 0].astype(np.float64) / 128 - 1
    else:
        padded = np.zeros((raw.shape[0], 4), np.uint8)
        padded[:, 4 - width :] = raw  # at the top, so that the sign is where it belongs
        values = padded.view("<i4")[:, 0].astype(np.float64) / 2.0**31
    return values.reshape(-1, channels).mean(axis=1).astype(np.float32)
