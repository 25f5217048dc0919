"""The inputs of a benchmark model, and random feeds of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Input:
    """A graph input; `shape` holds sizes and names of dynamic dimensions.

    `below` makes it integer token ids in [0, below); `below=2` is an attention mask, rows of ones
    padded with zeros.
    """

    name: str
    shape: tuple[int | str, ...]
    below: int | None = None


# The sizes a model is exported with, and two others that it must work with just as well.
EXPORTED = {"batch": 2, "length": 11, "source": 13, "height": 64, "width": 96}
FED = (
    {"batch": 1, "length": 7, "source": 5, "height": 96, "width": 64},
    {"batch": 3, "length": 19, "source": 23, "height": 64, "width": 128},
)


def random_feed(
    inputs: Sequence[Input], sizes: Mapping[str, int], seed: int = 0
) -> dict[str, NDArray[Any]]:
    """Return a random array per input, with the given sizes of dynamic dimensions."""
    rng = np.random.default_rng(seed)
    feed: dict[str, NDArray[Any]] = {}
    for each in inputs:
        shape = [dim if isinstance(dim, int) else sizes[dim] for dim in each.shape]
        if each.below is None:
            feed[each.name] = rng.standard_normal(shape, dtype=np.float32)
        elif each.below == 2:
            lengths = rng.integers(1, shape[1], size=(shape[0], 1), endpoint=True)
            feed[each.name] = (np.arange(shape[1]) < lengths).astype(np.int64)
        else:
            feed[each.name] = rng.integers(0, each.below, size=shape, dtype=np.int64)
    return feed
