"""Compare two outputs of a model: floats relative to their scale, everything else exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from toolkit.verification.tolerance import (
    CHANNEL_ELEMENTS,
    CHANNEL_FLOOR,
    CHANNEL_SLACK,
    MIN_SCALE,
)

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between an output and its reference."""

    absolute: float
    """max |a - b|"""
    relative: float
    """The error relative to the scale, which tolerances limit; inf when not comparable."""
    reason: str = ""
    """Why the two are not comparable."""
    finite: bool = True
    """Whether the output is finite wherever the reference is, and has the same infinities."""


_EQUAL = Difference(0.0, 0.0)


def compare(reference: Any, actual: Any) -> Difference:
    """Compare two outputs: tensors, or sequences, maps and optionals of them."""
    if reference is None or actual is None:
        both = reference is None and actual is None
        return _EQUAL if both else _unequal("one is an empty optional")
    if isinstance(reference, Mapping):
        return _compare_maps(cast("Mapping[Any, Any]", reference), actual)
    if isinstance(reference, list):
        return _compare_sequences(cast("list[Any]", reference), actual)
    return _compare_arrays(np.asarray(reference), np.asarray(actual))


def worst(differences: Sequence[Difference]) -> Difference:
    """Combine differences: the largest errors, with the first reason."""
    reason = next((d.reason for d in differences if d.reason), "")
    absolute = max((d.absolute for d in differences), default=0.0)
    relative = max((d.relative for d in differences), default=0.0)
    return Difference(absolute, relative, reason, all(d.finite for d in differences))


def compare_typed(reference: Any, actual: Any) -> Difference:
    """Compare two outputs as `compare` does, and require equal element types."""
    expected, found = (getattr(value, "dtype", None) for value in (reference, actual))
    # one side may hold strings as objects, the other as fixed-width text
    if expected != found and not {"O", "U"} >= {np.dtype(d).kind for d in (expected, found) if d}:
        return _unequal(f"{found} instead of {expected}")
    return compare(reference, actual)


def worst_violation(found: Mapping[str, Difference], limits: Mapping[str, float]) -> str:
    """Return the output that exceeds its limit by the largest error, in one line; "" if none."""
    over = {name: d for name, d in found.items() if not d.relative <= limits[name]}
    if not over:
        return ""
    name, bad = max(over.items(), key=lambda item: item[1].relative)
    figures = f"off by {bad.relative:.1e} of its scale, {limits[name]:.0e} allowed"
    return f"output '{name}': {bad.reason or figures}"


def json_number(error: float | None) -> float | None:
    """Return the number, or None if it is infinite or NaN, which JSON cannot express."""
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
    # bfloat16 and fp8 are not numpy's own types: recognize them by name
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
    scale = max(float(np.max(size)), MIN_SCALE)
    relative = absolute / scale
    floor = max(scale * CHANNEL_FLOOR, MIN_SCALE / CHANNEL_SLACK)
    for axis in {1, reference.ndim - 1} if reference.ndim > 1 else ():
        if reference.size < CHANNEL_ELEMENTS * reference.shape[axis]:
            continue
        others = tuple(i for i in range(reference.ndim) if i != axis)
        by_channel = gap.max(axis=others) / np.maximum(size.max(axis=others), floor)
        relative = max(relative, float(np.max(by_channel)) / CHANNEL_SLACK)
    return Difference(absolute, relative)
