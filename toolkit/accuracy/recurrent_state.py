"""Recurrent state: outputs that are fed back as inputs, and chains of such feeds.

A pair is recognized by its names (`state` and `stateN`, `h0` and `hn`, `mem_in` and `mem_out`) and
by equal shapes on a sample. Errors of a state accumulate from step to step. Recurrent models are
therefore compared over chains of steps, each model with its own state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from toolkit.calibrate.statistics import is_float
from toolkit.feeds import Feed

STEPS = 8
"""The number of steps of a chain of consecutive feeds."""

_MIN_STEPS = 4
"""Shorter chains are extended by repeating the last feed."""

_WORDS = frozenset(
    (
        *("in", "input", "out", "output", "new", "next", "prev", "previous", "old", "last"),
        *("init", "initial", "final", "past", "present", "n", "t", "0", "1", "updated"),
    )
)
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_STATE_NAME = re.compile(
    r"state|hidden|memory|cell|rnn|lstm|gru|context|(^|_)[hc]_?[0n]?$", re.IGNORECASE
)


def state_pairs(feed: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, str]:
    """Return the outputs that are fed back, by the input they become."""
    pairs: dict[str, str] = {}
    for name, given in feed.items():
        fitting = [
            other
            for other, value in outputs.items()
            if other not in pairs.values() and _alike(given, value)
        ]
        stem = _stem(name)
        same = [other for other in fitting if stem and _stem(other) == stem]
        if not same and _STATE_NAME.search(name):
            same = fitting
        if len(same) == 1:
            pairs[name] = same[0]
    return pairs if len(pairs) < len(feed) else {}  # a model has other inputs besides its state


def _alike(given: Any, value: Any) -> bool:
    a, b = getattr(given, "dtype", None), getattr(value, "dtype", None)
    return a is not None and a == b and is_float(given) and given.shape == value.shape


def _stem(name: str) -> tuple[str, ...]:
    """Return a name without the words that distinguish old from new state."""
    short = re.fullmatch(r"([a-zA-Z])_?[0nN]", name)
    if short:
        return (short[1].lower(),)
    return tuple(p for p in (part.lower() for part in _PART.findall(name)) if p not in _WORDS)


def chains(feeds: Iterable[Feed], stateful: bool) -> Iterator[list[Feed]]:
    """Group feeds into chains that carry a state; without one, each feed is a chain."""
    if not stateful:
        yield from ([feed] for feed in feeds)
        return
    chain: list[Feed] = []
    for feed in feeds:
        if chain and (len(chain) == STEPS or _shapes(chain[0]) != _shapes(feed)):
            yield _extended(chain)
            chain = []
        chain.append(feed)
    if chain:
        yield _extended(chain)


def _extended(chain: list[Feed]) -> list[Feed]:
    return chain + [chain[-1]] * (_MIN_STEPS - len(chain))


def _shapes(feed: Feed) -> list[tuple[int, ...]]:
    return [np.shape(value) for value in feed.values()]
