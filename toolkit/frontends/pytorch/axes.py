"""Find the axes that can be dynamic when none are requested, by running the model.

Axis 0 of every input is `batch`; axis 1 of token ids, and of inputs of the same length, is
`sequence`. An axis is dynamic if the model runs at other sizes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from toolkit.feeds.user_samples import Feed
from toolkit.frontends.test_inputs import Call, accepts, batched_inputs, resized

Axes = dict[str, dict[int, str]]

_BATCH, _SEQUENCE = "batch", "sequence"
_MAX_INPUTS = 6
"""The most inputs for which every subset that may share a dimension is tried."""


def find_axes(call: Call, feed: Feed) -> tuple[Axes, list[str]]:
    """Return the axes at which the model supports other sizes, and notes on fixed ones."""
    found: Axes = {}
    notes: list[str] = []
    for dim, axis, names in ((_BATCH, 0, batched_inputs(feed)), (_SEQUENCE, 1, _sequences(feed))):
        kept = next((s for s in _subsets(names) if _supports(call, feed, dim, axis, s)), ())
        for name in kept:
            found.setdefault(name, {})[axis] = dim
        fixed = [name for name in names if name not in kept]
        if fixed and dim == _BATCH:
            listed = ", ".join(f"'{name}' at {feed[name].shape[axis]}" for name in fixed)
            notes.append(f"axis {axis} is fixed, the model supports no other size: {listed}")
    return found, notes


def _sequences(feed: Feed) -> list[str]:
    """Return the integer matrices, and other inputs of the same length along axis 1."""
    lengths = {v.shape[1] for v in feed.values() if v.ndim == 2 and v.dtype.kind in "iu"}
    if len(lengths) != 1:
        return []
    length = lengths.pop()
    return [n for n, v in feed.items() if v.ndim >= 2 and v.shape[1] == length and length > 1]


def _subsets(names: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield all names, then smaller and smaller subsets."""
    smallest = 1 if len(names) <= _MAX_INPUTS else len(names)
    for size in range(len(names), smallest - 1, -1):
        yield from combinations(names, size)


def _supports(call: Call, feed: Feed, dim: str, axis: int, names: tuple[str, ...]) -> bool:
    """Return whether the model runs with these axes larger and smaller, all together."""
    axes = {name: {axis: dim} for name in names}
    size = feed[names[0]].shape[axis]
    tried = (2, 5) if dim == _BATCH else (max(2, size // 2), size + 2)
    return all(accepts(call, resized(feed, axes, {dim: other})) for other in tried)
