"""Range selection: clip the range of a histogram.

Ranges depend on the counts alone: like the histogram, they are exact under merging. Candidates are
[max(low, -t), min(high, t)] for multiples t of 1/128 of the wider side.
"""

from __future__ import annotations

import numpy as np

from toolkit.calibrate.histogram import Histogram
from toolkit.calibrate.statistics import Doubles

_STEPS = 128
_SMOOTHING = 1e-9
"""The smallest probability of a bin of the quantized distribution: KL is infinite at zero."""


def percentile(histogram: Histogram, percent: float) -> tuple[float, float]:
    """Return the central interval that holds `percent` of the values.

    (100 - percent) / 2 percent lie on either side of it. Values are assumed uniform within a bin;
    the interval never exceeds the extremes.
    """
    if not histogram.seen:
        return 0.0, 0.0
    # the cumulative distribution at the edges of bins, and its inverse
    below = np.concatenate([[0], np.cumsum(histogram.counts)]) / histogram.total()
    tail = (100 - percent) / 200
    edges = histogram.edges()
    last = int(np.searchsorted(below, tail, side="right")) - 1
    first = int(np.searchsorted(below, 1 - tail, side="left"))
    low = _inverse(below, edges, last, tail)
    high = _inverse(below, edges, first - 1, 1 - tail)
    low, high = max(low, histogram.low), min(high, histogram.high)
    return (low, high) if tail else (histogram.low, histogram.high)


def _inverse(below: Doubles, edges: Doubles, at: int, share: float) -> float:
    """Return the value within bin `at` at which the cumulative fraction is `share`."""
    at = min(max(at, 0), edges.size - 2)
    rise = below[at + 1] - below[at]
    inside = (share - below[at]) / rise if rise > 0 else 0.0
    return float(edges[at] + min(max(inside, 0.0), 1.0) * (edges[at + 1] - edges[at]))


def least_squares(histogram: Histogram, levels: int) -> tuple[float, float]:
    """Return the range with the smallest mean squared error of quantization to `levels` levels.

    Values inside have an error of s^2 / 12 on average, where s is the distance between two levels;
    exact zeros have none, since zero is a level; values outside have their squared distance. Both
    ends are clipped independently, among all pairs of 128 candidates each.
    """
    # in units of the wider side: squares cannot overflow
    unit = max(histogram.high, -histogram.low) or 1.0
    low, high = histogram.low / unit, histogram.high / unit
    lows = np.unique(low * np.arange(1, _STEPS + 1) / _STEPS)
    highs = np.unique(high * np.arange(1, _STEPS + 1) / _STEPS)
    edges = histogram.edges() / unit
    centres = np.clip((edges[:-1] + edges[1:]) / 2, low, high)
    counts = histogram.counts.astype(np.float64)
    clipped_low, outside_low = _clipping(centres, counts, lows, below=True)
    clipped_high, outside_high = _clipping(centres, counts, highs, below=False)
    step = (highs[None, :] - lows[:, None]) / (levels - 1)
    inside = counts.sum() - histogram.zeros - outside_low[:, None] - outside_high[None, :]
    error = clipped_low[:, None] + clipped_high[None, :] + inside * step**2 / 12
    # of equal ones the widest
    order = np.argwhere(error == error.min())
    widths = [highs[j] - lows[i] for i, j in order]
    i, j = order[int(np.argmax(widths))]
    return float(lows[i]) * unit, float(highs[j]) * unit


def _clipping(
    centres: Doubles, counts: Doubles, limits: Doubles, below: bool
) -> tuple[Doubles, Doubles]:
    """Return the squared error of clipping at each limit, and the number of values clipped."""
    errors = np.empty(limits.size)
    moved = np.empty(limits.size)
    for at, limit in enumerate(limits):
        distance = np.maximum(limit - centres if below else centres - limit, 0.0)
        errors[at] = (counts * distance**2).sum()
        moved[at] = counts[distance > 0].sum()
    return errors, moved


def least_divergence(histogram: Histogram, levels: int) -> tuple[float, float]:
    """Return the range with the smallest Kullback-Leibler divergence, the widest of equal ones.

    P is the distribution clipped to the range, with the values outside counted at its ends. Q is
    the distribution after quantization: each level's probability, spread evenly over its nonempty
    bins.

    Exact zeros do not count: zero is a level, and the zeros of a Relu would outweigh all other
    values. With fewer values than levels nothing is clipped.
    """
    edges, counts = histogram.edges(), _without_zeros(histogram)
    if counts.sum() < levels:
        return histogram.low, histogram.high
    best, chosen = np.inf, (histogram.low, histogram.high)
    reach = max(histogram.high, -histogram.low)
    for step in range(_STEPS, 0, -1):
        limit = reach * step / _STEPS
        # The bins of the limits count as inside: many results of a Clip lie exactly on a limit.
        start = int(np.searchsorted(edges, max(histogram.low, -limit), side="right")) - 1
        stop = int(np.searchsorted(edges, min(histogram.high, limit), side="right"))
        stop = min(stop, counts.size)
        if stop - start < levels:
            break  # each bin is a level: the divergence is 0
        divergence = _divergence(counts, start, stop, levels)
        if divergence < best:
            best, chosen = divergence, (float(edges[start]), float(edges[stop]))
    low, high = chosen
    return max(low, histogram.low), min(high, histogram.high)


def _without_zeros(histogram: Histogram) -> Doubles:
    counts = histogram.counts.astype(np.float64)
    at = int(np.searchsorted(histogram.edges(), 0.0, side="right")) - 1
    if histogram.zeros and 0 <= at < counts.size:
        counts[at] -= histogram.zeros
    return counts


def _divergence(counts: Doubles, start: int, stop: int, levels: int) -> float:
    inside = counts[start:stop]
    clipped: Doubles = np.array(inside)
    clipped[0] += counts[:start].sum()
    clipped[-1] += counts[stop:].sum()
    starts = np.arange(levels) * inside.size // levels
    filled: Doubles = np.sign(clipped)
    members = np.add.reduceat(filled, starts)
    shares = np.add.reduceat(inside, starts) / np.maximum(members, 1)
    lengths = np.diff(np.append(starts, inside.size))
    quantized = np.repeat(shares, lengths) * filled
    if not quantized.any():
        return float("inf")
    p, q = clipped / clipped.sum(), quantized / quantized.sum()
    ratio = np.where(p > 0, p, 1.0) / np.maximum(q, _SMOOTHING)
    return float((p * np.log(ratio)).sum())
