"""Which axes may stay open, where the user does not say: found by asking the model itself.

Axis 0 of every input is `batch`; axis 1 of inputs of token ids, and of what has their shape, is
`sequence`. An axis counts when the model runs with other sizes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

from toolkit.feeds.user_samples import Feed
from toolkit.frontends.test_inputs import resized

Axes = dict[str, dict[int, str]]
Run = Callable[[Feed], Mapping[str, Any]]

BATCH, SEQUENCE = "batch", "sequence"
_MOST_INPUTS = 6
"""Of so many inputs, all smaller groups that may share a batch are tried."""


def find_axes(run: Run, feed: Feed) -> tuple[Axes, list[str]]:
    """The axes that the model takes at other sizes, and what was found to be fixed."""
    found: Axes = {}
    notes: list[str] = []
    for dim, axis, names in (
        (BATCH, 0, _batched(feed)),
        (SEQUENCE, 1, _sequences(feed)),
    ):
        if not names:
            continue
        kept = next((group for group in _groups(names) if _runs(run, feed, dim, axis, group)), ())
        for name in kept:
            found.setdefault(name, {})[axis] = dim
        fixed = [name for name in names if name not in kept]
        if fixed and dim == BATCH:
            listed = ", ".join(f"'{name}' at {feed[name].shape[axis]}" for name in fixed)
            notes.append(f"axis {axis} is fixed, the model takes no other size: {listed}")
    return found, notes


def _batched(feed: Feed) -> list[str]:
    """Inputs whose axis 0 has the size that the first input's has."""
    sizes = {name: value.shape[0] for name, value in feed.items() if value.ndim}
    first = next(iter(sizes.values()), None)
    return [name for name, size in sizes.items() if size == first]


def _sequences(feed: Feed) -> list[str]:
    """Inputs with tokens on axis 1: integers of two axes, and what has the same length there."""
    lengths = {v.shape[1] for v in feed.values() if v.ndim == 2 and v.dtype.kind in "iu"}
    if len(lengths) != 1:
        return []
    length = lengths.pop()
    return [n for n, v in feed.items() if v.ndim >= 2 and v.shape[1] == length and length > 1]


def _groups(names: list[str]) -> Iterator[tuple[str, ...]]:
    """All of them, then fewer and fewer."""
    yield tuple(names)
    if len(names) <= _MOST_INPUTS:
        for size in range(len(names) - 1, 0, -1):
            yield from combinations(names, size)


def _runs(run: Run, feed: Feed, dim: str, axis: int, names: tuple[str, ...]) -> bool:
    """Whether the model takes these axes larger and smaller, all together."""
    axes = {name: {axis: dim} for name in names}
    size = feed[names[0]].shape[axis]
    tried = (2, 5) if dim == BATCH else (max(2, size // 2), size + 2)
    try:
        for other in tried:
            run(resized(feed, axes, {dim: other}))
    except Exception:  # the user's own code runs here, and may raise anything
        return False
    return True
