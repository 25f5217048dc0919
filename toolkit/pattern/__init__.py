"""Patterns of subgraphs that read like formulas.

    x = var("x")
    gelu = product(x, 0.5, op.Erf(product(x, 1 / sqrt(2))) + 1)

`dsl` and `associative_dsl` are the pattern language. `compile` translates patterns into matchers,
with `leaf_matchers`, `op_matchers` and `associative` (products and sums in any order) for the
parts. `backtracking` is the state of one attempt to match.
"""

from __future__ import annotations

from toolkit.pattern.associative_dsl import product, total
from toolkit.pattern.dsl import Pattern, const, maybe_cast, number, op, optional, var

__all__ = [
    "Pattern",
    "const",
    "maybe_cast",
    "number",
    "op",
    "optional",
    "product",
    "total",
    "var",
]
