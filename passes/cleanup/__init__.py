"""Operators that do nothing, and chains of them that one operator can do.

Every rule is exact: the same numbers come out. Where a rule needs to know a shape, a type or a
constant and does not, it leaves the node alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from passes import views
from passes.cleanup import casts, elementwise, indexing, parts, pieces, rows, shape, windows
from toolkit.model import Model
from toolkit.rules import apply_rules
from toolkit.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    from toolkit.context import Context

RULES = (
    *shape.RULES,
    *views.RULES,
    *views.BY_ONES,
    *casts.RULES,
    *elementwise.RULES,
    *pieces.RULES,
    *indexing.RULES,
    *parts.RULES,
    *rows.RULES,
    *windows.RULES,
)


@dataclass(frozen=True, slots=True)
class Cleanup:
    """Remove no-ops and merge chains of them."""

    name: ClassVar[str] = "cleanup"
    tolerance: ClassVar[Tolerance] = EXACT

    def run(self, model: Model, ctx: Context) -> None:
        apply_rules(model, RULES, ctx)
