"""The loss of one group of an output's channels, accumulated over all samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from toolkit.accuracy.budgets import BUDGETS, Kind, Limit, Measure, chance
from toolkit.accuracy.metrics import (
    Accumulator,
    Array,
    LargestError,
    MeanLoss,
    Noise,
    WeightedFlips,
    are_probabilities,
    cosine_losses,
    flips,
    inequality,
    softmax,
)
from toolkit.accuracy.output_kinds import ChannelGroup, OutputKind
from toolkit.accuracy.quality_report import Figure
from toolkit.accuracy.requirement import Requirement, Score

_COUNTED: tuple[Measure, ...] = ("top1", "answers", "decisions", "agreement")
"""Measures that count changed predictions, which are noisy on few samples."""

_REAL_ONLY: tuple[Measure, ...] = ("variance", "answers")
"""Measures that are meaningless on synthetic inputs, where predictions have small margins."""


@dataclass(slots=True)
class GroupAccumulator:
    """The measures of one channel group, and its noise."""

    group: ChannelGroup
    kind: OutputKind
    limits: Sequence[Limit]
    built_in: bool
    """Whether the limits are error budgets rather than the user's."""
    real: bool
    noise: Noise = field(default_factory=Noise)
    accumulators: dict[Measure, Accumulator] = field(default_factory=dict[Measure, Accumulator])

    def __post_init__(self) -> None:
        for limit in self.limits:
            if limit.measure not in ("sqnr", "variance"):  # both are computed from the noise
                self.accumulators[limit.measure] = _accumulator(limit.measure, self.built_in)

    def add(self, reference: Array, actual: Array | None) -> None:
        """Add the rows of one sample; None if the other model's output has another shape."""
        if actual is not None and not reference.size:
            return
        if actual is None or not self._has_channels(reference):
            for accumulator in (*self.accumulators.values(), self.noise):
                accumulator.add_incomparable()
            return
        weights = None
        if self.group.channels is not None:
            reference, actual = self.kind.gated(reference), self.kind.gated(actual)
            if self.group.kind != "scores" and self.kind.scores:
                # positions where a detector finds no object count little
                weights = reference[:, self.kind.scores].max(axis=1)
            reference, actual = (rows[:, self.group.channels] for rows in (reference, actual))
        if self.group.kind == "text" and not are_probabilities(reference):
            reference, actual = softmax(reference), softmax(actual)
        for measure, accumulator in self.accumulators.items():
            if measure == "decisions":  # each element is a decision
                accumulator.add(reference.reshape(-1, 1), actual.reshape(-1, 1))
            else:
                accumulator.add(reference, actual)
        if self.group.kind != "exact":
            self.noise.add(reference, actual, weights)

    def _has_channels(self, rows: Array) -> bool:
        return self.group.channels is None or max(self.group.channels) < rows.shape[1]

    def figures(self) -> list[Figure]:
        """Return one figure for each limit."""
        return [self._figure(limit) for limit in self.limits]

    def _figure(self, limit: Limit) -> Figure:
        if limit.measure in ("sqnr", "variance"):
            noise = self.noise
            loss = noise.loss() if limit.measure == "sqnr" else noise.around_mean()
            return Figure(self.kind.name, limit.measure, loss, limit.loss, self.group.label)
        found = self.accumulators[limit.measure]
        by_chance = self.built_in and limit.measure in _COUNTED
        return Figure(
            self.kind.name,
            limit.measure,
            found.loss(),
            chance(limit.loss, found.count, self.real) if by_chance else limit.loss,
            self.group.label,
            plain=found.unweighted() if isinstance(found, WeightedFlips) else None,
        )


def accumulators_of(
    kinds: Mapping[str, OutputKind], requirement: Requirement, real: bool
) -> dict[str, list[GroupAccumulator]]:
    """Return empty accumulators for the channel groups of every output."""
    counted = not {kind.kind for kind in kinds.values()}.isdisjoint({"classes", "text", "scores"})
    built_in = requirement.metric is None and requirement.most is None
    return {
        name: [
            GroupAccumulator(
                group, kind, _limits(group.kind, requirement, real, counted), built_in, real
            )
            for group in _groups(kind, requirement)
        ]
        for name, kind in kinds.items()
    }


def _groups(kind: OutputKind, requirement: Requirement) -> tuple[ChannelGroup, ...]:
    """Return the channel groups; a named metric applies to the whole output."""
    return kind.groups if not isinstance(requirement.metric, str) else (ChannelGroup(kind.kind),)


def _limits(kind: Kind, requirement: Requirement, real: bool, counted: bool) -> list[Limit]:
    """Return the limits of a kind's measures; `counted`: some output has predictions."""
    budget = kind if real or kind != "text" else "classes"  # synthetic inputs contain no text
    built_in = [limit for limit in BUDGETS[budget] if real or limit.measure not in _REAL_ONLY]
    if isinstance(requirement.metric, Score):  # the others are only reported
        return [Limit(limit.measure, np.inf, "") for limit in built_in]
    measure: Measure = requirement.metric or built_in[0].measure
    allowed = requirement.allowed(measure)
    if allowed is None:
        return built_in
    if measure == "top1" and kind == "scores":
        measure = "decisions"
    applies = measure != "top1" or not counted or kind in ("classes", "text")
    if requirement.metric is None or (kind != "exact" and applies):
        return [Limit(measure, allowed, "the user's")]
    return built_in


def _accumulator(measure: Measure, built_in: bool) -> Accumulator:
    if measure == "error":
        return LargestError()
    if built_in and measure in ("top1", "decisions"):
        return WeightedFlips()
    losses = {"cosine": cosine_losses, "agreement": inequality}
    return MeanLoss(losses.get(measure, flips))
