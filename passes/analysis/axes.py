"""Normalize axes that count from the back; recognize slices to the end of an axis."""

from __future__ import annotations

from collections.abc import Sequence

TO_THE_END = 1_000_000_000
"""Ends of slices from this number on mean the end of the axis: PyTorch's exporters write INT32_MAX
or INT64_MAX, TensorFlow's writes 10^9. No axis is that long."""


def positive_axis(axis: int, rank: int) -> int:
    """Return the axis counted from the front; raise ValueError if it is out of range."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a tensor of rank {rank}")
    return axis % rank


def positive_axes(axes: Sequence[int] | None, rank: int | None) -> list[int] | None:
    """Return the axes counted from the front, in the order given, or None.

    None if they are unknown, out of range or repeated, or count from the back of a tensor of
    unknown rank.
    """
    if axes is None:
        return None
    if rank is None:
        found = list(axes)
        return found if all(axis >= 0 for axis in found) and _distinct(found) else None
    if not all(-rank <= axis < rank for axis in axes):
        return None
    found = [axis % rank for axis in axes]
    return found if _distinct(found) else None


def _distinct(axes: Sequence[int]) -> bool:
    return len(set(axes)) == len(axes)
