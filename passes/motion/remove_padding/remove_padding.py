"""The pass `unpad`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from passes.analysis.operands import given
from passes.motion.remove_padding.dont_care import MASK, takes_keys_out
from passes.motion.remove_padding.mask_outputs import computed_at_padding
from passes.motion.remove_padding.masked_values import MaskedValues, ancestors, is_bounded
from passes.motion.remove_padding.region import Region
from toolkit.ir import node as nd
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.ir.tensor_type import Shape
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

MOST_MASKS = 8
"""The whole graph is read for each; models have one or two."""


@dataclass(frozen=True, slots=True)
class Unpad:
    """Compute the real tokens of a padded batch alone."""

    name: ClassVar[str] = "unpad"
    tolerance: ClassVar[Tolerance] = FLOAT  # a product of fewer rows may add in another order
    idempotent: ClassVar[bool] = True

    def run(self, model: Model, ctx: Context) -> None:
        if not ctx.target.has_costs:
            return  # elsewhere sizes that are known beforehand may be worth more
        for graph in model.graphs():
            for padding in islice(_paddings(graph), MOST_MASKS):
                region = Region(padding)
                if region and graph.begin("unpad", region.first):
                    region.write()
                _note_wanted(padding, ctx)


def _note_wanted(padding: MaskedValues, ctx: Context) -> None:
    """Say which outputs padding is computed for, and what may be done about it."""
    wanted = computed_at_padding(padding)
    if padding.mask in padding.g.feeds and wanted:
        names = ", ".join(f"'{name}'" for name in wanted)
        ctx.note(f"padding is computed for {names}; if nobody reads it there: mask-outputs first")


def _paddings(g: Graph) -> Iterator[MaskedValues]:
    """The masks of [batch, length] by which attention leaves keys out, each where it begins.

    Inputs come first, then what is nearest to those.
    """
    masks = {given(node, MASK) for node in g.nodes if nd.is_op(node, "Attention")}
    makes: dict[str, list[str]] = {}
    for mask in sorted(masks):
        for value in reversed(ancestors(g, mask, is_bounded)):
            makes.setdefault(value, []).append(mask)
    for value in sorted(makes, key=lambda value: g.producer(value) is not None):
        sizes = g.shape(value) or ()
        if len(sizes) == 2 and _may_be_padded(sizes):
            padding = MaskedValues(g, value, sizes)
            left = masks.intersection(makes[value])
            found = {mask for mask in left if takes_keys_out(padding, mask, of_real=True)}
            if found:
                masks -= found
                yield padding


def _may_be_padded(sizes: Shape) -> bool:
    """A single text is only filled up where its length is fixed."""
    return sizes[0] != 1 or isinstance(sizes[1], int)
