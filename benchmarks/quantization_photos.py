"""Samples cut from the photographs that scikit-image and scikit-learn ship."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

NAMES = (
    *("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg"),
    *("hubble_deep_field.jpg", "ihc.png", "retina.jpg", "china.jpg", "flower.jpg"),
)
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
PADDING = 114


def folder_of(package: str) -> Path:
    """Return the folder of an installed package; raise ModuleNotFoundError without it."""
    return Path(str(importlib.resources.files(package)))


def photographs() -> list[Array]:
    """Return all photographs as height x width x RGB bytes."""
    from PIL import Image

    folders = (folder_of("skimage") / "data", folder_of("sklearn.datasets") / "images")
    found = [f / name for name in NAMES for f in folders if (f / name).is_file()]
    return [np.asarray(Image.open(path).convert("RGB")) for path in found]


def crops(count: int, size: int) -> Iterator[Array]:
    """Return random crops, scaled to 1 x 3 x size x size and normalized as for ImageNet."""
    for piece in _parts(count, 0.35, seed=0):
        image = _resized(piece, size, size).astype(np.float32) / 255
        normal = ((image - MEAN) / STD).astype(np.float32)
        yield np.ascontiguousarray(normal.transpose(2, 0, 1)[None])


def letterboxed(count: int, size: int) -> Iterator[Array]:
    """Return random crops in a square with grey borders: 1 x 3 x size x size, BGR, 0 to 255."""
    for piece in _parts(count, 0.6, seed=1):
        height, width = piece.shape[:2]
        scale = size / max(height, width)
        small = _resized(piece, round(height * scale), round(width * scale))
        square = np.full((size, size, 3), PADDING, np.float32)
        square[: small.shape[0], : small.shape[1]] = small
        yield np.ascontiguousarray(square[:, :, ::-1].transpose(2, 0, 1)[None])


def _parts(count: int, least: float, seed: int) -> Iterator[Array]:
    """Yield crops of the photographs in turn, each at least this share of a side."""
    rng = np.random.default_rng(seed)
    photos = photographs()
    for index in range(count):
        photo = photos[index % len(photos)]
        height, width = (int(side * rng.uniform(least, 1)) for side in photo.shape[:2])
        top = rng.integers(0, photo.shape[0] - height + 1)
        left = rng.integers(0, photo.shape[1] - width + 1)
        piece = photo[top : top + height, left : left + width]
        yield piece[:, ::-1] if rng.random() < 0.5 else piece


def _resized(image: Array, height: int, width: int) -> Array:
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR))
