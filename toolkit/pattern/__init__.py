"""What a subgraph looks like: patterns that read like the formula they stand for.

    x = var("x")
    gelu = product(x, 0.5, op.Erf(product(x, 1 / sqrt(2))) + 1)

`dsl` and `formulas` hold what a rule's author writes. `compiling` turns it into steps, with
`leaves`, `operators` and `flat` (products and sums in any order) for the parts; `search` is the
state of one attempt.
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
