"""Phrases that messages share: a name that may have been meant, and long lists cut short."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence


def suggestion(name: str, known: Sequence[str]) -> str:
    """`: did you mean 'fold'?`, or nothing when no known name is near."""
    spelled = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), spelled, n=1)
    return f": did you mean {spelled[near[0]]!r}?" if near else ""


def first_of(names: Sequence[str], most: int = 3) -> str:
    """`a, b, c and 4 more`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def by_reason(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """`a, b, c and 4 more (why)` for each reason that names are paired with."""
    names: dict[str, list[str]] = {}
    for name, reason in found:
        names.setdefault(reason, []).append(name)
    for reason, listed in names.items():
        yield f"{first_of(listed)} ({reason})"
