"""Shared by the tests of the passes that keep accuracy: data for them, and errors in dB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from passes.quantize.schemes.dynamic.quantize_dynamic import QuantizeDynamic
from tests import ort
from tests.checks import model
from toolkit.calibrate.data import Calib
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context

Feeds = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Fed:
    """A pass with calibration data, and the float model if it wants one."""

    item: Any
    feeds: Feeds
    floats: Model | None = None

    def run(self, subject: Model, ctx: Context) -> None:
        ctx.calibration = Calib(list(self.feeds)).open(subject)
        ctx.reference = self.floats
        self.item.run(subject, ctx)


def notes_of(item: Any, text: str, feeds: Feeds = ()) -> list[str]:
    """What a pass says of a model."""
    ctx = Context()
    (Fed(item, feeds) if feeds else item).run(model(text), ctx)
    return ctx.notes


def rows(
    width: int, large: dict[int, float] | None = None, count: int = 8, seed: int = 0
) -> list[dict[str, Any]]:
    """Feeds `x` of some rows, with channels that are so many times as large."""
    random = np.random.default_rng(seed)
    factors = np.ones(width)
    for channel, factor in (large or {}).items():
        factors[channel] = factor
    return [
        {"x": (random.standard_normal((3, 5, width)) * factors).astype(np.float32)}
        for _ in range(count)
    ]


def sqnr(reference: Model, other: Model, feeds: Feeds) -> float:
    """Signal over error of the first output, in dB."""
    sessions = [ort.session(m.inlined_proto()) for m in (reference, other)]
    pairs: list[Any] = [[s.run(None, dict(feed))[0] for s in sessions] for feed in feeds]
    signal = sum(float((wanted.astype(np.float64) ** 2).sum()) for wanted, _ in pairs)
    error = sum(float(((wanted - found).astype(np.float64) ** 2).sum()) for wanted, found in pairs)
    return float(10 * np.log10(signal / error))


def in_int8(subject: Model) -> Model:
    """The model with its linear layers in dynamic int8."""
    copy = subject.copy()
    QuantizeDynamic(min_elements=1).run(copy, Context())
    copy.commit()
    return copy
