"""Ask the cost table which candidates are faster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from onnx import TensorProto

from toolkit.ir import Graph, Shape
from toolkit.rewriting.match_failure import MatchFailure
from toolkit.runtime.cost_table import Costs, cores, costs_in_use

SHIPPED = Path(__file__).parent / "data"
"""The folder of the measured tables, one per processor vendor."""


@dataclass(frozen=True, slots=True)
class CostQuery:
    """A cost table, and the number of threads that the model will run on."""

    costs: Costs
    threads: int

    def require(self, computation: str, candidate: str, g: Graph, value: str) -> None:
        """Raise MatchFailure unless `candidate` is faster for the shape of `value`."""
        self.require_at(computation, candidate, *tokens_and_width(g.shape(value)))

    def require_at(
        self, computation: str, candidate: str, tokens: int | None, width: int | None
    ) -> None:
        """Raise MatchFailure unless `candidate` is faster for these sizes, None if dynamic."""
        if self.costs.gain(computation, candidate, tokens, width, self.threads) is None:
            raise MatchFailure(f"{computation} is not faster here as '{candidate}'")


def require_float(g: Graph, value: str) -> None:
    """Raise MatchFailure unless `value` is of the type that the table was measured for."""
    if g.dtype(value) != TensorProto.FLOAT:
        raise MatchFailure("costs are known for float32 only")


def tokens_and_width(shape: Shape | None) -> tuple[int | None, int | None]:
    """Return the product of all dimensions but the last, and the last; None if dynamic."""
    if not shape:
        return None, None
    *leading, last = shape
    sizes = [size for size in leading if isinstance(size, int)]
    tokens = math.prod(sizes) if len(sizes) == len(leading) else None
    return tokens, last if isinstance(last, int) else None


def query_for(threads: int) -> CostQuery:
    """Return a query of the table in use; 0 threads: all cores, the runtime's default."""
    return CostQuery(costs_in_use(SHIPPED)[0], threads or cores())
