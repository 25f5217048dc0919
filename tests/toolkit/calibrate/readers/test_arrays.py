"""Calibration arrays: an .npz of many samples, folders of feeds, and their conversion."""

from __future__ import annotations

import numpy as np
import pytest

from tests.checks import model
from tests.toolkit.calibrate.readers.reading import (
    BATCH_OF_2,
    DYNAMIC,
    LENGTHS,
    TWO,
    ramp,
    read,
    refused,
)
from toolkit.calibrate.readers import reader_for


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_split_into_samples(tmp_path, save):
    save(tmp_path / "a.npz", x=ramp(5, 3))
    feeds = read(tmp_path / "a.npz")
    assert [feed["x"].shape for feed in feeds] == [(1, 3)] * 5
    np.testing.assert_array_equal(np.concatenate([f["x"] for f in feeds]), ramp(5, 3))


def test_npz_is_split_into_fixed_batches(tmp_path):
    np.savez(tmp_path / "a.npz", x=ramp(5, 3), label=np.arange(5))
    reader = reader_for(tmp_path / "a.npz", model(BATCH_OF_2))
    assert [feed["x"].shape for feed in reader] == [(2, 3)] * 2
    assert reader.notes == [
        "'label' is not an input of the model and was ignored",
        "'x': the last 1 samples do not fill a batch of 2",
    ]


def test_npz_in_column_order(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.asfortranarray(ramp(4, 3)))
    np.testing.assert_array_equal(read(tmp_path / "a.npz")[2]["x"], ramp(4, 3)[2:3])


def test_npz_with_a_whole_input_per_sample_and_a_scalar(tmp_path):
    text = "g (float[2,3] x, int64 k) => (float[2,3] y, int64 z) { y = Relu(x) z = Identity(k) }"
    np.savez(tmp_path / "a.npz", x=ramp(4, 2, 3), k=np.int64(7))
    feeds = read(tmp_path / "a.npz", text)
    assert len(feeds) == 4
    np.testing.assert_array_equal(feeds[3]["x"], ramp(4, 2, 3)[3])
    assert feeds[3]["k"] == 7


def test_npz_at_most(tmp_path):
    np.savez(tmp_path / "a.npz", x=ramp(5, 3))
    assert len(read(tmp_path / "a.npz", most=2)) == 2
    assert "1 or more" in refused(tmp_path / "a.npz", most=0)


def test_npz_that_does_not_fit(tmp_path):
    path = tmp_path / "a.npz"

    def message(text=DYNAMIC, **arrays):
        np.savez(path, **arrays)
        return refused(path, text)

    assert "lacks input 'k'; the model takes: x float32[N, 3], k int64[N]" in message(
        TWO, x=ramp(2, 3)
    )
    assert "'x' has rank 4; the model takes float32[N, 3]" in message(x=ramp(2, 3, 4, 5))
    assert "'x' has shape [1, 4]" in message(x=ramp(2, 4))
    assert "'x' is complex64; the model takes float32[N, 3]" in message(
        x=np.zeros((2, 3), np.complex64)
    )
    assert "'x' has no sample" in message(x=np.zeros((0, 3), np.float32))
    assert "NaN or Inf" in message(x=np.full((1, 3), np.nan, np.float32))
    assert "feed 1: 'x' has NaN or Inf" in message(x=np.array([[0.0] * 3, [np.inf] * 3]))
    assert "does not fit into float32" in message(x=np.full((1, 3), 1e300))
    assert "'k' makes 3 feeds, 'x' 2" in message(TWO, x=ramp(2, 3), k=np.arange(3))
    assert "not an .npz file of plain arrays" in message(x=np.array([None, {}]))
    assert "lacks input 'x'" in message(y=ramp(2, 3))
    assert "'x' has 1 samples; the model's batch is 2" in message(BATCH_OF_2, x=ramp(1, 3))


def test_damaged_files(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"no archive")
    assert "not an .npz file" in refused(tmp_path / "a.npz")
    assert "does not exist" in refused(tmp_path / "b.npz")
    (tmp_path / "c.xyz").write_bytes(b"")
    assert "has an unknown format" in refused(tmp_path / "c.xyz")
    assert "cannot be read from a int" in refused(3)


def test_casts(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=ramp(2, 3, dtype=np.float64), k=np.arange(2, dtype=np.int8))
    feed = read(path, TWO)[1]
    assert (feed["x"].dtype, feed["k"].dtype) == (np.float32, np.int64)
    np.savez(path, x=ramp(1, 3), k=np.array([2**63], np.uint64))
    assert "uint64 with values that int64 cannot hold" in refused(path, TWO)
    np.savez(path, x=ramp(1, 3), k=np.array([1.0]))
    assert "'k' is float64; the model takes int64[N]" in refused(path, TWO)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.bool_, np.int64])
def test_integers_for_floats_are_not_scaled(tmp_path, dtype):
    path = tmp_path / "a.npz"
    pixels = np.array([[0, 1, 100], [127, 3, 4]]).astype(dtype)
    np.savez(path, x=pixels)
    reader = reader_for(path, model(DYNAMIC))
    feeds = list(reader)
    assert all(feed["x"].dtype == np.float32 for feed in feeds)
    np.testing.assert_array_equal(np.concatenate([f["x"] for f in feeds]), pixels)
    said = f"'x' holds {np.dtype(dtype)}: its numbers are not scaled"
    assert list(reader.notes) == [said], "once, and not for every sample"


def test_integers_that_floats_cannot_represent_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.array([[0, 2**24, -(2**24)]]))
    assert read(path)[0]["x"].tolist() == [[0, 2.0**24, -(2.0**24)]]
    for large in (2**24 + 1, -(2**24) - 1, -(2**63)):
        np.savez(path, x=np.array([[0, large, 1]]))
        assert "is int64 with values that float32 does not hold exactly" in refused(path)
    half = "g (float16[N,3] x) => (float16[N,3] y) { y = Relu(x) }"
    np.savez(path, x=np.array([[0, 255, 2048]], np.uint16))
    assert read(path, half)[0]["x"].tolist() == [[0, 255, 2048]]
    np.savez(path, x=np.array([[0, 255, 2049]], np.uint16))
    assert "float16 does not hold exactly" in refused(path, half)


def test_feeds_without_elements():
    text = "g (float[N,T] x, float[N,P] past) => (float[N,T] y) { y = Relu(x) z = Relu(past) }"
    empty = np.zeros((1, 0), np.float32)
    assert read([{"x": ramp(1, 2), "past": empty}], text)[0]["past"].shape == (1, 0)
    assert "feed 0 is empty" in refused([{"x": empty, "past": empty}], text)
    assert "'x' is empty: it has shape [0, 3]" in refused([{"x": np.zeros((0, 3), np.float32)}])


def test_folder_of_feeds_of_different_lengths(tmp_path):
    for length in (3, 5, 2):
        np.savez(tmp_path / f"{length}.npz", x=ramp(1, length))
    assert [feed["x"].shape[1] for feed in read(tmp_path, LENGTHS)] == [2, 3, 5]


def test_folder_of_npy(tmp_path):
    np.save(tmp_path / "a.npy", ramp(4, 3))
    assert read(tmp_path)[0]["x"].shape == (4, 3)
    assert "is one array, and the model takes x, k" in refused(tmp_path, TWO)
    np.save(tmp_path / "b.npy", ramp(3))
    assert "b.npy': 'x' has rank 1; the model takes float32[N, 3]" in refused(tmp_path)


def test_ambiguous_folders_are_refused(tmp_path):
    assert "holds no .npz, .npy, image or .wav" in refused(tmp_path)
    (tmp_path / "a.png").write_bytes(b"")
    np.save(tmp_path / "a.npy", ramp(1, 3))
    assert "holds arrays and images; keep one kind" in refused(tmp_path)
