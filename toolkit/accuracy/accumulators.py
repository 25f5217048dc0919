"""One group of an output's channels, measured over all samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.accuracy.budgets import BUDGETS, Kind, Limit, Measure, chance
from toolkit.accuracy.metrics import (
    Angles,
    Array,
    Flips,
    Gap,
    Inequality,
    Noise,
    Tally,
    Variance,
    are_shares,
    as_shares,
)
from toolkit.accuracy.output_kinds import Group, OutputKind
from toolkit.accuracy.quality_report import Figure
from toolkit.accuracy.requirement import Demand, Score

_COUNTS: tuple[Measure, ...] = ("top1", "answers", "decisions", "agreement")
"""Measures of answers that are counted: on few samples chance has a say."""

_OF_REAL: tuple[Measure, ...] = ("variance", "answers")

_MAKERS: Mapping[Measure, Callable[[], Tally]] = {
    "cosine": Angles,
    "agreement": Inequality,
    "error": Gap,
}


@dataclass(slots=True)
class GroupTally:
    """The tallies of one group, each with what it allows; and the noise, whatever is asked."""

    group: Group
    kind: OutputKind
    limits: Sequence[tuple[Limit, Tally]]
    built_in: bool
    real: bool
    noise: Noise

    def add(self, reference: Array, actual: Array | None) -> None:
        """Rows of one sample; None when the other model gave another shape."""
        if actual is not None and not reference.size:
            return  # both give nothing
        if actual is None or not self._has_channels(reference):
            for _, tally in self.limits:
                tally.miss()
            self.noise.miss()
            return
        weights = None
        if self.group.channels is not None:
            reference, actual = self.kind.gated(reference), self.kind.gated(actual)
            if self.group.kind != "scores" and self.kind.scores:
                # what a detector says of places without an object, nobody looks at
                weights = reference[:, self.kind.scores].max(axis=1)
            reference, actual = (rows[:, self.group.channels] for rows in (reference, actual))
        if self.group.kind == "text" and not are_shares(reference):
            reference, actual = as_shares(reference), as_shares(actual)
        for limit, tally in self.limits:
            if limit.measure == "decisions":  # each element is one of its own
                tally.add(reference.reshape(-1, 1), actual.reshape(-1, 1))
            elif not isinstance(tally, Noise):  # which is gathered once for all, below
                tally.add(reference, actual)
        if self.group.kind != "exact":
            self.noise.add(reference, actual, weights)

    def _has_channels(self, rows: Array) -> bool:
        """Whether a sample has the channels that the first ones had."""
        return self.group.channels is None or max(self.group.channels) < rows.shape[1]

    def figures(self) -> list[Figure]:
        made: list[Figure] = []
        for limit, tally in self.limits:
            by_chance = self.built_in and limit.measure in _COUNTS
            allowed = chance(limit.loss, tally.count, self.real) if by_chance else limit.loss
            plain = tally.plain() if isinstance(tally, Flips) and tally.weighed else None
            made.append(
                Figure(
                    self.kind.name,
                    limit.measure,
                    tally.loss(),
                    allowed,
                    self.group.label,
                    plain=plain,
                )
            )
        return made


def tallies_of(
    kinds: Mapping[str, OutputKind], demand: Demand, real: bool
) -> dict[str, list[GroupTally]]:
    """The tallies of every output, empty, for what the user asks."""
    counted = {kind.kind for kind in kinds.values()} & {"classes", "text", "scores"}
    made: dict[str, list[GroupTally]] = {}
    for name, kind in kinds.items():
        made[name] = []
        for group in _groups(kind, demand):
            limits = _limits(group.kind, demand, real, bool(counted))
            built_in = demand.metric is None and demand.most is None
            noise = Noise()
            tallies = [(limit, _tally(limit, built_in, noise)) for limit in limits]
            made[name].append(GroupTally(group, kind, tallies, built_in, real, noise))
    return made


def _groups(kind: OutputKind, demand: Demand) -> tuple[Group, ...]:
    """A named metric is of the whole output."""
    return kind.groups if not isinstance(demand.metric, str) else (Group(kind.kind),)


def _limits(kind: Kind, demand: Demand, real: bool, counted: bool) -> list[Limit]:
    """What is measured of a kind, and what it may lose."""
    # Of few made-up inputs the spread says nothing, and there is no text in them.
    known = kind if real or kind != "text" else "classes"
    # Nor are models sure of their answers there.
    built_in = [limit for limit in BUDGETS[known] if real or limit.measure not in _OF_REAL]
    if isinstance(demand.metric, Score):  # the user's function decides, the rest is told
        return [Limit(limit.measure, np.inf, "") for limit in built_in]
    measure: Measure = demand.metric or built_in[0].measure
    allowed = demand.allowed(measure)
    if allowed is None:
        return built_in
    if measure == "top1" and kind == "scores":
        measure = "decisions"
    decides = measure != "top1" or not counted or kind in ("classes", "text")
    fits = demand.metric is None or (kind != "exact" and decides)
    return [Limit(measure, allowed, "asked for")] if fits else built_in


def _tally(limit: Limit, built_in: bool, noise: Noise) -> Tally:
    if limit.measure == "sqnr":
        return noise
    if limit.measure == "variance":
        return Variance(noise)
    if limit.measure == "answers":
        return Flips(weighed=False)
    if limit.measure in ("top1", "decisions"):
        return Flips(weighed=built_in)
    return _MAKERS[limit.measure]()
