"""Options common to several passes, as field metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

Words = Mapping[str, str]

PER_CHANNEL: Words = {"help": "One scale per output channel, or one per tensor."}
REDUCE_RANGE: Words = {"help": "Weights in -64..64, for x86 processors without VNNI."}
EMBEDDINGS: Words = {"help": "Quantize the tables of Gather too, with a scale per row."}
INCLUDE: Words = {"help": "Patterns of operators, nodes or outputs to quantize."}
EXCLUDE: Words = {"help": "Patterns of operators, nodes or outputs to leave float."}
MIN_ELEMENTS: Words = {"help": "Layers with fewer weights stay float."}
PLAN: Words = {"help": "A plan (JSON), which replaces the options above."}


def note_beside_plan(item: Any, ctx: Context, *followed: str) -> None:
    """Note the options that a plan overrides: all except `followed`."""
    idle = [
        option.name
        for option in fields(item)
        if option.name not in ("plan", *followed) and getattr(item, option.name) != option.default
    ]
    if idle:
        ctx.note(f"ignored, since a plan is given: {', '.join(idle)}")
