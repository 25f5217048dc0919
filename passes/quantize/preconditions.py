"""Preconditions of quantization: a recent opset, and a model that is not quantized yet.

Each function returns the reason against quantization, or an empty string.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from passes.lower.legalize import Legalize
from passes.opset.opset import Opset
from toolkit.ir import Model, node as nd
from toolkit.ir.op_traits import INTEGER_COMPUTE

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context


_QDQ_OPSET = 13
"""The first opset of Q/DQ with per-channel scales."""


def too_old(model: Model, what: str, min_opset: int) -> str:
    opset = model.opsets.get("", 0)
    return f"{what} needs opset {min_opset}, and the model has {opset}" if opset < min_opset else ""


def may_not_lift(model: Model, ctx: Context, what: str, min_opset: int) -> str:
    """Return why the settings forbid the opset that `what` needs."""
    opset = model.opsets.get("", 1)
    if opset >= min_opset or ctx.settings.opset is None:
        return ""
    if ctx.settings.opset != "keep" and ctx.settings.opset >= min_opset:
        return ""
    return f"{what} needs opset {min_opset}, but the model must stay at {opset}"


def lift(model: Model, ctx: Context, what: str, min_opset: int) -> str:
    """Lift the model to the opset that `what` needs; return why it cannot be, or blank."""
    reason = may_not_lift(model, ctx, what, min_opset)
    if reason or model.opsets.get("", 1) >= min_opset:
        return reason
    start = model.journal.position
    Opset(to=min_opset).run(model, ctx)
    if model.opsets.get("", 1) >= min_opset:
        return ""
    model.journal.undo_to(start)
    return f"{what} needs opset {min_opset}, and the model cannot be lifted"


def lower_for_qdq(model: Model, ctx: Context) -> None:
    """Lower the model to the newest opset whose Q/DQ the runtime has kernels for.

    onnxruntime 1.23 loads opset 23, whose QuantizeLinear it cannot run.
    """
    opset = model.opsets.get("", 1)
    usable = (
        version
        for version in range(opset, _QDQ_OPSET - 1, -1)
        if ctx.target.has_kernel("QuantizeLinear", version, inputs=("float32", "float32", "uint8"))
        and ctx.target.has_kernel("DequantizeLinear", version, inputs=("int8",))
    )
    newest = next(usable, opset)
    if newest < opset:
        Legalize(newest).run(model, ctx)
        Opset(to=newest).run(model, ctx)


def quantized_already(model: Model, operators: Container[str] = INTEGER_COMPUTE) -> str:
    """Return the reason against quantizing a model that has one of these operators."""
    made = next((node for node in model.nodes() if node.op_type in operators), None)
    return f"the model is quantized already: it has {nd.label(made)}" if made is not None else ""
