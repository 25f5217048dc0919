"""Folders of .wav files."""

from __future__ import annotations

import wave

import numpy as np
import pytest

from tests.toolkit.calibrate.readers.reading import (
    LENGTHS,
    TWO,
    read,
    refused,
)
from toolkit.calibrate.readers.audio import AudioOptions


def write_wav(path, values, width=2, channels=1, rate=16000):
    with wave.open(str(path), "wb") as clip:
        clip.setnchannels(channels)
        clip.setsampwidth(width)
        clip.setframerate(rate)
        clip.writeframes(values)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_sound_of_every_width(tmp_path, width):
    half = 1 << (8 * width - 2)
    numbers = [192, 64] if width == 1 else [half, -half]
    data = b"".join(n.to_bytes(width, "little", signed=width > 1) for n in numbers)
    write_wav(tmp_path / "a.wav", data, width)
    np.testing.assert_allclose(read(tmp_path, LENGTHS)[0]["x"], [[0.5, -0.5]], rtol=1e-6)


def test_sound_in_windows_and_channels(tmp_path):
    write_wav(tmp_path / "a.wav", np.arange(10, dtype="<i2").tobytes())
    write_wav(tmp_path / "b.wav", np.array([[100, 300]], "<i2").tobytes(), channels=2)
    text = "g (float[N,1,4] x) => (float[N,1,4] y) { y = Relu(x) }"
    feeds = read(tmp_path, text)
    assert len(feeds) == 3
    np.testing.assert_allclose(feeds[1]["x"][0, 0] * 2**15, [4, 5, 6, 7])
    np.testing.assert_allclose(feeds[2]["x"][0, 0] * 2**15, [200, 0, 0, 0])


def test_sound_that_does_not_fit(tmp_path):
    write_wav(tmp_path / "a.wav", np.arange(10, dtype="<i2").tobytes(), rate=8000)
    assert "has 8000 Hz, not 16000" in refused(tmp_path, LENGTHS, audio=AudioOptions(rate=16000))
    assert "one input; it takes x, k: use .npz or module:function" in refused(tmp_path, TWO)
    write_wav(tmp_path / "a.wav", b"")
    assert "is empty" in refused(tmp_path, LENGTHS)
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    assert "not a .wav file" in refused(tmp_path, LENGTHS)
