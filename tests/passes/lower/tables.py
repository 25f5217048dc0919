"""Artificial cost tables in which the fastest candidate is clear."""

from __future__ import annotations

from collections.abc import Callable

from onnx import printer, shape_inference

from passes.lower.cost_query import CostQuery
from tests.checks import check, parse
from toolkit.rewriting.rule import Rule, Rules
from toolkit.runtime.cost_table import Costs, Regime, Spelling

HEADER = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
Factory = Callable[[CostQuery], tuple[Rule, ...]]


def spelling(name: str, cost: float | dict[str, float], undone: bool = False) -> Spelling:
    given = cost if isinstance(cost, dict) else {"128x768@1": cost, "128x768@2": cost}
    costs = {Regime.parse(regime): value for regime, value in given.items()}
    return Spelling(name, (), undone, costs, dict.fromkeys(costs, 1.0))


def table(**computations: tuple[Spelling, ...]) -> Costs:
    named = {name.replace("_", "-"): spellings for name, spellings in computations.items()}
    return Costs("1.0", "any", "none", named)


class _All(dict[str, tuple[Spelling, ...]]):
    """Every computation, with one candidate besides the usual form."""

    def __init__(self, cost: float, names: tuple[str, ...]) -> None:
        super().__init__()
        self._found = (spelling("usual", 1.0), *(spelling(name, cost) for name in names))

    def get(self, key: str, default: object = None) -> tuple[Spelling, ...]:  # type: ignore[override]
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
