"""Readers: each kind of source gives feeds that fit, twice the same, or says in a line why not."""

from __future__ import annotations

import json
import sys
import wave

import numpy as np
import pytest

from tests.checks import model
from toolkit.calibrate.readers import (
    AudioOptions,
    Preprocess,
    ReaderOptions,
    TextOptions,
    reader_for,
)
from toolkit.errors import UsageError

DYNAMIC = "g (float[N,3] x) => (float[N,3] y) { y = Relu(x) }"
BATCH_OF_2 = "g (float[2,3] x) => (float[2,3] y) { y = Relu(x) }"
TWO = "g (float[N,3] x, int64[N] k) => (float[N,3] y, int64[N] z) { y = Relu(x) z = Identity(k) }"
LENGTHS = "g (float[N,T] x) => (float[N,T] y) { y = Relu(x) }"


def read(source, graph=DYNAMIC, **options):
    """The feeds, which are the same when they are read again."""
    reader = reader_for(source, model(graph), ReaderOptions(**options))
    first, second = list(reader), list(reader)
    assert len(first) == len(second)
    assert reader.count() in (None, len(first))
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])
    assert reader.digest() == reader_for(source, model(graph), ReaderOptions(**options)).digest()
    return first


def refused(source, graph=DYNAMIC, **options):
    with pytest.raises(UsageError) as caught:
        list(reader_for(source, model(graph), ReaderOptions(**options)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ramp(*shape, dtype=np.float32):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


# One .npz ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_is_cut_into_samples(tmp_path, save):
    save(tmp_path / "a.npz", x=ramp(5, 3))
    feeds = read(tmp_path / "a.npz")
    assert [feed["x"].shape for feed in feeds] == [(1, 3)] * 5
    np.testing.assert_array_equal(np.concatenate([f["x"] for f in feeds]), ramp(5, 3))


def test_npz_is_cut_to_a_fixed_batch(tmp_path):
    np.savez(tmp_path / "a.npz", x=ramp(5, 3), label=np.arange(5))
    reader = reader_for(tmp_path / "a.npz", model(BATCH_OF_2))
    assert [feed["x"].shape for feed in reader] == [(2, 3)] * 2
    assert reader.notes == [
        "'label' is no input of the model: it was ignored",
        "'x': the last 1 samples make no batch of 2",
    ]


def test_npz_in_column_order(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.asfortranarray(ramp(4, 3)))
    np.testing.assert_array_equal(read(tmp_path / "a.npz")[2]["x"], ramp(4, 3)[2:3])


def test_npz_with_a_whole_input_a_sample_and_a_number(tmp_path):
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
    assert "no .npz file of plain arrays" in message(x=np.array([None, {}]))
    assert "lacks input 'x'" in message(y=ramp(2, 3))
    assert "'x' has 1 samples; the model's batch is 2" in message(BATCH_OF_2, x=ramp(1, 3))


def test_damaged_files(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"no archive")
    assert "no .npz file" in refused(tmp_path / "a.npz")
    assert "does not exist" in refused(tmp_path / "b.npz")
    (tmp_path / "c.xyz").write_bytes(b"")
    assert "of no known kind" in refused(tmp_path / "c.xyz")
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
def test_integers_for_floats_are_taken_as_they_are(tmp_path, dtype):
    path = tmp_path / "a.npz"
    pixels = np.array([[0, 1, 100], [127, 3, 4]]).astype(dtype)
    np.savez(path, x=pixels)
    reader = reader_for(path, model(DYNAMIC))
    feeds = list(reader)
    assert all(feed["x"].dtype == np.float32 for feed in feeds)
    np.testing.assert_array_equal(np.concatenate([f["x"] for f in feeds]), pixels)
    said = f"'x' holds {np.dtype(dtype)}: its numbers are taken as they are, not scaled"
    assert list(reader.notes) == [said], "once, and not for every sample"


def test_integers_that_floats_do_not_hold(tmp_path):
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


# Folders of arrays -------------------------------------------------------------------------------


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


def test_folders_that_are_not_clear(tmp_path):
    assert "holds no .npz, .npy, image or .wav" in refused(tmp_path)
    (tmp_path / "a.png").write_bytes(b"")
    np.save(tmp_path / "a.npy", ramp(1, 3))
    assert "holds arrays and images; keep one kind" in refused(tmp_path)


# Images ------------------------------------------------------------------------------------------

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


def test_images_as_a_detector_takes_them(photos):
    options = Preprocess(fit="letterbox", scale=1.0, channels="bgr")
    text = "g (float[1,3,4,4] x) => (float[1,3,4,4] y) { y = Relu(x) }"
    red = read(photos, text, images=options)[0]["x"]
    np.testing.assert_allclose(red[0, :, 0, 0], [0, 0, 255])
    np.testing.assert_allclose(red[0, :, 3, 3], 114)


def test_images_as_bytes_one_channel_open_size_and_batch(photos):
    text = "g (uint8[2,1,H,W] x) => (uint8[2,1,H,W] y) { y = Identity(x) }"
    feeds = read(photos, text, images=Preprocess(size=(5, 7)))
    assert feeds[0]["x"].shape == (2, 1, 5, 7)
    assert feeds[0]["x"].dtype == np.uint8
    np.testing.assert_array_equal(feeds[0]["x"][1], 51)


def test_what_was_assumed_of_images_is_said(photos):
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
    assert "takes no images: it is float32[N, 3]" in refused(photos)
    assert "one input, this takes x, k" in refused(photos, TWO)
    assert "mean has 2 numbers" in refused(photos, NCHW, images=Preprocess(mean=(0.1, 0.2)))
    (photos / "bad.jpg").write_bytes(b"nothing")
    assert "bad.jpg' cannot be read: UnidentifiedImageError" in refused(photos, NCHW)


def test_images_of_another_size_than_the_model_takes(photos):
    text = "g (float[N, 3, H, 7] x) => (float[N, 3, H, 7] y) { y = Relu (x) }"
    assert read(photos, text, images=Preprocess(size=(5, 7)))[0]["x"].shape == (1, 3, 5, 7)
    said = refused(photos, text, images=Preprocess(size=(5, 8)))
    assert said == "images of 5x8 do not fit input 'x': it is float32[N, 3, H, 7]"


def test_options_for_samples_of_another_kind(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.ones((2, 3), np.float32))
    for option in (
        {"images": Preprocess.preset("imagenet")},
        {"text": TextOptions(tokenizer="folder")},
        {"audio": AudioOptions(rate=8000)},
    ):
        (kind,) = option
        said = refused(tmp_path / "x.npz", **option)
        assert said.startswith(f"options for {kind} are of no use: samples are read from '")


def test_images_without_pillow(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "images need Pillow: pip install" in refused(tmp_path, NCHW)


# Sound -------------------------------------------------------------------------------------------


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
    assert "one input, this takes x, k; use module:function" in refused(tmp_path, TWO)
    write_wav(tmp_path / "a.wav", b"")
    assert "is empty" in refused(tmp_path, LENGTHS)
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    assert "no .wav file" in refused(tmp_path, LENGTHS)


# Text --------------------------------------------------------------------------------------------

TOKENS = """g (int64[N,T] input_ids, int64[N,T] attention_mask) => (int64[N,T] y)
{ y = Add(input_ids, attention_mask) }"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "[PAD]": 1, "a": 2, "cat": 3, "sat": 4}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return TextOptions(tokenizer=str(folder))


def test_text_in_every_format(tmp_path, tokenizer):
    lines, rows, records = (tmp_path / f"a{ending}" for ending in (".txt", ".csv", ".jsonl"))
    texts = ["a cat sat", "a dog"]
    lines.write_text("\n\n".join(texts))
    rows.write_text("label,text\n" + "\n".join(f"1,{text}" for text in texts))
    records.write_text("\n".join(json.dumps({"n": 1, "sentence": text}) for text in texts))
    marked = tmp_path / "marked.csv"
    marked.write_text("text,label\na cat sat,1\na dog,2\n", encoding="utf-8-sig")
    for path in (lines, rows, records, marked):
        feeds = read(path, TOKENS, text=tokenizer)
        assert [feed["input_ids"].tolist() for feed in feeds] == [[[2, 3, 4]], [[2, 0]]]


def test_text_of_fixed_length_and_batch(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a cat sat a cat\na\nsat\n")
    reader = reader_for(
        tmp_path / "a.txt",
        model(TOKENS.replace("N,T", "2,4")),
        ReaderOptions(text=tokenizer),
    )
    feeds = list(reader)
    assert [feed["input_ids"].tolist() for feed in feeds] == [[[2, 3, 4, 2], [2, 1, 1, 1]]]
    assert feeds[0]["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert "the last 1 texts make no batch of 2" in reader.notes


def test_pairs_of_texts(tmp_path, tokenizer):
    (tmp_path / "a.csv").write_text("one,other\na,cat sat\n")
    options = TextOptions(tokenizer.tokenizer, ("one", "other"))
    assert read(tmp_path / "a.csv", TOKENS, text=options)[0]["input_ids"].tolist() == [[2, 3, 4]]


def test_a_folder_without_a_vocabulary(tmp_path):
    """Of a config.json alone, transformers makes a tokenizer that knows no word."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "bert", "vocab_size": 100}')
    (tmp_path / "a.txt").write_text("a cat sat")
    said = refused(tmp_path / "a.txt", TOKENS, text=TextOptions(str(tmp_path)))
    assert "holds no vocabulary of a tokenizer" in said


def test_a_tokenizer_of_another_language(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("\n".join(["eine Katze hat dort sehr lange gesessen"] * 9 + ["a cat sat"]))
    assert "knows none of the words" in refused(path, TOKENS, text=tokenizer)
    path.write_text("\n".join(["a cat sat", "eine Katze"] * 20))
    assert len(read(path, TOKENS, text=tokenizer)) == 40


def test_text_that_does_not_fit(tmp_path, tokenizer):
    path = tmp_path / "a.csv"
    path.write_text("one,other\na,b\n")
    assert "name the folder of the model's tokenizer (--tokenizer)" in refused(path, TOKENS)
    assert "is no folder" in refused(path, TOKENS, text=TextOptions(str(tmp_path / "nothing")))
    assert "holds no tokenizer" in refused(path, TOKENS, text=TextOptions(str(tmp_path)))
    assert "has the columns one, other: name" in refused(path, TOKENS, text=tokenizer)
    absent = TextOptions(tokenizer.tokenizer, ("two",))
    assert "no text in 'two'; its columns are one, other" in refused(path, TOKENS, text=absent)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{no json')
    assert "line 2 is no JSON" in refused(tmp_path / "a.jsonl", TOKENS, text=tokenizer)
    (tmp_path / "a.txt").write_text("\n")
    assert "are empty" in refused(tmp_path / "a.txt", TOKENS, text=tokenizer)


# Python ------------------------------------------------------------------------------------------


class Convention:
    """onnxruntime's CalibrationDataReader: can be read once."""

    def __init__(self, count=3):
        self.left = iter([{"x": np.full((1, 3), i, np.float32)} for i in range(count)])

    def get_next(self):
        return next(self.left, None)


class Rewinding(Convention):
    def rewind(self):
        self.__init__()


@pytest.mark.parametrize("kind", [Convention, Rewinding])
def test_an_object_with_get_next(kind):
    reader = reader_for(kind(), model(DYNAMIC))
    for _ in range(2):
        assert [float(feed["x"][0, 0]) for feed in reader] == [0, 1, 2]
    assert reader.digest() == reader_for(kind(), model(DYNAMIC)).digest()
    assert reader.digest() != reader_for(Convention(2), model(DYNAMIC)).digest()


def test_an_iterator_that_is_left_early():
    reader = reader_for(iter([{"x": ramp(1, 3)}, {"x": ramp(2, 3)}]), model(DYNAMIC))
    next(iter(reader))
    assert [len(feed["x"]) for feed in reader] == [1, 2]
    assert [len(feed["x"]) for feed in reader] == [1, 2]


def test_iterables():
    assert len(read([{"x": ramp(1, 3)}, {"x": ramp(5, 3)}])) == 2
    assert "are empty" in refused([])
    assert "feed 0 is list; it must be a dict" in refused([[1]])


def test_a_function(tmp_path):
    path = tmp_path / "data.py"
    path.write_text(
        "import numpy as np\n"
        "def feeds():\n"
        "    for n in (1, 2):\n"
        "        yield {'x': np.ones((n, 3), np.float32), 'extra': 1}\n"
        "def broken():\n"
        "    yield {'x': np.ones((1, 3), np.float32)}\n"
        "    raise RuntimeError('disk gone')\n"
        "def number():\n"
        "    return 3\n"
        "value = 1\n"
    )
    assert [len(feed["x"]) for feed in read(f"{path}:feeds")] == [1, 2]
    assert "failed: RuntimeError: disk gone" in refused(f"{path}:broken")
    assert "returns int; it must be an iterable" in refused(f"{path}:number")
    assert "is no function" in refused(f"{path}:value")
    assert "has no object 'feed': did you mean 'feeds'" in refused(f"{path}:feed")
    assert "cannot import nowhere_at_all" in refused("nowhere_at_all:f")
    assert f"{path}:function" in refused(path)
    assert "no source is named" in refused("")


def test_an_object_of_a_module(tmp_path):
    path = tmp_path / "data.py"
    path.write_text(
        "import numpy as np\n"
        "listed = [{'x': np.ones((n, 3), np.float32)} for n in (1, 2)]\n"
        "class Convention:\n"
        "    left = iter(listed)\n"
        "    def get_next(self):\n"
        "        return next(self.left, None)\n"
        "reader = Convention()\n"
        "words = 'text'\n"
    )
    for name in ("listed", "reader"):
        reader = reader_for(f"{path}:{name}", model(DYNAMIC))
        for _ in range(2):
            assert [len(feed["x"]) for feed in reader] == [1, 2]
    assert "is no function" in refused(f"{path}:words")


def test_random():
    feeds = read("random", random_feeds=10)
    assert len(feeds) == 10
    assert not np.array_equal(feeds[0]["x"], feeds[9]["x"])
    reader = reader_for("random", model(DYNAMIC))
    assert "made-up" in reader.notes[0]
    assert reader.digest() != reader_for("random", model(DYNAMIC), ReaderOptions(seed=1)).digest()
