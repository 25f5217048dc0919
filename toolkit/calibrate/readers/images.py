"""Folders of images, preprocessed as the model expects them.

pixel = (value * scale - mean) / std, per channel. The layout (NCHW or NHWC), the size and the
number of channels come from the model's input. Needs Pillow (extra `calibrate`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from onnx import TensorProto

from toolkit.calibrate.readers.reader import FileSource, sole_input
from toolkit.calibrate.statistics import Array
from toolkit.errors import UsageError, summarize
from toolkit.extras import require
from toolkit.feeds.user_samples import describe
from toolkit.ir.model import Model

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8)
"""Element types of inputs for images; those of uint8 are neither scaled nor normalized."""

_DEFAULT_SIZE = 224
"""Height and width in pixels if neither the model nor the options set them."""


@dataclass(frozen=True, slots=True)
class Preprocess:
    """The preprocessing of images; by default they are scaled to [0, 1].

    `fit` is one of: `stretch` resizes to the model's size; `crop` resizes the shorter side and cuts
    out the center; `letterbox` keeps the aspect ratio and pads with the value `fill`.
    """

    fit: Literal["stretch", "crop", "letterbox"] = "stretch"
    size: tuple[int, int] | None = None
    """Height and width, for a model with dynamic sizes."""
    resize: int | None = None
    """The shorter side before the crop; by default 256/224 of the cropped size."""
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    channels: Literal["rgb", "bgr"] = "rgb"
    fill: int = 114

    def __post_init__(self) -> None:
        if any(not value > 0 for value in self.std):
            raise UsageError(f"std is {self.std}; all its numbers must be above 0")
        sizes = (*(self.size or ()), *([self.resize] if self.resize is not None else []))
        if any(size < 1 for size in sizes):
            raise UsageError("the size of images must be 1 or more")

    @classmethod
    def preset(cls, name: str) -> Preprocess:
        """Return a named preset: `imagenet` is that of most image classifiers."""
        if name != "imagenet":
            raise UsageError(f"no image preset is called '{name}'; there is imagenet")
        return cls(fit="crop", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


class ImageFolder(FileSource):
    """A folder of images, one sample per file; a fixed batch takes several files per feed."""

    def __init__(self, files: Sequence[Path], model: Model, options: Preprocess) -> None:
        self._options, self._name = options, sole_input(model, "images")
        declared = model.graph.type(self._name)
        refusal = f"input '{self._name}' does not take images"
        if declared is None or declared.dtype not in _TYPES or declared.rank != 4:
            raise UsageError(f"{refusal}: it is {describe(declared)}")
        sizes = [d if isinstance(d, int) and d > 0 else None for d in declared.shape or ()]
        self._channels_last = sizes[3] in (1, 3) and sizes[1] not in (1, 3)
        if self._channels_last:
            sizes = [sizes[0], sizes[3], sizes[1], sizes[2]]
        batch, channels, height, width = sizes
        if channels not in (None, 1, 3):
            raise UsageError(f"{refusal}: it has {channels} channels")
        wanted = options.size or (height or _DEFAULT_SIZE, width or _DEFAULT_SIZE)
        if wanted != (height or wanted[0], width or wanted[1]):
            what = f"images of {wanted[0]}x{wanted[1]} do not fit input '{self._name}'"
            raise UsageError(f"{what}: it is {describe(declared)}")
        self._batch, self._channels = batch or 1, channels or 3
        self._height, self._width = wanted
        self._is_raw = declared.dtype == TensorProto.UINT8
        super().__init__(files, options, self._name, sizes, self._channels_last, self._is_raw)
        for what, numbers in (("mean", options.mean), ("std", options.std)):
            if len(numbers) not in (1, self._channels):
                raise UsageError(
                    f"{what} has {len(numbers)} numbers; the model's input '{self._name}' "
                    f"has {self._channels} channels"
                )
        self._note_assumptions(any_size=height is None or width is None)
        left = len(files) % self._batch
        if len(files) < self._batch:
            raise UsageError(f"{len(files)} images do not fill a batch of {self._batch}")
        if left:
            self.notes.append(f"the last {left} images do not fill a batch of {self._batch}")
        self._pillow = require("PIL.Image", "calibrate", "images need Pillow")

    def _note_assumptions(self, any_size: bool) -> None:
        """Note the assumed preprocessing, which the model does not specify."""
        options, usual = self._options, Preprocess()
        is_default = all(getattr(options, n) == getattr(usual, n) for n in ("scale", "mean", "std"))
        if is_default and not self._is_raw:
            self.notes.append(
                "images are read as 0 to 1, without mean and std; if the model was trained "
                "otherwise: --calib-option preset=imagenet, or scale, mean and std one by one"
            )
        if any_size and options.size is None:
            size = f"{self._height}x{self._width}"
            self.notes.append(
                f"images are resized to {size}, as the model takes any size; for another: "
                "--calib-option size=HxW"
            )

    def count(self) -> int | None:
        return len(self.files) // self._batch

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        batch = self._batch
        for at in range(0, len(self.files) - batch + 1, batch):
            group = self.files[at : at + batch]
            yield f"image '{group[0]}'", {self._name: np.stack([*map(self._read, group)])}

    def _read(self, path: Path) -> Array:
        options = self._options
        try:
            with self._pillow.open(path) as opened:
                image = opened.convert("L" if self._channels == 1 else "RGB")
        except Exception as error:  # decoders may raise anything for damaged files
            raise UsageError(f"image '{path}' cannot be read: {summarize(error)}") from error
        pixels: Array = np.asarray(self._placed(image))
        pixels = pixels.reshape(self._height, self._width, self._channels)
        if options.channels == "bgr":
            pixels = pixels[..., ::-1]
        if not self._is_raw:
            mean, std = np.asarray(options.mean), np.asarray(options.std)
            pixels = np.asarray((pixels * options.scale - mean) / std, np.float32)
        return np.ascontiguousarray(pixels if self._channels_last else np.moveaxis(pixels, 2, 0))

    def _placed(self, image: Any) -> Any:
        """Resize an image to the model's height and width."""
        height, width = self._height, self._width
        bilinear = self._pillow.Resampling.BILINEAR
        if self._options.fit == "stretch":
            return image.resize((width, height), bilinear)
        if self._options.fit == "letterbox":
            fill: Any = self._options.fill if image.mode == "L" else (self._options.fill,) * 3
            pad = require("PIL.ImageOps", "calibrate", "images need Pillow").pad
            return pad(image, (width, height), bilinear, fill, centering=(0, 0))
        shorter = self._options.resize or round(min(height, width) * 256 / 224)
        ratio = shorter / min(image.size)
        ratio = max(ratio, width / image.width, height / image.height)
        resized = image.resize([max(round(side * ratio), 1) for side in image.size], bilinear)
        left, top = max(resized.width - width, 0) // 2, max(resized.height - height, 0) // 2
        return resized.crop((left, top, left + width, top + height))
