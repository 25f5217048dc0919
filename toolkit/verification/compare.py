"""Two outputs of a model compared: numbers relative to their scale, everything else as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_SMALLEST_SCALE = 5e-3
"""Differences are measured against at least this much. A probability of 1e-6 comes out of 1 - p or
a sigmoid with an error of one unit in the last place of 1.0, which no tolerance may forbid."""

_CHANNEL_SLACK = 100.0
_CHANNEL_FLOOR = 1e-5
_CHANNEL_ELEMENTS = 16
"""A slice of an output (of so many elements, to have a scale at all) may be off by this many times
the tolerance relative to its *own* scale, or to this share of the whole output's. One output often
holds different quantities, as boxes of 600 pixels beside scores of 0.01; by the common scale alone
the scores could be anything."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an output is from its reference."""

    absolute: float
    """max |a - b|"""
    relative: float
    """The figure that tolerances are about: relative to the scale; inf when not comparable."""
    reason: str = ""
    """Why the two are not comparable."""
    finite: bool = True
    """Whether there are numbers exactly where the reference has numbers."""


_EQUAL = Difference(0.0, 0.0)


def compare(reference: Any, actual: Any) -> Difference:
    """The difference between two outputs: tensors, or sequences, maps and optionals of them."""
    if reference is None or actual is None:
        both = reference is None and actual is None
        return _EQUAL if both else _unequal("one is an empty optional")
    if isinstance(reference, Mapping):
        return _compare_maps(cast("Mapping[Any, Any]", reference), actual)
    if isinstance(reference, list):
        return _compare_sequences(cast("list[Any]", reference), actual)
    return _compare_arrays(np.asarray(reference), np.asarray(actual))


def worst(differences: Sequence[Difference]) -> Difference:
    """The largest figures of all, with the first reason."""
    reason = next((d.reason for d in differences if d.reason), "")
    absolute = max((d.absolute for d in differences), default=0.0)
    relative = max((d.relative for d in differences), default=0.0)
    return Difference(absolute, relative, reason, all(d.finite for d in differences))


def json_number(error: float | None) -> float | None:
    """The figure in JSON, which has no infinity: None where there is nothing to tell."""
    return error if error is not None and math.isfinite(error) else None


def _unequal(reason: str, absolute: float = math.inf, finite: bool = True) -> Difference:
    return Difference(absolute, math.inf, reason, finite)


def _compare_sequences(reference: list[Any], actual: Any) -> Difference:
    if not isinstance(actual, list):
        return _unequal("a sequence became something else")
    items = cast("list[Any]", actual)
    if len(items) != len(reference):
        return _unequal(f"{len(items)} elements instead of {len(reference)}")
    return worst([compare(a, b) for a, b in zip(reference, items, strict=True)])


def _compare_maps(reference: Mapping[Any, Any], actual: Any) -> Difference:
    if not isinstance(actual, Mapping):
        return _unequal("a map became something else")
    entries = cast("Mapping[Any, Any]", actual)
    if entries.keys() != reference.keys():
        return _unequal("the keys of the map differ")
    return worst([compare(value, entries[key]) for key, value in reference.items()])


def _compare_arrays(reference: Array, actual: Array) -> Difference:
    if reference.shape != actual.shape:
        return _unequal(f"shape {list(actual.shape)} instead of {list(reference.shape)}")
    if not reference.size:
        return _EQUAL
    numeric = _is_float(reference) and _is_float(actual)
    if not numeric:
        return _compare_exactly(reference, actual)
    wide = np.complex128 if reference.dtype.kind == "c" else np.float64
    return _compare_floats(reference.astype(wide), actual.astype(wide))


def _is_float(array: Array) -> bool:
    # bfloat16 and fp8, which are not numpy's own, are known by name only.
    return array.dtype.kind in "fc" or str(array.dtype).startswith(("bfloat", "float"))


def _compare_exactly(reference: Array, actual: Array) -> Difference:
    differs = np.asarray(reference != actual)
    count = int(np.count_nonzero(differs))
    if not count:
        return _EQUAL
    absolute = math.inf
    if reference.dtype.kind in "biu" and actual.dtype.kind in "biu":
        gap = reference[differs].astype(np.float64) - actual[differs].astype(np.float64)
        absolute = float(np.max(np.abs(gap)))
    return _unequal(f"{count} of {differs.size} values differ", absolute)


def _compare_floats(reference: Array, actual: Array) -> Difference:
    finite = np.isfinite(reference)
    if not finite.all():
        same = (reference == actual) | (np.isnan(reference) & np.isnan(actual))
        if not same[~finite].all():
            return _unequal("infinities or NaNs of the reference are missing", finite=False)
        reference, actual = np.where(finite, reference, 0), np.where(finite, actual, 0)
    gap = np.abs(reference - actual)
    absolute = float(np.max(gap))
    if not math.isfinite(absolute):
        return _unequal("infinities or NaNs where the reference has numbers", finite=False)
    size = np.abs(reference)
    scale = max(float(np.max(size)), _SMALLEST_SCALE)
    relative = absolute / scale
    floor = max(scale * _CHANNEL_FLOOR, _SMALLEST_SCALE / _CHANNEL_SLACK)
    for axis in {1, reference.ndim - 1} if reference.ndim > 1 else ():
        if reference.size < _CHANNEL_ELEMENTS * reference.shape[axis]:
            continue
        others = tuple(i for i in range(reference.ndim) if i != axis)
        by_channel = gap.max(axis=others) / np.maximum(size.max(axis=others), floor)
        relative = max(relative, float(np.max(by_channel)) / _CHANNEL_SLACK)
    return Difference(absolute, relative)
