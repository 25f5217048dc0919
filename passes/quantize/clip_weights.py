"""Clip weights where that lowers their quantization error.

    e(t) = sum (w - Q_t(w))^2,   Q_t: clamp to -t..t, then steps of t / limit

A few large weights widen the steps of all others. Each channel gets the t with the least e: found
on a histogram of its weights (elements inside cost a twelfth of a squared step, those outside their
squared distance), then verified on the weights themselves. If e does not fall, the channel stays.
The results are float weights with max |w| = t, which suits any quantizer that divides by max |w|.
The pass is not idempotent: clipped weights may be clipped further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from passes.analysis.node_filter import NodeFilter
from passes.quantize.diagnostics import note_troubles, weight_troubles
from passes.quantize.layers.channel_weights import Kernel, kernel_of
from passes.quantize.layers.row_blocks import blocks
from passes.quantize.layers.weight_storage import drop_unused
from toolkit.errors import UsageError
from toolkit.ir import Array, Graph, Model
from toolkit.storage.spill import allocate
from toolkit.verification.tolerance import QUANT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_BINS = 512
_MOST_COUNTS = 1 << 22
"""The most histogram bins of all channels together."""
_FEWEST_BINS = 64
_GAIN = 0.97
"""The error must fall to this fraction of its value."""
_NARROWEST = 1 / 64
"""The least t, relative to the largest weight."""


@dataclass(frozen=True, slots=True)
class ClipWeights:
    """Clip weights where that lowers their quantization error."""

    name: ClassVar[str] = "clip-weights"
    tolerance: ClassVar[Tolerance] = QUANT
    bits: int = field(default=8, metadata={"help": "Bits of the quantized weights, 2 to 8."})
    per_channel: bool = field(
        default=True, metadata={"help": "One limit per output channel, or one per tensor."}
    )
    include: tuple[str, ...] = field(
        default=("*",), metadata={"help": "Patterns of the layers whose weights are clipped."}
    )
    exclude: tuple[str, ...] = field(
        default=(), metadata={"help": "Patterns of layers to leave as they are."}
    )

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise UsageError(f"clip-weights: bits is {self.bits}; it must be from 2 to 8")

    def run(self, model: Model, ctx: Context) -> None:
        note_troubles(weight_troubles(model), ctx)
        limit = 2 ** (self.bits - 1) - 1
        selection = NodeFilter(self.include, self.exclude)
        done: set[tuple[int, str]] = set()
        for g in list(model.graphs()):
            for node in g.nodes:
                kernel = kernel_of(g, node)
                scope = g.scope_of(node.input[1]) if kernel is not None else None
                if kernel is None or scope is None or not selection.takes(node):
                    continue
                key = id(scope), kernel.name
                if key in done or kernel.name not in scope.initializers:
                    continue
                done.add(key)
                if scope.is_pinned(kernel.name) or scope.is_output(kernel.name):
                    continue
                self._clip(scope, kernel, limit, ctx)
                done.add((id(scope), kernel.name))  # by its new name

    def _clip(self, g: Graph, kernel: Kernel, limit: int, ctx: Context) -> None:
        name, axis = kernel.name, kernel.axis
        users = g.users(name)
        layers = [kernel_of(g, user) for user in users]
        if g.is_captured(name) or any(
            k is None or k.name != name or k.axis != axis for k in layers
        ):
            ctx.note(f"'{name}' is not clipped: it has other users")
            return
        weights = g.const(name)
        assert weights is not None
        clipped = clip(weights, axis if self.per_channel else None, limit)
        if clipped is None or not g.begin(self.name, kernel.node):
            return
        made = g.constant(clipped, name)
        for node in users:
            g.set_input(node, 1, made)
        drop_unused(g, name)


def clip(weights: Array, axis: int | None, limit: int) -> Array | None:
    """Return weights clipped per channel of `axis`, or all alike; None unless that is better."""
    view = _Channels(weights, axis)
    largest = view.gather(lambda block, _: np.abs(block), np.maximum)
    if not np.isfinite(largest).all():
        return None
    limits = _limits(view, largest, limit)
    falls = _error(view, limits, limit) < _GAIN * _error(view, largest, limit)
    limits = np.where(falls, limits, largest)
    if (limits >= largest).all():
        return None
    result = allocate(weights.shape, weights.dtype)
    for rows, block in blocks(weights):
        by = view.along(limits.astype(weights.dtype), rows)
        result[rows] = np.clip(block, -by, by)
    result.flags.writeable = False
    return result


class _Channels:
    """Weights read in blocks of rows, with numbers per channel."""

    def __init__(self, weights: Array, axis: int | None) -> None:
        self.weights, self.axis = weights, axis
        self.count = 1 if axis is None else weights.shape[axis]
        self._others = tuple(a for a in range(weights.ndim) if a != axis)

    def along(self, numbers: Array, rows: slice) -> Array:
        """Reshape numbers per channel to broadcast against a block of rows."""
        if self.axis is None:
            return numbers
        shaped = numbers.reshape([-1 if a == self.axis else 1 for a in range(self.weights.ndim)])
        return shaped[rows] if self.axis == 0 else shaped

    def gather(self, numbers: Callable[[Array, slice], Array], how: np.ufunc) -> Array:
        """Reduce numbers of each channel by `how`, starting from 0."""
        found = np.zeros(self.count)
        for rows, block in blocks(self.weights):
            made = how.reduce(numbers(block.astype(np.float32), rows), axis=self._others)
            at = rows if self.axis == 0 else slice(None)
            found[at] = how(found[at], made)
        return found


def _error(view: _Channels, limits: Array, limit: int) -> Array:
    """Return the squared error of each channel."""
    step = np.where(limits > 0, limits / limit, 1.0).astype(np.float32)

    def squares(block: Array, rows: slice) -> Array:
        by = view.along(step, rows)
        return (np.clip(np.rint(block / by), -limit, limit) * by - block) ** 2

    return view.gather(squares, np.add)


def _limits(view: _Channels, largest: Array, limit: int) -> Array:
    """Return the t of each channel with the least error on its histogram of |w| / max |w|."""
    bins = int(np.clip(_MOST_COUNTS // view.count, _FEWEST_BINS, _BINS))
    counts = _histogram(view, largest, bins)
    centres = (np.arange(bins) + 0.5) / bins
    edges = np.arange(1, bins + 1) / bins
    # Sums over the bins above each edge: of 1, of the distance to zero, of its square.
    number, first, second = (_above(counts * power) for power in (1.0, centres, centres**2))
    outside = second - 2 * edges * first + edges**2 * number
    inside = counts.sum(axis=1, keepdims=True) - number
    error = outside + inside * (edges / limit) ** 2 / 12
    error[:, edges < _NARROWEST] = np.inf
    return largest * edges[np.argmin(error, axis=1)]


def _above(counts: Array) -> Array:
    return counts.sum(axis=1, keepdims=True) - np.cumsum(counts, axis=1)


def _histogram(view: _Channels, largest: Array, bins: int) -> Array:
    """Return the histogram of nonzero |w| over 0..max |w| of each channel."""
    counts = np.zeros(view.count * bins, np.int64)
    unit = np.where(largest > 0, largest, 1.0).astype(np.float32)
    first = np.arange(view.count) * bins
    for rows, block in blocks(view.weights):
        share = np.abs(block.astype(np.float32)) / view.along(unit, rows)
        places = np.minimum((share * bins).astype(np.int64), bins - 1) + view.along(first, rows)
        counts += np.bincount(places[block != 0], minlength=counts.size)
    return counts.reshape(view.count, bins).astype(np.float64)
