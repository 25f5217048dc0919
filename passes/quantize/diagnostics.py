"""Diagnose weights and ranges that 8 bits represent badly, with advice, one line each.

not finite       NaN or infinity: there is no scale
outliers         the largest value is so far above the others that it uses most of the steps
near-constant    values far from zero that hardly differ: the range contains zero, and few codes
                 are left for them
features         a few channels of a layer's input are far above the others and dominate their
                 common scale; an almost constant one wastes the steps
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from passes.quantize.layers.channel_weights import Kernel, kernel_of
from toolkit.calibrate import range_selection
from toolkit.calibrate.histogram import Histogram
from toolkit.calibrate.observers import Collect
from toolkit.calibrate.statistics import ChannelExtremes, Extremes, Statistic
from toolkit.ir import Graph, Model
from toolkit.quantization.number_format import UINT8
from toolkit.rewriting.match_failure import MatchFailure

if TYPE_CHECKING:
    from toolkit.calibrate.collector import Calibration
    from toolkit.calibrate.data import CalibrationData
    from toolkit.pass_manager.protocol import Context

WEIGHT_RATIO = 64.0
"""Ratio of max |w| to the root mean square of the other weights of its channel. At 127 those are
below one step."""
_NEGLIGIBLE = 1e-3
"""RMS of a channel without its largest weight, relative to the median channel: below this, the
channel is a single weight, as where a norm has nearly disabled it, and its error is negligible."""
RANGE_RATIO = 16.0
"""Ratio of max |x| to the 99.9th percentile: a thousandth of the values uses 4 of 8 bits."""
FEWEST_STEPS = 8
FEATURES = 16
"""One in this many channels may be far above the others."""
_FEWEST_FEATURES = 4
_SAMPLES = 4
_ROUNDING = 1e-14
_MILLION = 1e6
_PERCENT = 99.9
_MOST_NOTES = 5


@dataclass(frozen=True, slots=True)
class Trouble:
    """A problem of a tensor, with advice."""

    tensor: str
    what: str
    advice: str

    def __str__(self) -> str:
        return f"'{self.tensor}': {self.what}; {self.advice}"


def note_troubles(troubles: Iterable[Trouble], ctx: Context) -> None:
    """Note the first few problems, and the number of others."""
    listed = list(troubles)
    for trouble in listed[:_MOST_NOTES]:
        ctx.note(str(trouble))
    if len(listed) > _MOST_NOTES:
        ctx.note(f"and {len(listed) - _MOST_NOTES} more tensors that 8 bits represent badly")


def note_hard(model: Model, ctx: Context) -> None:
    """Note weights that are hard to quantize and, given real samples, hard input features."""
    note_troubles(weight_troubles(model), ctx)
    if ctx.calibration is not None and ctx.calibration.real:
        note_troubles(feature_troubles(model, ctx.calibration), ctx)


def feature_troubles(model: Model, data: CalibrationData) -> Iterator[Trouble]:
    """Yield the layer inputs in which a few channels dominate the range on the first samples."""
    inputs: dict[str, int] = {}
    for node in model.graph.nodes:
        kernel = kernel_of(model.graph, node)
        if kernel is not None and kernel.reads_channels and not model.graph.is_const(node.input[0]):
            inputs.setdefault(node.input[0], -1 if kernel.is_matrix else 1)
    observers = {name: Collect(ChannelExtremes, (axis,)) for name, axis in inputs.items()}
    found = data.first(_SAMPLES).collect(model, observers)
    for tensor, statistic in found.statistics.items():
        trouble = _feature_trouble(tensor, statistic)
        if trouble is not None:
            yield trouble


def _feature_trouble(tensor: str, statistic: Statistic) -> Trouble | None:
    assert isinstance(statistic, ChannelExtremes)
    low, high = statistic.low, statistic.high
    if low.size < _FEWEST_FEATURES:
        return None
    reach = np.maximum(np.abs(low), np.abs(high))
    far = reach > reach.max() / RANGE_RATIO
    if not far.any() or far.sum() > max(1, low.size // FEATURES):
        return None
    rest = reach[~far].max()
    what = f"{far.sum()} of {low.size} features reach {reach.max():.4g}, the others {rest:.4g}"
    if (UINT8.steps * (high - low)[far] < FEWEST_STEPS * reach[far]).all():
        advice = "they hardly vary: remove them before, or leave its users float"
    else:
        advice = "try smooth, or leave its users float"
    return Trouble(tensor, what, advice)


def weight_troubles(model: Model) -> Iterator[Trouble]:
    """Yield the weights that are hard to quantize per channel."""
    seen: set[tuple[int, str]] = set()
    for g in model.graphs():
        for node in g.nodes:
            kernel = kernel_of(g, node)
            if kernel is None:
                continue
            key = (id(g.scope_of(kernel.name)), kernel.name)
            if key in seen:
                continue
            seen.add(key)
            trouble = _weight_trouble(g, kernel)
            if trouble is not None:
                yield trouble


def _weight_trouble(g: Graph, kernel: Kernel) -> Trouble | None:
    try:
        largest = kernel.largest(g, kernel.out_axes)
    except MatchFailure:
        return Trouble(kernel.name, "not finite weights", "the layer has to stay float")
    squares = kernel.gather(
        g, kernel.out_axes, lambda w, _: np.square(w.astype(np.float64)), np.add
    )
    share = math.prod(kernel.shape) // squares.size
    rest = squares - np.square(largest)
    present = rest > _ROUNDING * squares  # a channel with a single nonzero weight is exact
    size = np.sqrt(np.where(present, rest, 1) / max(share - 1, 1))
    relevant = size > _NEGLIGIBLE * np.median(np.where(present, size, 0))
    ratio = np.where(present & relevant, largest / size, 0)
    bad = int(np.count_nonzero(ratio > WEIGHT_RATIO))
    if not bad:
        return None
    what = f"in {bad} of {ratio.size} outputs the largest weight is up to {_times(ratio.max())}"
    advice = "try clip-weights, or leave the layer float"
    return Trouble(kernel.name, f"{what} the usual one", advice)


def range_troubles(found: Calibration) -> Iterator[Trouble]:
    """Yield the tensors whose calibration range is hard to quantize."""
    for tensor, why in found.failed.items():
        yield Trouble(tensor, why.removeprefix(f"tensor '{tensor}' "), "it has to stay float")
    for tensor, statistic in found.statistics.items():
        trouble = _range_trouble(tensor, statistic)
        if trouble is not None:
            yield trouble


def _range_trouble(tensor: str, statistic: Statistic) -> Trouble | None:
    if isinstance(statistic, Extremes) and statistic.seen:
        low, high = statistic.low, statistic.high
        inner = statistic.below(_PERCENT)
    elif isinstance(statistic, Histogram) and statistic.seen:
        low, high = statistic.smallest, statistic.largest
        inner = max(map(abs, range_selection.percentile(statistic, _PERCENT)))
    else:
        return None
    found = _near_constant(tensor, low, high)
    if found is not None:
        return found
    outer = max(abs(low), abs(high))
    if inner <= 0 or outer / inner <= RANGE_RATIO:
        return None
    what = f"its largest value is {_times(outer / inner)} its {_PERCENT}th percentile"
    advice = "try smooth, observer=percentile, or leave its users float"
    return Trouble(tensor, what, advice)


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio < _MILLION else "over a million times"


def _near_constant(tensor: str, low: float, high: float) -> Trouble | None:
    reach = max(high, 0.0) - min(low, 0.0)
    steps = UINT8.steps * (high - low) / reach if reach else UINT8.steps
    if high == low or steps >= FEWEST_STEPS:
        return None
    what = (
        f"nearly constant: {low:.4g} to {high:.4g} is {max(1, round(steps))} of {UINT8.steps} steps"
    )
    return Trouble(tensor, what, "leave its users float, or subtract its mean before")
