"""The pass `rows`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from onnx import NodeProto

from passes.motion.sink_slices.find_slices import SELECTING, joined, read
from passes.motion.sink_slices.partial_linear import part_read_by_rows
from passes.motion.sink_slices.region import Region
from toolkit.ir.graph import Graph
from toolkit.ir.model import Model
from toolkit.pattern import op, var
from toolkit.rewriting.match_failure import Miss
from toolkit.rewriting.rule import apply_rules, rewrite
from toolkit.verification.tolerance import FLOAT, Tolerance

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context


def _selects_few(g: Graph, value: str) -> bool:
    node = g.producer(value)
    return node is not None and read(g, node) is not None


@rewrite(op.any(*SELECTING)(var(), ...).when(_selects_few), opset=13)
def selected_rows(g: Graph, node: NodeProto) -> str:
    """f(x)[rows] = f(x[rows])"""
    selected = read(g, node)
    if selected is None:
        raise Miss
    region = Region(g, joined(g, selected))
    if not region.pays:
        raise Miss("; ".join(["no product is computed for its rows alone", *region.stops[:2]]))
    return region.move(node)


RULES = (selected_rows, part_read_by_rows)


@dataclass(frozen=True, slots=True)
class Rows:
    """Select rows before they are computed, not after."""

    name: ClassVar[str] = "rows"
    tolerance: ClassVar[Tolerance] = FLOAT  # a product of fewer rows may add in another order
    idempotent: ClassVar[bool] = True

    def run(self, model: Model, ctx: Context) -> None:
        apply_rules(model, RULES, ctx)
