"""Test inputs for the export proof, derived from one feed that the model accepts.

A size is changed by repeating or truncating the feed, which keeps ids and masks valid. New values
are drawn where that is safe: floats around the example's, integers within its range. Zeros, other
signs and large values exercise branches that tracing may have specialized away.
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
Call = Callable[[Feed], Mapping[str, Any]]
"""Runs a framework's model: inputs by name to outputs by name."""

BATCH_SIZES = (1, 2, 5)
_LARGE = 30.0
"""Factor of the "large values" case."""


def sizes_in(feed: Feed, axes: Axes) -> dict[str, int]:
    """Return the size of every dynamic dimension; raise UsageError if one has two sizes."""
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for name, dims in axes.items():
        for axis, dim in dims.items():
            size = int(feed[name].shape[axis])
            if sizes.setdefault(dim, size) != size:
                raise UsageError(
                    f"dimension '{dim}' is {sizes[dim]} in '{first[dim]}' and {size} in '{name}' "
                    "of the example: give it two names, or another example"
                )
            first.setdefault(dim, name)
    return sizes


def resized(feed: Feed, axes: Axes, sizes: Mapping[str, int]) -> Feed:
    """Return the feed at other sizes of its dynamic dimensions: entries repeated or truncated."""
    made = dict(feed)
    for name, dims in axes.items():
        for axis, dim in dims.items():
            have, wanted = made[name].shape[axis], sizes.get(dim)
            if wanted is not None and wanted != have and have:
                made[name] = np.take(made[name], np.arange(wanted) % have, axis=axis)
    return made


def cases_from(feed: Feed, axes: Axes, seed: int = 0) -> list[Case]:
    """Return the feed itself, then other sizes of every dynamic dimension, then unusual values."""
    base = sizes_in(feed, axes)
    random = np.random.default_rng(seed)
    cases = [Case(feed, base)]
    for sizes in _several_sizes(base, axes):
        cases.append(Case(_redrawn(resized(feed, axes, sizes), random), sizes))
    for label, values in _unusual_values(feed, random):
        cases.append(Case(values, base, label, tied=label == "zeros"))
    return cases


def _several_sizes(base: Mapping[str, int], axes: Axes) -> Iterator[dict[str, int]]:
    """Yield sizes with each dimension changed alone, then all smallest, then all largest."""
    choices = {dim: _sizes_to_try(dim, size, axes) for dim, size in base.items()}
    listed = [{**base, dim: size} for dim, sizes in choices.items() for size in sizes]
    listed += [{dim: sizes[end] for dim, sizes in choices.items()} for end in (0, -1)]
    seen = [dict(base)]
    for sizes in listed:
        if sizes not in seen:
            seen.append(sizes)
            yield sizes


def _sizes_to_try(dim: str, size: int, axes: Axes) -> list[int]:
    """Return test sizes; a dimension is a batch by its name, or if it is always axis 0."""
    places = {axis for dims in axes.values() for axis, name in dims.items() if name == dim}
    if "batch" in dim.lower() or places == {0}:
        return list(BATCH_SIZES)
    return sorted({1, max(2, size // 2), 2 * size + 1})


def _redrawn(feed: Feed, random: np.random.Generator) -> Feed:
    return {name: _redraw(value, random) for name, value in feed.items()}


def _unusual_values(feed: Feed, random: np.random.Generator) -> Iterator[tuple[str, Feed]]:
    """Yield feeds that may take another branch than the example, with their labels."""
    yield "other values", _redrawn(feed, random)
    masks = [name for name, value in feed.items() if _is_mask(name, value)]
    for variation, side in enumerate(("right", "left") if masks else ()):
        variant = FeedVariant(random, {}, variation)
        # the same padding in every mask, as from a tokenizer
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
    """Return whether an input is an integer matrix of ones, or of zeros and ones named a mask."""
    if value.ndim < 2 or value.dtype.kind not in "biu" or not value.size:
        return False
    bits = set(np.unique(value).tolist()) <= {0, 1}
    return bits and ("mask" in name.lower() or bool(np.all(value)))


def _is_float(value: Any) -> bool:
    return getattr(value, "dtype", np.dtype(object)).kind == "f"


def _redraw(value: Any, random: np.random.Generator) -> Any:
    """Return other values with the mean, spread or range of these."""
    if not hasattr(value, "dtype") or not value.size:
        return value
    array: Array = value
    if array.dtype.kind == "f":
        wide = array.astype(np.float64)
        spread = float(np.std(wide)) if array.size > 1 else 0.0
        drawn = random.standard_normal(array.shape) * (spread or 1.0) + float(np.mean(wide))
        if float(np.min(wide)) >= 0:  # a mask, a probability or a length is never negative
            drawn = np.clip(drawn, float(np.min(wide)), float(np.max(wide)))
        return drawn.astype(array.dtype)
    if array.dtype.kind in "iu":
        low, high = int(array.min()), int(array.max())
        return random.integers(low, high, array.shape, dtype=array.dtype, endpoint=True)
    if array.dtype.kind == "b" and bool(array.any()) and not bool(array.all()):
        return random.permutation(array.ravel()).reshape(array.shape)
    return array


# Dynamic axes ------------------------------------------------------------------------------------


def axes_of(model: Model) -> dict[str, dict[int, str]]:
    """Return the dynamic dimensions that a graph declares on its inputs."""
    found: dict[str, dict[int, str]] = {}
    for name in model.graph.feeds:
        for axis, dim in enumerate(model.graph.shape(name) or ()):
            if isinstance(dim, Expr):
                found.setdefault(name, {})[axis] = str(dim)
    return found


def batched_inputs(feed: Feed) -> list[str]:
    """Return the inputs whose axis 0 has the same size as the first input's."""
    sizes = {name: value.shape[0] for name, value in feed.items() if value.ndim}
    first = next(iter(sizes.values()), None)
    return [name for name, size in sizes.items() if size == first]


def accepts(call: Call, feed: Feed) -> bool:
    """Return whether the model runs on a feed."""
    try:
        call(feed)
    except Exception:  # a framework, or the user's own code in it, may raise anything
        return False
    return True


def output_axes(call: Call, feed: Feed, axes: Axes) -> dict[str, dict[int, str]]:
    """Return the dynamic axes of the outputs, found by changing one dimension at a time.

    An axis that changes with a dimension, but to another size, gets a name of its own.
    """
    base = call(feed)
    found: dict[str, dict[int, str]] = {}
    for dim, size in sizes_in(feed, axes).items():
        other = size + 3
        try:
            changed = call(resized(feed, axes, {dim: other}))
        except Exception:  # the proof reports sizes that the model does not accept
            continue
        for name, value in base.items():
            before, after = np.shape(value), np.shape(changed[name])
            if len(before) != len(after):
                continue
            for axis, (a, b) in enumerate(zip(before, after, strict=True)):
                if a != b:
                    same = (a, b) == (size, other)
                    found.setdefault(name, {})[axis] = dim if same else f"{name}_{axis}"
    return found
