"""X^T X of a layer's inputs, summed batch by batch: what GPTQ knows of the data.

It is mapped to a file, and computed some rows at a time: of a wide layer it is larger than the
weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from passes.quantize.layers.row_blocks import blocks
from toolkit.calibrate.statistics import (
    Array,
    Mismatch,
    Range,
    State,
    Statistic,
    finite_bounds,
    require_same_key,
)
from toolkit.storage.spill import allocate

_ROWS = 4096
"""Rows that are multiplied at once: a large batch does not double in memory."""


class Gram:
    """The sum over all rows x of x^T x; [inputs, inputs] in float32."""

    def __init__(self, tensor: str) -> None:
        self.tensor = tensor
        self.total: Array = np.empty((0, 0), np.float32)
        self.rows = 0

    @property
    def key(self) -> str:
        return "gram"

    @property
    def seen(self) -> bool:
        return self.rows > 0

    def update(self, values: Array) -> None:
        if not values.ndim or finite_bounds(values, self.tensor) is None:
            return
        rows = values.reshape(-1, values.shape[-1])
        self._widen(rows.shape[-1])
        for start in range(0, len(rows), _ROWS):
            some = rows[start : start + _ROWS].astype(np.float32)
            for at, _ in blocks(self.total):
                self.total[at] += np.matmul(np.transpose(some[:, at]), some)
        self.rows += len(rows)

    def merge(self, other: Gram) -> None:
        require_same_key(self, other)
        if other.rows:
            self._widen(len(other.total))
            for at, _ in blocks(self.total):
                self.total[at] += other.total[at]
            self.rows += other.rows

    def state(self) -> State:
        return {"total": self.total, "rows": np.array(self.rows)}

    def restore(self, state: Mapping[str, Array]) -> None:
        self.total, self.rows = np.asarray(state["total"]), int(state["rows"])

    def _widen(self, channels: int) -> None:
        """Make room for so many channels, the same as before."""
        if not self.rows:
            self.total = allocate((channels, channels), np.float32)
            self.total[:] = 0
        elif channels != len(self.total):
            raise Mismatch(
                f"tensor '{self.tensor}' has {channels} channels, and had {len(self.total)} before"
            )


@dataclass(frozen=True, slots=True)
class GramObserver:
    """Gathers a Gram; there is no range in it."""

    name: ClassVar[str] = "gram"

    def start(self, tensor: str) -> Statistic:
        return Gram(tensor)

    def range(self, statistic: Statistic) -> Range:
        raise TypeError(f"a Gram of '{statistic.tensor}' has no range")
