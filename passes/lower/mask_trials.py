"""Trial runs that show which masks may have a floor.

A mask may have a floor if the outputs stay the same with a floor 25 below the row's maximum; the
final floor, at 50, leaks exp(-25) = 1e-11 of that. If scores below the floor are not masked at all,
the outputs must differ: otherwise the feeds do not test the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from passes.lower.cost_query import CostQuery
from passes.lower.mask_floor import TRIAL_DEPTH, AttentionMask, require_gain, rules
from toolkit.ir import Model, node as nd
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import apply_rules

_MOST_TRIALS = 32
"""The most runs per model; masks beyond stay as they are."""


@dataclass(frozen=True, slots=True)
class TrialGroup:
    """The attentions of one graph that share a mask."""

    outputs: tuple[str, ...]
    """The first output of each attention."""
    is_constant: bool
    """Whether every run masks the same scores, at least one of them."""


def candidates(model: Model, costs: CostQuery) -> list[TrialGroup]:
    """Return the attentions for which a floor is valid and faster."""
    found: dict[tuple[int, AttentionMask], list[str]] = {}
    for g, node in model.places():
        if not nd.is_op(node, "Attention"):
            continue
        try:
            mask = AttentionMask.of(g, node)
            require_gain(costs, g, node)
        except MatchFailure:
            continue
        found.setdefault((id(g), mask), []).append(node.output[0])
    return [TrialGroup(tuple(names), mask.is_constant) for (_, mask), names in found.items()]


@dataclass(slots=True)
class MaskTrials:
    """Finds the attentions whose floors keep the outputs of the model."""

    model: Model
    costs: CostQuery
    holds: Callable[[Model], bool]
    """Runs a model; returns whether its outputs equal the original's."""
    unmasked: int = 0
    """The number of attentions whose masks the feeds do not test."""
    _left: int = _MOST_TRIALS
    """The number of runs that are left."""

    def passed(self) -> list[str]:
        """Return the outputs of the attentions that may have a floor."""
        masked: list[str] = []
        for group in candidates(self.model, self.costs):
            holds = False if group.is_constant else self._holds_with(None, group.outputs)
            if holds is False:
                masked += group.outputs
            elif holds:
                self.unmasked += len(group.outputs)
        return self._bisected(masked)

    def _bisected(self, outputs: list[str]) -> list[str]:
        """Return a subset of the attentions that may all have a floor, by bisection."""
        kept: list[str] = []
        parts = [outputs] if outputs else []
        while parts:
            part = parts.pop()
            if self._holds_with(TRIAL_DEPTH, [*kept, *part]):
                kept += part
            elif len(part) > 1:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
        return kept

    def _holds_with(self, depth: float | None, outputs: Sequence[str]) -> bool | None:
        """Return whether the outputs hold with floors at `depth`; None if that was not run."""
        if not self._left:
            return None
        self._left -= 1
        start = self.model.journal.position
        made = apply_rules(self.model, rules(self.costs, depth, outputs))
        holds = self.holds(self.model) if made else None
        self.model.journal.undo_to(start)
        return holds
