"""The options of calibration and of quality, and what a command makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.errors import UsageError
from toolkit.messages import suggestion

if TYPE_CHECKING:
    from toolkit.calibrate.data import Calib
    from toolkit.calibrate.readers import ReaderOptions

_PANEL = "Calibration and quality"

Source = Annotated[
    str | None,
    typer.Option(
        "--calib",
        metavar="SOURCE",
        rich_help_panel=_PANEL,
        help="Samples to calibrate with: .npz, a folder of arrays, images or .wav, "
        ".txt/.csv/.jsonl with --tokenizer, module:function, or random.",
    ),
]
MostSamples = Annotated[
    int | None,
    typer.Option(
        "--calib-samples", metavar="N", min=1, rich_help_panel=_PANEL, help="Samples at most."
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", rich_help_panel=_PANEL, help="The tokenizer of text samples."),
]
Details = Annotated[
    list[str] | None,
    typer.Option(
        "--calib-option",
        metavar="NAME=VALUE",
        rich_help_panel=_PANEL,
        help="How samples are read, as preset=imagenet, size=224x224, mean=0.5, fit=letterbox, "
        "columns=a,b, max_length=64 or rate=16000. May be repeated.",
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(
        "--calib-cache",
        metavar="FOLDER|off",
        rich_help_panel=_PANEL,
        help="Where statistics are kept for the next run; by default in the user's cache.",
    ),
]
MaxDrop = Annotated[
    str | None,
    typer.Option(
        metavar="X|off",
        rich_help_panel=_PANEL,
        help="What quantizing may cost by the metric: 0.01 is 1 %. By default a careful budget for "
        "each kind of output; off lets everything pass, and says what was lost.",
    ),
]
MetricName = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        rich_help_panel=_PANEL,
        help="sqnr, cosine, top1, error, or module:function of all outputs, higher is better.",
    ),
]


@dataclass(frozen=True, slots=True)
class Given:
    """What the user said of calibration."""

    source: str | None
    samples: int | None = None
    tokenizer: str | None = None
    details: Sequence[str] = field(default=())
    cache: str | None = None

    def calib(self, seed: int = 0) -> Calib | None:
        """The data to calibrate with; None when there are none."""
        if self.source is None:
            self._require_nothing_else()
            return None
        from toolkit.calibrate.data import Calib

        return Calib(self.source, self._options(seed), self._cache_folder())

    def files(self) -> list[Path]:
        """The file that samples are read from, if it is one."""
        path = Path(self.source) if self.source is not None else None
        return [path] if path is not None and path.is_file() else []

    def _require_nothing_else(self) -> None:
        rest = {
            "--calib-samples": self.samples,
            "--tokenizer": self.tokenizer,
            "--calib-option": self.details or None,
            "--calib-cache": self.cache,
        }
        idle = next((name for name, value in rest.items() if value is not None), None)
        if idle is not None:
            raise UsageError(f"{idle} is of no use without --calib: name the samples")

    def _options(self, seed: int) -> ReaderOptions:
        from toolkit.calibrate.readers import AudioOptions, Preprocess, ReaderOptions, TextOptions

        read: dict[str, dict[str, Any]] = {"images": {}, "text": {}, "audio": {}}
        preset = Preprocess()
        for name, value in _pairs(self.details):
            part, convert = _DETAILS[name]
            try:
                found = convert(value)
            except ValueError as error:
                raise UsageError(f"--calib-option {name}={value} is not valid: {error}") from error
            if name == "preset":
                preset = Preprocess.preset(value)
            else:
                read[part][name] = found
        if self.tokenizer is not None:
            read["text"]["tokenizer"] = self.tokenizer
        images = {f: getattr(preset, f) for f in Preprocess.__dataclass_fields__} | read["images"]
        return ReaderOptions(
            images=Preprocess(**images),
            text=TextOptions(**read["text"]),
            audio=AudioOptions(**read["audio"]),
            seed=seed,
            random_feeds=self.samples or ReaderOptions().random_feeds,
            most=self.samples,
        )

    def _cache_folder(self) -> Path | None:
        from toolkit.storage.atomic_write import cache_folder

        if self.cache == "off":
            return None
        if self.cache is not None:
            folder = Path(self.cache).expanduser()
            if folder.exists() and not folder.is_dir():
                raise UsageError(f"--calib-cache '{self.cache}' is no folder")
            return folder
        from toolkit.calibrate.cache import require_cache

        folder = cache_folder() / "toolkit" / "calibration"
        try:
            require_cache(folder)
        except UsageError:
            return None  # nobody asked for it
        return folder


def _pairs(details: Sequence[str]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for item in details:
        name, equals, value = item.partition("=")
        if not equals or not value:
            raise UsageError(f"--calib-option '{item}' is not valid: write name=value")
        if name not in _DETAILS:
            known = list(_DETAILS)
            hint = suggestion(name, known) or f"; there are {', '.join(known)}"
            raise UsageError(f"--calib-option has no '{name}'{hint}")
        if name in dict(found):
            raise UsageError(f"--calib-option {name} is given twice")
        found.append((name, value))
    return found


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError("numbers are separated by commas, as 0.5,0.5,0.5") from error


def _size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() for part in parts):
        raise ValueError("a size is height x width, as 224x224")
    return int(parts[0]), int(parts[-1])


def _whole(text: str) -> int:
    if not text.isdigit():
        raise ValueError("a whole number is needed")
    return int(text)


def _number(text: str) -> float:
    return _numbers(text)[0]


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"it is one of {', '.join(choices)}")
        return text

    return read


_DETAILS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "preset": ("images", _one_of("imagenet")),
    "fit": ("images", _one_of("stretch", "crop", "letterbox")),
    "size": ("images", _size),
    "resize": ("images", _whole),
    "scale": ("images", _number),
    "mean": ("images", _numbers),
    "std": ("images", _numbers),
    "channels": ("images", _one_of("rgb", "bgr")),
    "fill": ("images", _whole),
    "columns": ("text", lambda text: tuple(text.split(","))),
    "max_length": ("text", _whole),
    "rate": ("audio", _whole),
    "seconds": ("audio", _number),
}
"""What may be said of samples, the reader that it concerns, and how it is read."""
