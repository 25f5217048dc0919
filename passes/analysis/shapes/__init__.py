"""Shapes: the type, symbolic shape and symbolic contents of every value.

Sizes keep the names that the inputs give them and stay related: `batch`, `2*seq`,
`floor((h - 1)/2) + 1`. Integers that are computed from shapes are followed as contents, so that the
target of a Reshape is known as `[batch, seq, 12, 64]` and not just as four numbers.

Every fact holds in every run of the model that does not fail: other passes drop nodes by them.
Taken for granted is that sizes do not overflow the integers they are computed in, that no dimension
is as long as the 2**31 - 1 that exporters write for "to the end", and that no window of a
convolution or pooling is larger than the padded image (there, runtimes round in other directions).
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
