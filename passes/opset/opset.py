"""Convert a model to another opset.

Where a node cannot be converted, the model stays at the last version at which every node is valid,
and the pass reports why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from passes.analysis.shapes import Shapes
from passes.opset.adapter_context import CannotConvert
from passes.opset.conversion import Conversion, lower_ir
from toolkit.errors import UsageError
from toolkit.ir.model import Model
from toolkit.pass_manager.protocol import Context
from toolkit.runtime import MAX_OPSET
from toolkit.settings import OpsetLimit
from toolkit.verification.tolerance import FLOAT, Tolerance

__all__ = ["Opset"]

WORKING = 23
"""The opset that has every standard operator the built-in passes fuse into."""


@dataclass(frozen=True, slots=True)
class Opset:
    """Lift the model to a newer opset, or lower it to an older one.

    Without `to`, lift it to the opset that the other passes work in, within the limit set by the
    user. Lowering writes operators out in older ones where it must.
    """

    name: ClassVar[str] = "opset"
    tolerance: ClassVar[Tolerance] = FLOAT  # another kernel may sum in another order

    to: int | None = field(
        default=None,
        metadata={"help": f"the opset to convert to; none: lift to {WORKING} within --opset"},
    )
    temporary: bool = field(
        default=False,
        metadata={"help": "lift for the passes that follow: the result need not stay there"},
    )

    def __post_init__(self) -> None:
        if self.to is not None and not 1 <= self.to <= MAX_OPSET:
            raise UsageError(
                f"opset: to={self.to} is out of range; onnxruntime loads opsets up to {MAX_OPSET}"
            )

    @property
    def keeps_opset(self) -> bool:
        """Whether the user asked for the opset that this pass converts to."""
        return not self.temporary

    def run(self, model: Model, ctx: Context) -> None:
        to = self.to if self.to is not None else _within(ctx.settings.opset)
        conversion = Conversion(model, ctx.target)
        if to is None or not conversion.versions:
            return
        lowest, highest = min(conversion.versions), max(conversion.versions)
        if lowest < to:
            _lift(conversion, to, ctx)
        if self.to is not None and highest > to:
            Shapes(annotate=False).run(model, ctx)  # older operators need ranks and types
            _lower(conversion, to, ctx)


def _lift(conversion: Conversion, to: int, ctx: Context) -> None:
    try:
        conversion.require_known_ops()
        for version in range(min(conversion.versions) + 1, to + 1):
            conversion.lift(version)
    except CannotConvert as obstacle:
        ctx.note(f"stays at opset {min(conversion.versions)}, not {to}: {obstacle}")
    note_adapted(conversion, min(conversion.versions), ctx)


def _lower(conversion: Conversion, to: int, ctx: Context) -> None:
    newest = max(conversion.versions)
    try:
        conversion.require_known_ops()
        for version in range(newest - 1, to - 1, -1):
            conversion.lower(version, decompose=True)
    except CannotConvert as obstacle:
        ctx.note(f"stays at opset {max(conversion.versions)}, not {to}: {obstacle}")
    else:
        note_adapted(conversion, to, ctx)
        if newest >= 14 > to and conversion.adapted["Reshape"]:
            ctx.note("Reshape below opset 14 has no allowzero: tensors must not be empty")
    if max(conversion.versions) < newest:
        lower_ir(conversion.model, floor=3)


def note_adapted(conversion: Conversion, reached: int, ctx: Context) -> None:
    """Report the adapted nodes by operator."""
    if conversion.adapted:
        counted = ", ".join(f"{n} {op}" for op, n in conversion.adapted.most_common())
        ctx.note(f"adapted to opset {reached}: {counted}")


def _within(limit: OpsetLimit) -> int | None:
    """Return the working opset, limited by the user's choice; None: do not lift."""
    if limit == "keep":
        return None
    return WORKING if limit is None else min(WORKING, limit)
