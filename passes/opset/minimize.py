"""Lower a model to the opset and IR version that it needs, after passes have lifted it.

Older runtimes load the result. Fused operators are kept: they are what the model was lifted for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from passes.opset.adapter_context import CannotConvert
from passes.opset.conversion import Conversion, lower_ir
from passes.opset.opset import note_adapted
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.verification.tolerance import FLOAT, Tolerance


@dataclass(frozen=True, slots=True)
class MinimizeOpset:
    """Lower opset and IR to the lowest that the operators allow, but not below the original's."""

    name: ClassVar[str] = "minimize-opset"
    tolerance: ClassVar[Tolerance] = FLOAT  # another kernel may sum in another order

    floor: int | None = field(
        default=None,
        metadata={"help": "the lowest opset to go to; none: the opset of the original model"},
    )

    def run(self, model: Model, ctx: Context) -> None:
        floor = self.floor if self.floor is not None else ctx.origin.opset
        conversion = Conversion(model, ctx.target)
        newest = max(conversion.versions, default=0)
        if not floor or newest <= floor:
            return
        try:
            conversion.require_known_ops()
            for version in range(newest - 1, floor - 1, -1):
                conversion.lower(version, decompose=False)
        except CannotConvert as obstacle:
            counted = ", ".join(f"{n} {op}" for op, n in conversion.stuck.most_common())
            ctx.note(f"opset {max(conversion.versions)} is needed: {counted or obstacle}")
        reached = max(conversion.versions)
        note_adapted(conversion, reached, ctx)
        if reached < newest:
            origin = min(ctx.origin.ir_version, ctx.target.max_ir)
            lower_ir(model, 3 if self.floor is not None else origin)
