"""Numbers and shapes as text for reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def size(count: int) -> str:
    """Format a number of bytes: `95.9 kB`."""
    amount, unit = float(count), "B"
    for bigger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, bigger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 99.95 else f"{amount:#.3g} {unit}"


def duration(seconds: float) -> str:
    """Format seconds: `0.4 ms`, `12 ms`, `1.3 s`, `2 min 5 s`."""
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def error(value: float | None) -> str:
    """Format an error: `1.2e-07`, `0` if exactly equal, empty if not measured."""
    if value is None:
        return ""
    if math.isinf(value):
        return "not comparable"
    return "0" if value == 0 else f"{value:.1e}"


def change(before: int, after: int) -> str:
    """Format a relative change: `(-41 %)`."""
    percent = 100 * (after - before) / before if before else 0.0
    if abs(percent) < 0.05:
        return "(the same)" if before == after else "(about the same)"
    return f"({percent:+.0f} %)" if abs(percent) >= 1 else f"({percent:+.1f} %)"


def shape(sizes: Sequence[int | str | None] | None) -> str:
    """Format a shape: `[batch, 3, ?, 32]`, or `[...]` if the rank is unknown."""
    if sizes is None:
        return "[...]"
    return f"[{', '.join('?' if s is None else str(s) for s in sizes)}]"


def top(counts: Mapping[str, int], most: int) -> str:
    """Format the largest counts: `identity 4, no-op cast 2, 3 more`."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return listed([f"{name} {count}" for name, count in ordered], most)


def listed(items: Sequence[str], most: int) -> str:
    """Format the first items: `Constant 45 -> 0, Shape 12 -> 1, 3 more`."""
    rest = len(items) - most
    return ", ".join([*items[:most], f"{rest} more"] if rest > 0 else items)


def count(number: int, noun: str) -> str:
    """Format a count: `1 node`, `2 nodes`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
