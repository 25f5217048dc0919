"""Artificial cost tables in which the fastest candidate is clear."""

from __future__ import annotations

from collections.abc import Callable

from onnx import printer, shape_inference

from passes.lower.cost_query import CostQuery
from tests.checks import check, parse
from toolkit.rewriting.rule import Rule, Rules
from toolkit.runtime.cost_table import Candidate, Costs, Regime

HEADER = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
Factory = Callable[[CostQuery], tuple[Rule, ...]]


def candidate(name: str, cost: float | dict[str, float], undone: bool = False) -> Candidate:
    given = cost if isinstance(cost, dict) else {"128x768@1": cost, "128x768@2": cost}
    costs = {Regime.parse(regime): value for regime, value in given.items()}
    return Candidate(name, (), undone, costs, dict.fromkeys(costs, 1.0))


def table(**computations: tuple[Candidate, ...]) -> Costs:
    named = {name.replace("_", "-"): candidates for name, candidates in computations.items()}
    return Costs("1.0", "any", "none", named)


class _All(dict[str, tuple[Candidate, ...]]):
    """Every computation, with one candidate besides the usual form."""

    def __init__(self, cost: float, names: tuple[str, ...]) -> None:
        super().__init__()
        self._found = (candidate("usual", 1.0), *(candidate(name, cost) for name in names))

    def get(self, key: str, default: object = None) -> tuple[Candidate, ...]:  # type: ignore[override]
        return self._found


def choice(name: str, cost: float = 0.5) -> CostQuery:
    """Return a query in which the candidate `name` costs `cost` times the usual form."""
    return CostQuery(Costs("1.0", "any", "none", _All(cost, (name,))), 1)


def typed(text: str) -> str:
    """The model at opset 23, with the types of its values between input and output written down."""
    return printer.to_text(shape_inference.infer_shapes(parse(HEADER + text)))


def lowered(rules: Factory, name: str, signature: str, nodes: str, after: str) -> None:
    """Check that the rules write `after` if the candidate `name` is fastest, and nothing if not."""
    before = typed(f"{signature} {{ {nodes} }}")
    check(Rules("test", rules(choice(name))), before, f"{HEADER}{signature} {{ {after} }}")
    check(Rules("test", rules(choice(name, cost=1.2))), before, near_miss=True)


def stays(rules: Factory, name: str, signature: str, nodes: str, run: bool = True) -> None:
    """Check that nothing matches even though the candidate `name` is fastest."""
    before = typed(f"{signature} {{ {nodes} }}")
    check(Rules("test", rules(choice(name))), before, near_miss=True, run=run)
