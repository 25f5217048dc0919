"""The relative error of a model's outputs, as one number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from toolkit.calibrate.statistics import Array, is_float
from toolkit.feeds import Feed
from toolkit.ir.model import Model
from toolkit.runtime.session import Session


class OutputError:
    """|y - f|^2 / |f|^2 over all feeds, averaged over the float outputs."""

    def __init__(self, floats: Model, feeds: Sequence[Feed], custom_ops: Sequence[str]) -> None:
        self._feeds, self._custom_ops = feeds, custom_ops
        session = Session(floats, custom_ops=custom_ops)
        self._names = floats.graph.outputs
        self._wanted = [session.run(feed, self._names) for feed in feeds]

    def of(self, model: Model) -> float:
        """Return the error of a model with the same outputs, over the comparable ones."""
        session = Session(model, custom_ops=self._custom_ops)
        off, size = np.zeros(len(self._names)), np.zeros(len(self._names))
        for feed, wanted in zip(self._feeds, self._wanted, strict=True):
            for place, pair in enumerate(zip(session.run(feed, self._names), wanted, strict=True)):
                found, reference = map(_numbers, pair)
                if reference is None or found is None or found.shape != reference.shape:
                    continue  # not float tensors, or of different data-dependent shapes
                off[place] += float(((found - reference) ** 2).sum())
                size[place] += float((reference**2).sum())
        present = size > 0
        return float((off[present] / size[present]).mean()) if present.any() else 0.0


def _numbers(value: object) -> Array | None:
    """Return a float tensor in float64, None for any other value."""
    if not isinstance(value, np.ndarray):
        return None
    array = cast("Array", value)
    return array.astype(np.float64) if is_float(array) else None
