"""Operators that do nothing, and chains of them that one operator can do.

Every rule is exact: the same numbers come out. Where a rule needs to know a shape, a type or a
constant and does not, it leaves the node alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from passes.simplify.canonicalize import casts, elementwise, indexing, shape, views
from passes.simplify.canonicalize import pool_reduce as windows
from passes.simplify.canonicalize import slice_concat_pad as pieces
from passes.simplify.canonicalize import slices_of_views as parts
from passes.simplify.canonicalize import softmax as rows
from toolkit.ir.model import Model
from toolkit.rewriting.rule import apply_rules
from toolkit.verification.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

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
