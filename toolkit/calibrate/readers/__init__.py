"""Readers of calibration data: each source becomes feeds that fit the model.

    SOURCE                          feeds
    samples.npz                     arrays by input name; the first axis counts samples
    folder of .npz or .npy          one feed per file; sizes may differ
    folder of images                see `Preprocess`
    folder of .wav                  one clip per file
    .txt, .csv, .jsonl              one text per line or row, through a tokenizer
    module:function, ./file.py:f    a function that returns an iterable of feeds, or an iterable
    random                          synthetic inputs, as validation generates them
    an object                       an iterable of feeds, or one with onnxruntime's `get_next`

A new file format is one row of `FORMATS`. Every feed is checked against the model's inputs when it
is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from toolkit.calibrate.readers.arrays import ArrayFile, ArrayFolder
from toolkit.calibrate.readers.audio import AudioFolder, AudioOptions
from toolkit.calibrate.readers.images import IMAGE_ENDINGS, ImageFolder, Preprocess
from toolkit.calibrate.readers.objects import feeds_at, feeds_in
from toolkit.calibrate.readers.reader import Reader, SampleSource
from toolkit.calibrate.readers.synthetic import RandomFeeds
from toolkit.calibrate.readers.text import TEXT_ENDINGS, TextFile, TextOptions
from toolkit.errors import UsageError
from toolkit.ir.model import Model

__all__ = ["AudioOptions", "Preprocess", "Reader", "ReaderOptions", "TextOptions", "reader_for"]


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """How samples are read; `images`, `text` and `audio` apply to files of that kind."""

    images: Preprocess = field(default_factory=Preprocess)
    text: TextOptions = field(default_factory=TextOptions)
    audio: AudioOptions = field(default_factory=AudioOptions)
    seed: int = 0
    """The seed of random feeds."""
    random_feeds: int = 16
    most: int | None = None
    """The most feeds to read."""


@dataclass(frozen=True, slots=True)
class Format:
    """A file format: its extensions, and the source that reads it."""

    name: str
    endings: tuple[str, ...]
    folder: bool
    """Whether a folder of such files is read, rather than one file."""
    open: Callable[[Sequence[Path], Model, Any], SampleSource]
    """Called with the files, the model and the options of this format."""
    options: str = ""
    """The field of ReaderOptions that applies to this format."""


FORMATS = (
    Format("array file", (".npz",), False, ArrayFile),
    Format("texts", TEXT_ENDINGS, False, TextFile, "text"),
    Format("arrays", (".npz", ".npy"), True, ArrayFolder),
    Format("images", IMAGE_ENDINGS, True, ImageFolder, "images"),
    Format("sounds", (".wav",), True, AudioFolder, "audio"),
)


def reader_for(source: object, model: Model, options: ReaderOptions | None = None) -> Reader:
    """Return the reader for `source`; raises UsageError, in one line, for unknown sources."""
    options = options or ReaderOptions()
    if options.most is not None and options.most < 1:
        raise UsageError(f"the number of samples is {options.most}; it must be 1 or more")
    if isinstance(source, (str, os.PathLike)):
        text = os.fspath(cast("str | os.PathLike[str]", source))
        return Reader(_named(text, model, options), model, options.most)
    _require_used(options, "an object", "")
    feeds = feeds_in(source)
    if feeds is None:
        raise UsageError(
            f"calibration data cannot be read from a {type(source).__name__}; give a path, "
            "module:function, an object with get_next or an iterable of feeds"
        )
    return Reader(feeds, model, options.most)


def _named(text: str, model: Model, options: ReaderOptions) -> SampleSource:
    path = Path(text).expanduser()
    if not text.strip():
        raise UsageError("calibration data: name a source")
    if path.is_dir():
        chosen, files = _folder_format(path)
    elif path.is_file():
        chosen, files = _file_format(path), [path]
    else:
        _require_used(options, f"'{text}'", "")
        if text == "random":
            return RandomFeeds(model, options.seed, options.random_feeds)
        if ":" in text:
            return feeds_at(text)
        raise UsageError(f"calibration data '{text}' does not exist")
    _require_used(options, f"'{text}'", chosen.options)
    own = getattr(options, chosen.options) if chosen.options else None
    return chosen.open(files, model, own)


def _require_used(options: ReaderOptions, source: str, used: str) -> None:
    """Raise UsageError for options of a format other than the one that is read."""
    defaults = ReaderOptions()
    for name in filter(None, (each.options for each in FORMATS)):
        if name != used and getattr(options, name) != getattr(defaults, name):
            raise UsageError(f"options for {name} have no effect: samples are read from {source}")


def _file_format(path: Path) -> Format:
    ending = path.suffix.lower()
    if ending == ".py":
        raise UsageError(f"name the function in '{path}' that returns feeds: {path}:function")
    formats = [each for each in FORMATS if not each.folder]
    for each in formats:
        if ending in each.endings:
            return each
    known = ", ".join(ending for each in formats for ending in each.endings)
    raise UsageError(f"calibration data '{path}' has an unknown format; give {known} or a folder")


def _folder_format(path: Path) -> tuple[Format, list[Path]]:
    """Return the format of a folder and its files, in subfolders too; other files are ignored."""
    files = sorted(f for f in path.rglob("*") if f.is_file() and not f.name.startswith("."))
    found = [
        (each, members)
        for each in FORMATS
        if each.folder and (members := [f for f in files if f.suffix.lower() in each.endings])
    ]
    if not found:
        raise UsageError(f"folder '{path}' holds no .npz, .npy, image or .wav files")
    if len(found) > 1:
        names = " and ".join(each.name for each, _ in found)
        raise UsageError(f"folder '{path}' holds {names}; keep one kind in it")
    return found[0]
