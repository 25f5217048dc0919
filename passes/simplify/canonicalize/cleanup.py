"""Canonicalization: remove no-ops and merge chains of operators.

Every rule is exact: the results keep their values. A rule that needs a shape, a type or a constant
leaves the node alone if that is unknown.
"""

from __future__ import annotations

from passes.simplify.canonicalize import (
    casts,
    elementwise,
    indexing,
    pool_reduce,
    shape,
    slice_concat_pad,
    slices_of_views,
    softmax,
    views,
)
from toolkit.rewriting.rule import RulePass
from toolkit.verification.tolerance import EXACT

RULES = (
    *shape.RULES,
    *views.RULES,
    *casts.RULES,
    *elementwise.RULES,
    *slice_concat_pad.RULES,
    *indexing.RULES,
    *slices_of_views.RULES,
    *softmax.RULES,
    *pool_reduce.RULES,
)


class Cleanup(RulePass):
    """Remove no-ops and merge chains of them."""

    name = "cleanup"
    rules = RULES
    tolerance = EXACT
