"""Phrases shared by messages: suggestions for misspelled names, abbreviated lists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return `: did you mean 'fold'?`, or nothing if no known name is similar."""
    by_lowercase = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lowercase, n=1)
    return f": did you mean {by_lowercase[near[0]]!r}?" if near else ""


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Format the first names: `a, b, c and 4 more`."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def by_reason(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Group (name, reason) pairs by reason: yield `a, b, c and 4 more (reason)` for each."""
    names: dict[str, list[str]] = {}
    for name, reason in found:
        names.setdefault(reason, []).append(name)
    for reason, listed in names.items():
        yield f"{first_of(listed)} ({reason})"
