"""Readers: samples from wherever a user has them, as feeds that fit the model.

    SOURCE                          what is read
    samples.npz                     arrays by input name; the first axis counts samples
    folder of .npz or .npy          one feed a file; sizes may differ
    folder of images                see `Preprocess`
    folder of .wav                  one clip a file
    .txt, .csv, .jsonl              one text a line or row, through a tokenizer
    module:function, ./file.py:f    a function that returns an iterable of feeds, or such an object
    random                          made-up feeds, as the validation makes them
    an object                       with onnxruntime's `get_next`, or an iterable of feeds

Everything is checked against the model's inputs when it is read, and a reader can be read again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from toolkit.calibrate.readers.arrays import ArrayFile, ArrayFolder
from toolkit.calibrate.readers.audio import AudioFolder, AudioOptions
from toolkit.calibrate.readers.images import IMAGE_ENDINGS, ImageFolder, Preprocess
from toolkit.calibrate.readers.objects import FeedIterable, GetNext, at_address
from toolkit.calibrate.readers.reader import Reader, Source
from toolkit.calibrate.readers.synthetic import RandomFeeds
from toolkit.calibrate.readers.text import TEXT_ENDINGS, TextFile, TextOptions
from toolkit.errors import UsageError
from toolkit.ir.model import Model

__all__ = ["AudioOptions", "Preprocess", "Reader", "ReaderOptions", "TextOptions", "reader_for"]


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """How samples are read; each part concerns the sources of one kind."""

    images: Preprocess = field(default_factory=Preprocess)
    text: TextOptions = field(default_factory=TextOptions)
    audio: AudioOptions = field(default_factory=AudioOptions)
    seed: int = 0
    """Of random feeds."""
    random_feeds: int = 16
    most: int | None = None
    """Feeds to read at most."""


def reader_for(source: object, model: Model, options: ReaderOptions | None = None) -> Reader:
    """The reader that `source` calls for; raises UsageError, in one line, when there is none."""
    options = options or ReaderOptions()
    if options.most is not None and options.most < 1:
        raise UsageError(f"at most {options.most} samples is none; 1 or more are needed")
    found = _source(source, model, options)
    _require_use(found, source, options)
    return Reader(found, model, options.most)


def _require_use(found: Source, source: object, options: ReaderOptions) -> None:
    """UsageError for options about samples of another kind: whoever gave them would be misled."""
    usual = ReaderOptions()
    for kind, reader in (("images", ImageFolder), ("text", TextFile), ("audio", AudioFolder)):
        if getattr(options, kind) != getattr(usual, kind) and not isinstance(found, reader):
            what = f"'{source}'" if isinstance(source, (str, os.PathLike)) else "an object"
            raise UsageError(f"options for {kind} are of no use: samples are read from {what}")


def _source(source: object, model: Model, options: ReaderOptions) -> Source:
    if isinstance(source, (str, os.PathLike)):
        return _named(os.fspath(cast("str | os.PathLike[str]", source)), model, options)
    if callable(getattr(source, "get_next", None)):
        return GetNext(source)
    if isinstance(source, Iterable):
        return FeedIterable(cast("Iterable[Any]", source))
    raise UsageError(
        f"calibration data cannot be read from a {type(source).__name__}; give a path, "
        "module:function, an object with get_next or an iterable of feeds"
    )


def _named(text: str, model: Model, options: ReaderOptions) -> Source:
    path = Path(text).expanduser()
    if not text.strip():
        raise UsageError("calibration data: no source is named")
    if text == "random":
        return RandomFeeds(model, options.seed, options.random_feeds)
    if path.is_dir():
        return _folder(path, model, options)
    if not path.is_file():
        if ":" in text and not path.exists():
            return at_address(text)
        raise UsageError(f"calibration data '{text}' does not exist")
    ending = path.suffix.lower()
    if ending == ".npz":
        return ArrayFile(path, model)
    if ending in TEXT_ENDINGS:
        return TextFile(path, model, options.text)
    if ending == ".py":
        raise UsageError(f"name the function in '{text}' that gives the feeds: {text}:function")
    known = ", ".join((".npz", *TEXT_ENDINGS))
    raise UsageError(f"calibration data '{text}' is of no known kind: {known} or a folder")


def _folder(path: Path, model: Model, options: ReaderOptions) -> Source:
    """A folder holds samples of one kind, in subfolders too; other files do not matter."""
    files = sorted(f for f in path.rglob("*") if f.is_file() and not f.name.startswith("."))
    kinds = {
        "arrays": [f for f in files if f.suffix.lower() in (".npz", ".npy")],
        "images": [f for f in files if f.suffix.lower() in IMAGE_ENDINGS],
        "sounds": [f for f in files if f.suffix.lower() == ".wav"],
    }
    found = [kind for kind, members in kinds.items() if members]
    if not found:
        raise UsageError(f"folder '{path}' holds no .npz, .npy, image or .wav files")
    if len(found) > 1:
        raise UsageError(f"folder '{path}' holds {' and '.join(found)}; keep one kind in it")
    members = kinds[found[0]]
    if found[0] == "arrays":
        return ArrayFolder(members, model)
    if found[0] == "images":
        return ImageFolder(members, model, options.images)
    return AudioFolder(members, model, options.audio)
