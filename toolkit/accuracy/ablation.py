"""Models in which only one layer is quantized, by whatever pass quantizes.

A pass that makes a plan, and follows one from a file (its option `plan`), is given its own plan
with all other nodes as floats: nothing is calibrated again. Of any other pass all rewrites but one
are vetoed.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from toolkit.accuracy.sensitivity import Variant
from toolkit.errors import UsageError
from toolkit.ir.model import Model

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context, Pass


@dataclasses.dataclass(frozen=True, slots=True)
class Quantized:
    """A model with all that the pass quantizes, and the variants with one layer each."""

    whole: Model
    variants: list[Variant]


def quantize_by(item: Pass, floats: Model, context: Callable[[], Context]) -> Quantized:
    """Run the pass on a copy of `floats`; UsageError when it finds nothing to quantize."""
    whole = floats.copy()
    ctx = context()
    item.run(whole, ctx)
    if not len(whole.journal):
        why = f": {ctx.notes[0]}" if ctx.notes else ""
        raise UsageError(f"{item.name} finds nothing to quantize{why}")
    options = {field.name for field in dataclasses.fields(cast("Any", item))}
    if ctx.plans and "plan" in options:
        variants = _by_plan(item, floats, context, ctx.plans[0].to_json())
    else:
        variants = _by_veto(item, floats, context, whole)
    return Quantized(whole, variants)


def _by_plan(item: Pass, floats: Model, context: Callable[[], Context], plan: str) -> list[Variant]:
    data: dict[str, Any] = json.loads(plan)
    nodes: list[dict[str, Any]] = data["nodes"]

    def make(kept: int) -> Model:
        others = [
            node if index == kept else {**node, "scheme": "float"}
            for index, node in enumerate(nodes)
        ]
        model = floats.copy()
        with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
            path = Path(folder) / "plan.json"
            path.write_text(json.dumps({**data, "nodes": others}), encoding="utf-8")
            followed: Any = dataclasses.replace(cast("Any", item), plan=path)
            followed.run(model, context())
        return model

    return [
        (_label(node), lambda kept=index: make(kept))
        for index, node in enumerate(nodes)
        if node.get("scheme", "float") != "float"
    ]


def _label(node: dict[str, Any]) -> str:
    return f"{node.get('op', '')} {node.get('node') or node.get('output')}".strip()


def _by_veto(
    item: Pass, floats: Model, context: Callable[[], Context], whole: Model
) -> list[Variant]:
    rewrites = [rewrite for rewrite in whole.journal.rewrites if not rewrite.implicit]

    def make(kept: int) -> Model:
        model = floats.copy()
        for index, rewrite in enumerate(rewrites):
            if index != kept:
                model.journal.veto(rewrite)
        item.run(model, context())
        return model

    return [
        (f"{rewrite.rule} {rewrite.site}", lambda kept=index: make(kept))
        for index, rewrite in enumerate(rewrites)
    ]
