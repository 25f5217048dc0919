"""The pass `unpad`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from passes.analysis.operands import given
from passes.motion.remove_padding.dont_care import MASK, ignores_padded_keys
from passes.motion.remove_padding.mask_outputs import computed_at_padding
from passes.motion.remove_padding.masked_values import MaskedValues, ancestors, is_bounded
from passes.motion.remove_padding.region import PackedRegion
from toolkit.ir import Graph, Model, Shape, node as nd
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

MOST_MASKS = 8
"""Most masks used in a graph: each costs a walk over it, and models have one or two."""


@dataclass(frozen=True, slots=True)
class Unpad:
    """Compute the real tokens of a padded batch alone."""

    name: ClassVar[str] = "unpad"
    tolerance: ClassVar[Tolerance] = FLOAT  # a product of fewer rows may add in another order
    idempotent: ClassVar[bool] = True

    def run(self, model: Model, ctx: Context) -> None:
        if not ctx.target.has_costs:
            return  # other runtimes may need static sizes more
        for graph in model.graphs():
            for values in islice(_padding_masks(graph), MOST_MASKS):
                region = PackedRegion(values)
                if region and graph.begin("unpad", region.first):
                    region.write()
                _note_outputs(values, ctx)


def _note_outputs(values: MaskedValues, ctx: Context) -> None:
    """Note the outputs for which padding is computed, and how to avoid that."""
    outputs = computed_at_padding(values)
    if values.mask in values.g.feeds and outputs:
        names = ", ".join(f"'{name}'" for name in outputs)
        ctx.note(f"padding is computed for {names}; if it is unused, run mask-outputs first")


def _padding_masks(g: Graph) -> Iterator[MaskedValues]:
    """Yield the values of [batch, length] that attention masks are computed from.

    Inputs come first, then the values nearest to them.
    """
    masks = {given(node, MASK) for node in g.nodes if nd.is_op(node, "Attention")}
    derived: dict[str, list[str]] = {}
    for mask in sorted(masks):
        for value in reversed(ancestors(g, mask, is_bounded)):
            derived.setdefault(value, []).append(mask)
    for value in sorted(derived, key=lambda value: g.producer(value) is not None):
        sizes = g.shape(value) or ()
        if len(sizes) == 2 and _may_be_padded(sizes):
            values = MaskedValues(g, value, sizes)
            left = masks.intersection(derived[value])
            found = {x for x in left if ignores_padded_keys(values, x, results_matter=False)}
            if found:
                masks -= found
                yield values


def _may_be_padded(sizes: Shape) -> bool:
    """Whether there may be padding: a single text is only padded to a fixed length."""
    return sizes[0] != 1 or isinstance(sizes[1], int)
