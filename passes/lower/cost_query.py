"""Asking the table of costs on behalf of a rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from toolkit.ir.graph import Graph
from toolkit.ir.tensor_type import Shape
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.runtime.cost_table import Costs, cores, costs_in_use

SHIPPED = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Choice:
    """Costs, and the number of threads that the model will run on."""

    costs: Costs
    threads: int

    def require(self, computation: str, spelling: str, g: Graph, value: str) -> None:
        """Raise MatchFailure unless `spelling` pays for a tensor of the shape of `value`."""
        tokens, width = tokens_and_width(g.shape(value))
        self.require_at(computation, spelling, tokens, width)

    def require_at(
        self, computation: str, spelling: str, tokens: int | None, width: int | None
    ) -> None:
        if self.costs.gain(computation, spelling, tokens, width, self.threads) is None:
            raise MatchFailure(f"{computation} is not faster here when spelled '{spelling}'")


def tokens_and_width(shape: Shape | None) -> tuple[int | None, int | None]:
    """The last dimension, and the product of all others; None for what varies."""
    if not shape:
        return None, None
    *leading, last = shape
    sizes = [size for size in leading if isinstance(size, int)]
    tokens = math.prod(sizes) if len(sizes) == len(leading) else None
    return tokens, last if isinstance(last, int) else None


def choice_for(threads: int) -> Choice:
    """The costs in use; 0 threads are those that the runtime takes by default, all cores."""
    return Choice(costs_in_use(SHIPPED)[0], threads or cores())
