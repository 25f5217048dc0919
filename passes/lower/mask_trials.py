"""Runs that show which masks may have a floor.

A floor of 25 below the row's largest has to be as good as none: what is written, 50, leaks
exp(-25) = 1e-11 of what that does. And with what lies below the floor not masked at all, the
answers must differ: else the feeds had nothing masked to show it by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from passes.lower.cost_query import Choice
from passes.lower.mask_floor import SHOWN, Site, require_gain, rules
from toolkit.ir import node as nd
from toolkit.ir.model import Model
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.rewriting.rule import apply_rules

_MOST_TRIALS = 32


@dataclass(frozen=True, slots=True)
class Masked:
    """The attentions of one graph that have one mask, by the names of their outputs.

    `is_known`: every run masks the same, and something.
    """

    sites: tuple[str, ...]
    is_known: bool


def candidates(model: Model, choice: Choice) -> list[Masked]:
    """The attentions that may get a floor, where it pays."""
    found: dict[tuple[int, Site], list[str]] = {}
    for g, node in model.places():
        if not nd.is_op(node, "Attention"):
            continue
        try:
            site = Site.of(g, node)
            require_gain(choice, g, node)
        except MatchFailure:
            continue
        found.setdefault((id(g), site), []).append(node.output[0])
    return [Masked(tuple(names), site.is_known) for (_, site), names in found.items()]


@dataclass(slots=True)
class Showing:
    """Which attentions are shown, by runs, to give the same with a floor; `holds` runs a model."""

    model: Model
    choice: Choice
    holds: Callable[[Model], bool]
    idle: int = 0
    """Attentions whose masks none of the feeds makes use of."""
    _left: int = _MOST_TRIALS

    def shown(self) -> list[str]:
        masked: list[str] = []
        for one in candidates(self.model, self.choice):
            if one.is_known:
                masked += one.sites
                continue
            held = self._holds_with(None, one.sites)
            if held is False:
                masked += one.sites
            elif held:
                self.idle += len(one.sites)
        return self._enough(masked)

    def _enough(self, sites: list[str]) -> list[str]:
        """Those that may have a floor, alone and together."""
        kept: list[str] = []
        parts = [sites] if sites else []
        while parts:
            part = parts.pop()
            if self._holds_with(SHOWN, [*kept, *part]):
                kept += part
            elif len(part) > 1:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
        return kept

    def _holds_with(self, depth: float | None, sites: Sequence[str]) -> bool | None:
        """Whether the answers stay with this in place; None where it is not run, after many."""
        if not self._left:
            return None
        self._left -= 1
        start = self.model.journal.position
        made = apply_rules(self.model, rules(self.choice, depth, sites))
        holds = self.holds(self.model) if made else None
        self.model.journal.undo_to(start)
        return holds
