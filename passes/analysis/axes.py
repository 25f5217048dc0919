"""Axes, which may count from the back, and ends of slices, which may mean all the rest."""

from __future__ import annotations

from collections.abc import Sequence

TO_THE_END = 1_000_000_000
"""Ends of slices from here on mean "all the rest": PyTorch's exporters write INT32_MAX or
INT64_MAX, TensorFlow's writes 10^9. No axis is that long."""


def positive_axis(axis: int, rank: int) -> int:
    """The axis counted from the front; ValueError when a tensor of this rank has none."""
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a tensor of rank {rank}")
    return axis % rank


def positive_axes(axes: Sequence[int] | None, rank: int | None) -> list[int] | None:
    """Axes counted from the front, in the order given; None when that cannot be said.

    That is: when they are not known, are out of range, name one twice, or count from the back of a
    tensor whose rank is not known.
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
