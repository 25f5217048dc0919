"""Folders of images: layouts, preprocessing, and options for other kinds of samples."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from tests.checks import model
from tests.toolkit.calibrate.readers.reading import (
    TWO,
    read,
    refused,
)
from toolkit.calibrate.readers import ReaderOptions, reader_for
from toolkit.calibrate.readers.audio import AudioOptions
from toolkit.calibrate.readers.images import Preprocess
from toolkit.calibrate.readers.text import TextOptions
from toolkit.errors import UsageError

NCHW = "g (float[N,3,4,6] x) => (float[N,3,4,6] y) { y = Relu(x) }"
NHWC = "g (float[1,4,6,3] x) => (float[1,4,6,3] y) { y = Relu(x) }"


@pytest.fixture
def photos(tmp_path):
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "photos"
    (folder / "cats").mkdir(parents=True)
    pixels = np.zeros((8, 12, 3), np.uint8)
    pixels[..., 0] = 255
    image.fromarray(pixels).save(folder / "cats" / "red.png")
    image.fromarray(np.full((30, 20), 51, np.uint8)).save(folder / "grey.png")
    return folder


def test_images_in_both_layouts(photos):
    feeds = read(photos, NCHW)
    assert [feed["x"].shape for feed in feeds] == [(1, 3, 4, 6)] * 2
    np.testing.assert_allclose(feeds[0]["x"][0, :, 2, 2], [1, 0, 0])
    np.testing.assert_allclose(feeds[1]["x"], 0.2, rtol=1e-6)
    assert read(photos, NHWC)[0]["x"].shape == (1, 4, 6, 3)


def test_images_of_the_imagenet_preset(photos):
    red = read(photos, NCHW, images=Preprocess.preset("imagenet"))[0]["x"]
    wanted = [(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]
    np.testing.assert_allclose(red[0, :, 1, 3], wanted, rtol=1e-5)
    with pytest.raises(UsageError, match="there is imagenet"):
        Preprocess.preset("coco")


def test_letterboxed_images_in_bgr(photos):
    options = Preprocess(fit="letterbox", scale=1.0, channels="bgr")
    text = "g (float[1,3,4,4] x) => (float[1,3,4,4] y) { y = Relu(x) }"
    red = read(photos, text, images=options)[0]["x"]
    np.testing.assert_allclose(red[0, :, 0, 0], [0, 0, 255])
    np.testing.assert_allclose(red[0, :, 3, 3], 114)


def test_a_crop_keeps_the_center(photos):
    """The shorter side becomes 4; of 4x6 pixels, the 4x4 in the center are left."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.zeros((4, 6), np.uint8)
    pixels[:, 0], pixels[:, 5] = 255, 255  # cut off
    pixels[:, 1] = 100
    image.fromarray(pixels).save(photos / "cats" / "red.png")
    text = "g (float[N,1,4,4] x) => (float[N,1,4,4] y) { y = Relu(x) }"
    options = Preprocess(fit="crop", resize=4, scale=1.0)
    [cropped, _] = read(photos, text, images=options)
    np.testing.assert_array_equal(cropped["x"][0, 0], [[100, 0, 0, 0]] * 4)


def test_a_crop_larger_than_the_resized_image_enlarges_it(photos):
    text = "g (float[N,3,16,4] x) => (float[N,3,16,4] y) { y = Relu(x) }"
    [red, grey] = read(photos, text, images=Preprocess(fit="crop", resize=4))
    np.testing.assert_allclose(red["x"][0, :, 8, 2], [1, 0, 0])
    np.testing.assert_allclose(grey["x"], 0.2, rtol=1e-6)


def test_mean_and_std_of_each_channel_of_the_last_axis(photos):
    options = Preprocess(mean=(0.0, 1.0, 2.0), std=(1.0, 2.0, 4.0))
    [red, _] = read(photos, NHWC, images=options)
    np.testing.assert_allclose(red["x"][0, 1, 1], [1, -0.5, -0.5])


def test_half_precision_inputs_get_floats_of_their_type(photos):
    text = "g (float16[N,3,2,2] x) => (float16[N,3,2,2] y) { y = Relu(x) }"
    assert read(photos, text)[0]["x"].dtype == np.float16


def test_images_as_uint8_with_one_channel_and_a_batch(photos):
    text = "g (uint8[2,1,H,W] x) => (uint8[2,1,H,W] y) { y = Identity(x) }"
    feeds = read(photos, text, images=Preprocess(size=(5, 7)))
    assert feeds[0]["x"].shape == (2, 1, 5, 7)
    assert feeds[0]["x"].dtype == np.uint8
    np.testing.assert_array_equal(feeds[0]["x"][1], 51)


def test_assumed_preprocessing_is_noted(photos):
    open_size = "g (float[N,3,H,W] x) => (float[N,3,H,W] y) { y = Relu(x) }"
    scaled, resized = reader_for(photos, model(open_size)).notes
    assert "images are read as 0 to 1, without mean and std" in scaled
    assert "images are resized to 224x224" in resized
    assert len(reader_for(photos, model(NCHW)).notes) == 1, "the model tells the size"
    told = Preprocess(size=(8, 8), scale=1.0)
    assert not reader_for(photos, model(open_size), ReaderOptions(images=told)).notes
    as_bytes = "g (uint8[N,3,4,6] x) => (uint8[N,3,4,6] y) { y = Identity(x) }"
    assert not reader_for(photos, model(as_bytes)).notes


def test_images_that_do_not_fit(photos):
    assert "does not take images: it is float32[N, 3]" in refused(photos)
    assert "one input; it takes x, k" in refused(photos, TWO)
    assert "mean has 2 numbers" in refused(photos, NCHW, images=Preprocess(mean=(0.1, 0.2)))
    (photos / "bad.jpg").write_bytes(b"nothing")
    assert "bad.jpg' cannot be read: UnidentifiedImageError" in refused(photos, NCHW)


def test_images_of_another_size_than_the_model_takes(photos):
    text = "g (float[N, 3, H, 7] x) => (float[N, 3, H, 7] y) { y = Relu (x) }"
    assert read(photos, text, images=Preprocess(size=(5, 7)))[0]["x"].shape == (1, 3, 5, 7)
    said = refused(photos, text, images=Preprocess(size=(5, 8)))
    assert said == "images of 5x8 do not fit input 'x': it is float32[N, 3, H, 7]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"std": (0.2, 0.0)}, "all its numbers must be above 0"),
        ({"std": (float("nan"),)}, "all its numbers must be above 0"),
        ({"size": (0, 4)}, "the size of images must be 1 or more"),
        ({"resize": 0}, "the size of images must be 1 or more"),
    ],
)
def test_preprocessing_that_is_not_possible(options, message):
    with pytest.raises(UsageError, match=message):
        Preprocess(**options)


def test_images_that_do_not_fill_a_batch(photos):
    three = "g (float[3,3,4,6] x) => (float[3,3,4,6] y) { y = Relu(x) }"
    assert refused(photos, three) == "2 images do not fill a batch of 3"
    source = photos / "cats" / "red.png"
    (photos / "cats" / "more.png").write_bytes(source.read_bytes())
    reader = reader_for(photos, model(three.replace("[3,3", "[2,3")))
    assert len(list(reader)) == 1 == reader.count()
    assert "the last 1 images do not fill a batch of 2" in reader.notes


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("float[N,2,4,6]", "it has 2 channels"),
        ("float[N,3,4]", "it is float32[N, 3, 4]"),
        ("int32[N,3,4,6]", "it is int32[N, 3, 4, 6]"),
    ],
)
def test_inputs_that_take_no_images(photos, kind, message):
    text = f"g ({kind} x) => ({kind} y) {{ y = Identity(x) }}"
    assert refused(photos, text) == f"input 'x' does not take images: {message}"


def test_options_for_samples_of_another_kind(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.ones((2, 3), np.float32))
    options: list[dict[str, Any]] = [
        {"images": Preprocess.preset("imagenet")},
        {"text": TextOptions(tokenizer="folder")},
        {"audio": AudioOptions(rate=8000)},
    ]
    for option in options:
        (kind,) = option
        said = refused(tmp_path / "x.npz", **option)
        assert said.startswith(f"options for {kind} have no effect: samples are read from '")


def test_images_without_pillow(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "images need Pillow: pip install" in refused(tmp_path, NCHW)
