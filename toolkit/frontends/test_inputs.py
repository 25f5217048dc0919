"""Feeds to prove with, made from one that the model takes.

A size is changed by repeating or cutting what is there, so that ids stay ids and masks stay masks;
values are drawn anew where that is safe: floats around the example's, integers between its smallest
and largest. Zeros, other signs and large numbers are for branches that tracing may have baked in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UsageError
from toolkit.feeds.domains import FeedVariant, Mask
from toolkit.feeds.user_samples import Feed
from toolkit.frontends.protocol import Case
from toolkit.frontends.request import Axes
from toolkit.ir.model import Model
from toolkit.symbolic import Expr

Array = NDArray[Any]

BATCH_SIZES = (1, 2, 5)
_LARGE = 30.0


def sizes_in(feed: Feed, axes: Axes) -> dict[str, int]:
    """The size of every dynamic dimension in a feed; UsageError if one has two."""
    sizes: dict[str, int] = {}
    where: dict[str, str] = {}
    for name, dims in axes.items():
        for axis, dim in dims.items():
            size = int(feed[name].shape[axis])
            if sizes.setdefault(dim, size) != size:
                raise UsageError(
                    f"dimension '{dim}' is {sizes[dim]} in '{where[dim]}' and {size} in '{name}' "
                    "of the example: it needs two names, or another example"
                )
            where.setdefault(dim, name)
    return sizes


def resized(feed: Feed, axes: Axes, sizes: Mapping[str, int]) -> Feed:
    """The feed with its dynamic dimensions at other sizes: entries repeated, or cut."""
    made = dict(feed)
    for name, dims in axes.items():
        for axis, dim in dims.items():
            have, wanted = made[name].shape[axis], sizes.get(dim)
            if wanted is not None and wanted != have and have:
                made[name] = np.take(made[name], np.arange(wanted) % have, axis=axis)
    return made


def cases_from(feed: Feed, axes: Axes, seed: int = 0) -> list[Case]:
    """The feed itself, then others at several sizes of every dynamic dimension, then odd values."""
    base = sizes_in(feed, axes)
    random = np.random.default_rng(seed)
    cases = [Case(feed, base)]
    for sizes in several_sizes(base, axes):
        cases.append(Case(redrawn(resized(feed, axes, sizes), random), sizes))
    for label, values in odd_values(feed, random):
        cases.append(Case(values, base, label, tied=label == "zeros"))
    return cases


def several_sizes(base: Mapping[str, int], axes: Axes) -> Iterator[dict[str, int]]:
    """Each dimension changed alone, then all at their smallest, then all at their largest."""
    choices = {dim: _sizes_of(dim, size, axes) for dim, size in base.items()}
    listed = [{**base, dim: size} for dim, sizes in choices.items() for size in sizes]
    listed.append({dim: sizes[0] for dim, sizes in choices.items()})
    listed.append({dim: sizes[-1] for dim, sizes in choices.items()})
    seen = [dict(base)]
    for sizes in listed:
        if sizes not in seen:
            seen.append(sizes)
            yield sizes


def is_batch(dim: str, axes: Axes) -> bool:
    """Whether a dimension counts examples: by its name, or as the first axis wherever it is."""
    if "batch" in dim.lower():
        return True
    return {axis for dims in axes.values() for axis, name in dims.items() if name == dim} == {0}


def _sizes_of(dim: str, size: int, axes: Axes) -> list[int]:
    if is_batch(dim, axes):
        return list(BATCH_SIZES)
    return sorted({1, max(2, size // 2), 2 * size + 1})


def redrawn(feed: Feed, random: np.random.Generator) -> Feed:
    """Other values of the same kind in every input."""
    return {name: _redraw(value, random) for name, value in feed.items()}


def odd_values(feed: Feed, random: np.random.Generator) -> Iterator[tuple[str, Feed]]:
    """Feeds that may take another branch than the example: other signs, zeros, large numbers."""
    yield "other values", redrawn(feed, random)
    masks = [name for name, value in feed.items() if _is_mask(name, value)]
    for variation, side in enumerate(("right", "left") if masks else ()):
        variant = FeedVariant(random, {}, variation)
        # the same padding in all of them, as a tokenizer makes it
        drawn = Mask().draw(feed[masks[0]].shape, np.dtype(np.int64), variant)
        padded = {n: drawn.astype(feed[n].dtype) for n in masks if feed[n].shape == drawn.shape}
        yield f"padded on the {side}", {**feed, **padded}
    if not any(_is_float(value) for value in feed.values()):
        return

    def floats(change: Callable[[Array], Array]) -> Feed:
        return {
            name: np.asarray(change(value), dtype=value.dtype) if _is_float(value) else value
            for name, value in feed.items()
        }

    yield "zeros", floats(np.zeros_like)
    yield "all positive", floats(lambda value: np.abs(value) + np.asarray(0.1, value.dtype))
    yield "all negative", floats(lambda value: -np.abs(value) - np.asarray(0.1, value.dtype))
    yield "large values", floats(lambda value: value * np.asarray(_LARGE, value.dtype))


def _is_mask(name: str, value: Any) -> bool:
    """Rows of ones (and zeros), or something of that kind that is called a mask."""
    if value.ndim < 2 or value.dtype.kind not in "biu" or not value.size:
        return False
    bits = set(np.unique(value).tolist()) <= {0, 1}
    return bits and ("mask" in name.lower() or bool(np.all(value)))


def _is_float(value: Any) -> bool:
    return getattr(value, "dtype", np.dtype(object)).kind == "f"


def _redraw(value: Any, random: np.random.Generator) -> Any:
    if not hasattr(value, "dtype") or not value.size:
        return value
    array: Array = value
    if array.dtype.kind == "f":
        wide = array.astype(np.float64)
        spread = float(np.std(wide)) if array.size > 1 else 0.0
        drawn = random.standard_normal(array.shape) * (spread or 1.0) + float(np.mean(wide))
        if float(np.min(wide)) >= 0:  # a mask, a probability, a length: never below zero
            drawn = np.clip(drawn, float(np.min(wide)), float(np.max(wide)))
        return drawn.astype(array.dtype)
    if array.dtype.kind in "iu":
        low, high = int(array.min()), int(array.max())
        return random.integers(low, high, array.shape, dtype=array.dtype, endpoint=True)
    if array.dtype.kind == "b" and bool(array.any()) and not bool(array.all()):
        return random.permutation(array.ravel()).reshape(array.shape)
    return array


# From the graph's side ---------------------------------------------------------------------------


def axes_of(model: Model) -> dict[str, dict[int, str]]:
    """The dynamic dimensions that a graph declares on its inputs."""
    found: dict[str, dict[int, str]] = {}
    for name in model.graph.feeds:
        for axis, dim in enumerate(model.graph.shape(name) or ()):
            if isinstance(dim, Expr):
                found.setdefault(name, {})[axis] = str(dim)
    return found
