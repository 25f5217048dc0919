"""Command-line options of calibration and accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.errors import UsageError
from toolkit.messages import suggestion

if TYPE_CHECKING:
    from toolkit.calibrate.data import Calib
    from toolkit.calibrate.readers import ReaderOptions

_PANEL = "Calibration and accuracy"

Source = Annotated[
    str | None,
    typer.Option(
        "--calib",
        metavar="SOURCE",
        rich_help_panel=_PANEL,
        help="Samples for calibration: .npz, a folder of arrays, images or .wav files, "
        ".txt/.csv/.jsonl with --tokenizer, module:function, or random.",
    ),
]
MaxSamples = Annotated[
    int | None,
    typer.Option(
        "--calib-samples",
        metavar="N",
        min=1,
        rich_help_panel=_PANEL,
        help="The largest number of samples to use.",
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", rich_help_panel=_PANEL, help="The tokenizer for text samples."),
]
ReadingOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--calib-option",
        metavar="NAME=VALUE",
        rich_help_panel=_PANEL,
        help="How to read samples, as in preset=imagenet, size=224x224, mean=0.5, fit=letterbox, "
        "columns=a,b, max_length=64 or rate=16000. Repeatable.",
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(
        "--calib-cache",
        metavar="FOLDER|off",
        rich_help_panel=_PANEL,
        help="Where to cache calibration statistics; by default, the user's cache folder.",
    ),
]
MaxDrop = Annotated[
    str | None,
    typer.Option(
        metavar="X|off",
        rich_help_panel=_PANEL,
        help="The largest loss of accuracy allowed, by the metric: 0.01 is 1 %. By default, a "
        "conservative error budget for each kind of output; off: report the loss, without limit.",
    ),
]
MetricName = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        rich_help_panel=_PANEL,
        help="sqnr, cosine, top1, error, or module:function of all outputs (higher is better).",
    ),
]


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """The calibration options of one command."""

    source: str | None
    samples: int | None = None
    tokenizer: str | None = None
    reading: Sequence[str] = field(default=())
    cache: str | None = None

    def calib(self, seed: int = 0) -> Calib | None:
        """Return the calibration data, or None without --calib."""
        if self.source is None:
            self._require_unused()
            return None
        from toolkit.calibrate.data import Calib

        return Calib(self.source, self._options(seed), self._cache_folder())

    def files(self) -> list[Path]:
        """Return the file that samples are read from, if the source is a file."""
        path = Path(self.source) if self.source is not None else None
        return [path] if path is not None and path.is_file() else []

    def _require_unused(self) -> None:
        """Raise if another calibration option is given without --calib."""
        others = {
            "--calib-samples": self.samples,
            "--tokenizer": self.tokenizer,
            "--calib-option": self.reading or None,
            "--calib-cache": self.cache,
        }
        unused = next((name for name, value in others.items() if value is not None), None)
        if unused is not None:
            raise UsageError(f"{unused} has no effect without --calib: name the samples")

    def _options(self, seed: int) -> ReaderOptions:
        """Read --calib-option: each name is a field of one of the options of `ReaderOptions`."""
        from toolkit.calibrate.readers import ReaderOptions
        from toolkit.calibrate.readers.images import Preprocess
        from toolkit.pass_manager.pass_options import option_names, read_options

        defaults = ReaderOptions(
            seed=seed,
            random_feeds=self.samples or ReaderOptions().random_feeds,
            most=self.samples,
        )
        given = _pairs(self.reading)
        if "preset" in given:
            defaults = replace(defaults, images=Preprocess.preset(given.pop("preset")))
        if self.tokenizer is not None:
            given["tokenizer"] = self.tokenizer
        kinds = {kind: option_names(getattr(defaults, kind)) for kind in _KINDS}
        known = ["preset", *(name for names in kinds.values() for name in names)]
        for name in given:
            if name not in known:
                hint = suggestion(name, known) or f"; known: {', '.join(known)}"
                raise UsageError(f"--calib-option has no '{name}'{hint}")
        parts: dict[str, Any] = {}
        for kind, names in kinds.items():
            part = getattr(defaults, kind)
            texts = {name: _joined(name, given[name]) for name in names if name in given}
            parts[kind] = replace(part, **read_options(part, texts, "--calib-option"))
        return replace(defaults, **parts)

    def _cache_folder(self) -> Path | None:
        from toolkit.storage.atomic_write import cache_folder

        if self.cache == "off":
            return None
        if self.cache is not None:
            folder = Path(self.cache).expanduser()
            if folder.exists() and not folder.is_dir():
                raise UsageError(f"--calib-cache '{self.cache}' is not a folder")
            return folder
        from toolkit.calibrate.cache import require_cache

        folder = cache_folder() / "toolkit" / "calibration"
        try:
            require_cache(folder)
        except UsageError:
            return None  # the default cache is optional
        return folder


_KINDS = ("images", "text", "audio")
"""The fields of ReaderOptions whose own fields are names for --calib-option."""


def _pairs(given: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not value:
            raise UsageError(f"--calib-option '{item}' is not valid: write name=value")
        if name in pairs:
            raise UsageError(f"--calib-option {name} is given twice")
        pairs[name] = value
    return pairs


def _joined(name: str, text: str) -> str:
    """Join items by `+`, as `read_options` expects: they are written 0.5,0.5 or 224x224."""
    if name != "size":
        return text.replace(",", "+")
    sizes = text.lower().split("x")
    if len(sizes) > 2 or not all(size.isdigit() for size in sizes):
        raise UsageError(f"--calib-option size={text} is not valid: write height x width")
    return f"{sizes[0]}+{sizes[-1]}"
