"""Asking the table of costs on behalf of a rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from toolkit.costs import Costs, CostsError, cache_path, cores, runtime_version
from toolkit.graph import Graph
from toolkit.misses import Miss
from toolkit.types import Shape

SHIPPED = Path(__file__).parent / "data" / "ort-cpu.json"


@dataclass(frozen=True, slots=True)
class Choice:
    """Costs, and the number of threads that the model will run on."""

    costs: Costs
    threads: int

    def require(self, computation: str, spelling: str, g: Graph, value: str) -> None:
        """Raise Miss unless `spelling` pays for a tensor of the shape of `value`."""
        tokens, width = tokens_and_width(g.shape(value))
        self.require_at(computation, spelling, tokens, width)

    def require_at(
        self, computation: str, spelling: str, tokens: int | None, width: int | None
    ) -> None:
        if self.costs.gain(computation, spelling, tokens, width, self.threads) is None:
            raise Miss(f"{computation} is not faster here when spelled '{spelling}'")


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
    return Choice(costs_in_use()[0], threads or cores())


def costs_in_use() -> tuple[Costs, str]:
    """This machine's own table where it was measured with this runtime, else the one that ships.

    With where it is from, and what there is to say of it.
    """
    own = cache_path()
    if own.is_file():
        try:
            return Costs.load(own), f"measured on this machine, '{own}'"
        except CostsError as error:
            return Costs.load(SHIPPED), f"the shipped table; {error}"
    shipped = Costs.load(SHIPPED)
    origin = f"the shipped table, onnxruntime {shipped.runtime} on {shipped.cpu}"
    if shipped.runtime != runtime_version():
        origin += f"; this is onnxruntime {runtime_version()}: toolkit tune measures it"
    return shipped, origin
