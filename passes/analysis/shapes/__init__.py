"""Shape inference: the type, symbolic shape and symbolic contents of every value.

Sizes are formulas in the names that the inputs declare: `batch`, `2*seq`, `floor((h - 1)/2) + 1`.
Contents of integers computed from shapes are inferred too: the target of a Reshape is known as
`[batch, seq, 12, 64]`, not just as a vector of four numbers.

Every fact holds in every run of the model that does not fail; other passes remove nodes on the
strength of these facts. The assumptions: sizes do not overflow the integers they are computed in,
dimensions are shorter than the 2**31 - 1 that exporters write for "to the end", and windows of
convolutions and poolings are no larger than the padded image (beyond it, runtimes round
differently).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from passes.analysis.shapes.engine import Engine
from toolkit.verification.tolerance import EXACT, Tolerance

if TYPE_CHECKING:
    from toolkit.ir.model import Model
    from toolkit.pass_manager.protocol import Context

__all__ = ["Shapes"]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Infer types, symbolic shapes and the contents of shape arithmetic."""

    name: ClassVar[str] = "shapes"
    tolerance: ClassVar[Tolerance] = EXACT
    idempotent: ClassVar[bool] = True
    annotate: bool = field(
        default=True, metadata={"help": "declare the inferred types in the written model"}
    )

    def run(self, model: Model, ctx: Context) -> None:
        engine = Engine(model)
        engine.run()
        if engine.contradicted and engine.filled:
            engine = Engine(model, trust=False)
            engine.run()
        engine.write(self.annotate)
