"""From ranges to scales: what 8 bits can hold of an activation, and which tensors share a grid.

    x ~ s (q - z)        q in 0..255 (uint8) or -128..127 (int8)

    lopsided    s = (high - low) / 255,            z = round(q_min - low / s), halves to even
    symmetric   s = max(-low, high) / 127,         z = 128 (uint8) or 0 (int8)

The range is widened to hold zero, and a degenerate one is [0, 1] (see `Range`): zero is a point of
every grid, so that padding and Relu are exact. The quotient is taken in doubles and rounded to a
32-bit float once; z follows from the rounded s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.calibrate.statistics import Range
from toolkit.errors import UsageError
from toolkit.ir.graph import Array
from toolkit.quantization.plan import ActivationType, TensorEntry

_LEAST: Mapping[ActivationType, int] = {"uint8": 0, "int8": -128}
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Grid:
    """The 256 numbers that a tensor can hold; `scale` is exactly a 32-bit float."""

    dtype: ActivationType
    scale: float
    zero: int

    @classmethod
    def of(
        cls, low: float, high: float, dtype: ActivationType = "uint8", symmetric: bool = False
    ) -> Grid:
        """The grid for a range."""
        found = Range.around(low, high)
        least = _LEAST[dtype]
        if symmetric:
            scale = _rounded(max(-found.low, found.high) / 127)
            return cls(dtype, scale, least + 128)
        scale = _rounded((found.high - found.low) / 255)
        zero = int(np.rint(least - found.low / scale))
        return cls(dtype, scale, min(max(zero, least), least + 255))

    @property
    def low(self) -> float:
        return (_LEAST[self.dtype] - self.zero) * self.scale

    @property
    def high(self) -> float:
        return (_LEAST[self.dtype] + 255 - self.zero) * self.scale

    def quantize(self, values: Array) -> Array:
        """As QuantizeLinear does it."""
        least = _LEAST[self.dtype]
        rounded = np.rint(values / np.float32(self.scale)) + self.zero
        return np.clip(rounded, least, least + 255).astype(self.dtype)


def _rounded(scale: float) -> float:
    return float(np.float32(min(scale, _LARGEST)))


class Ties:
    """Groups of tensors that share a grid."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}

    def tie(self, tensors: Sequence[str]) -> None:
        for name in tensors[1:]:
            self._parents[self.group(name)] = self.group(tensors[0])

    def group(self, tensor: str) -> str:
        """The name of the tensor's group: one of its members."""
        top = tensor
        while (above := self._parents.get(top, top)) != top:
            top = above
        while tensor != top:
            above = self._parents.get(tensor, tensor)
            self._parents[tensor], tensor = top, above
        return top


def grids_of(entries: Iterable[TensorEntry], ties: Ties) -> dict[str, Grid]:
    """The grid of every tensor: of one alone by its own entry, of tied ones by all of theirs."""
    groups: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        groups.setdefault(ties.group(entry.tensor), []).append(entry)
    grids: dict[str, Grid] = {}
    for members in groups.values():
        grid = _common(members)
        grids.update((member.tensor, grid) for member in members)
    return grids


def _common(members: Sequence[TensorEntry]) -> Grid:
    first = members[0]
    given = [entry for entry in members if entry.scale is not None]
    for other in members[1:]:
        if (other.dtype, other.symmetric) != (first.dtype, first.symmetric):
            _refuse(first, other, "but not their dtype and symmetry")
    for other in given[1:]:
        if (other.scale, other.zero) != (given[0].scale, given[0].zero):
            _refuse(given[0], other, "but not their scale and zero point")
    if given:
        scale, zero = given[0].scale, given[0].zero
        assert scale is not None
        assert zero is not None
        return Grid(first.dtype, _rounded(scale), zero)
    low = min(entry.low or 0.0 for entry in members)
    high = max(entry.high or 0.0 for entry in members)
    return Grid.of(low, high, first.dtype, first.symmetric)


def _refuse(one: TensorEntry, other: TensorEntry, what: str) -> None:
    raise UsageError(f"tensors '{one.tensor}' and '{other.tensor}' are tied, {what}")
