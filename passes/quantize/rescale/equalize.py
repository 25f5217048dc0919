"""Cross-layer equalization: balance the weights on both sides of a channel. Needs no data.

    r1_c = max |w| that produces channel c,   r2_c = max |w| that uses it
    s_c = sqrt(r1_c r2_c) / r2_c = sqrt(r1_c / r2_c)

The first layer divides its outputs by s and the next ones multiply their inputs by it; both then
have weights up to sqrt(r1_c r2_c). Each layer is the second of one pair and the first of another:
this is repeated until it converges. A channel without weights on one side keeps s = 1, and a bias
stays within the largest one: otherwise a dead channel with a bias would widen the range.

Weights alone do not determine the range of activations: if channels differ little, equal weights
make activations unequal (a trained keyword spotter lost 3 dB). Factors are therefore relative to
the median of the pair, and only the part beyond `slack` is applied.

    M. Nagel et al., Data-free quantization through weight equalization and bias correction, 2019
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from onnx import NodeProto

from passes.analysis.node_filter import NodeFilter
from passes.analysis.shapes import Shapes
from passes.quantize.layers.channel_weights import Kernel
from passes.quantize.rescale.apply import RescaleGroup, group_of
from toolkit.errors import UsageError
from toolkit.ir import Array, Graph, Model
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

_SETTLED = 0.02
"""Factors within this relative distance of 1 justify neither another round nor a rewrite."""


@dataclass(frozen=True, slots=True)
class Equalize:
    """Balance the weights of consecutive layers by channel, without changing float results."""

    name: ClassVar[str] = "equalize"
    tolerance: ClassVar[Tolerance] = FLOAT
    slack: float = field(
        default=4.0,
        metadata={"help": "Leave factors up to this many times the median; 1 equalizes fully."},
    )
    rounds: int = field(default=20, metadata={"help": "The most rounds over all layers."})
    include: tuple[str, ...] = field(
        default=("*",), metadata={"help": "Patterns of the first layers of pairs."}
    )
    exclude: tuple[str, ...] = field(
        default=(), metadata={"help": "Patterns of first layers to leave as they are."}
    )

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise UsageError(f"equalize: rounds is {self.rounds}; it must be at least 1")
        if not self.slack >= 1:
            raise UsageError(f"equalize: slack is {self.slack}; it must be at least 1")

    def run(self, model: Model, ctx: Context) -> None:
        Shapes(annotate=False).run(model, ctx)
        selection = NodeFilter(self.include, self.exclude)
        for g in list(model.graphs()):
            nodes = filter(selection.takes, g.nodes)
            for group, found in equalized(g, nodes, self.rounds, ctx):
                factors = _beyond(group, found, self.slack)
                try:
                    if _distance(factors) >= _SETTLED:
                        group.apply(g, self.name, factors)
                except MatchFailure as failure:
                    ctx.note(f"{group.label} is not equalized: {failure}")


def equalized(
    g: Graph, nodes: Iterable[NodeProto], rounds: int, ctx: Context
) -> list[tuple[RescaleGroup, Array]]:
    """Return the converged factors of every pair of layers."""
    pairs: list[_Pair] = []
    state = _State(g)
    for node in nodes:
        group = group_of(g, node)
        if group is None or group.kernel is None:
            continue
        try:
            pairs.append(_Pair(group, group.kernel, state))
        except MatchFailure as failure:
            ctx.note(f"{group.label} is not equalized: {failure}")
    for _ in range(rounds):
        if max((pair.balance() for pair in pairs), default=0.0) < _SETTLED:
            break
    return [(pair.group, pair.factors) for pair in pairs]


class _State:
    """The factors of each layer's inputs and outputs after the rounds so far."""

    def __init__(self, g: Graph) -> None:
        self.g = g
        self._inputs: dict[int, Array] = {}
        self._outputs: dict[int, Array] = {}

    def inputs(self, kernel: Kernel) -> Array:
        return self._inputs.setdefault(id(kernel.node), np.ones(kernel.inputs))

    def outputs(self, kernel: Kernel) -> Array:
        return self._outputs.setdefault(id(kernel.node), np.ones(kernel.outputs))

    def by_output(self, kernel: Kernel) -> Array:
        along = kernel.spread(self.inputs(kernel), kernel.in_axes)
        return kernel.largest(self.g, kernel.out_axes, along) * self.outputs(kernel)

    def by_input(self, kernel: Kernel) -> Array:
        along = kernel.spread(self.outputs(kernel), kernel.out_axes)
        return kernel.largest(self.g, kernel.in_axes, along) * self.inputs(kernel)


class _Pair:
    """A layer and the layers that use its result."""

    def __init__(self, group: RescaleGroup, kernel: Kernel, state: _State) -> None:
        self.group, self.kernel, self.state = group, kernel, state
        self.factors = np.ones(group.spread.count)
        self._least = _least_factors(state.g, group)
        state.by_output(kernel)  # raises MatchFailure early for infinite weights
        for sink in group.spread.sinks:
            state.by_input(sink.kernel)

    def balance(self) -> float:
        """Balance the pair once; return the largest change."""
        state, count = self.state, self.factors.size
        first = state.by_output(self.kernel)
        second = np.zeros(count)
        for sink in self.group.spread.sinks:
            second = np.maximum(second, sink.by_channel(state.by_input(sink.kernel), count))
        present = (first > 0) & (second > 0)
        step = np.sqrt(np.where(present, first, 1.0) / np.where(present, second, 1.0))
        wanted = np.maximum(self.factors * step, self._least)
        step = np.where(present, self.group.limited(wanted), 1.0) / self.factors
        self.factors = self.factors * step
        outputs = state.outputs(self.kernel)
        outputs /= step
        for sink in self.group.spread.sinks:
            inputs = state.inputs(sink.kernel)
            inputs *= sink.factors(step)
        return _distance(step)


def _least_factors(g: Graph, group: RescaleGroup) -> Array:
    """Return |b_c| / max |b|: smaller factors would let a bias exceed the largest."""
    count = group.spread.count
    sizes = np.zeros(count)
    for part in group.parts[1:]:
        bias = g.const(group.node.input[part.slot])
        assert bias is not None
        rows = np.abs(np.broadcast_to(bias, part.shape)).reshape(-1, count)
        sizes = np.maximum(sizes, rows.max(axis=0))
    for node, slot, index in group.spread.terms:
        term = g.const(node.input[slot])
        assert term is not None
        shape = np.broadcast_shapes(term.shape, index.shape)
        channels = np.broadcast_to(index, shape)
        present = channels >= 0
        np.maximum.at(sizes, channels[present], np.abs(np.broadcast_to(term, shape))[present])
    largest = sizes.max(initial=0.0)
    return sizes / largest if largest > 0 else sizes


def _beyond(group: RescaleGroup, factors: Array, slack: float) -> Array:
    """Return the part of the factors beyond `slack`, relative to their median."""
    if slack == 1:
        return factors
    sizes = np.log(factors)
    sizes -= np.median(sizes[group.spread.free])
    return group.limited(np.exp(np.sign(sizes) * np.maximum(np.abs(sizes) - np.log(slack), 0.0)))


def _distance(factors: Array) -> float:
    return float(np.abs(np.log(factors)).max(initial=0.0))
