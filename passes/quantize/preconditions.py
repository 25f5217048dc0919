"""Why a model is not quantized at all: it is too old, or somebody has quantized it already.

One operator is enough to tell that.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from passes.opset import Opset
from toolkit.ir import node as nd
from toolkit.ir.model import Model

if TYPE_CHECKING:
    from toolkit.pass_manager.protocol import Context

ON_INTEGERS = frozenset(
    (
        *("QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"),
        *("QLinearMatMul", "QLinearConv", "QGemm", "QAttention", "DynamicQuantizeMatMul"),
        *("MatMulIntegerToFloat", "DynamicQuantizeLSTM", "MatMulNBits"),
    )
)
"""Operators that quantize activations, or compute with what is quantized."""

FROM_INTEGERS = frozenset(
    (*ON_INTEGERS, "DequantizeLinear", "MatMulBnb4", "MatMulFpQ4", "GatherBlockQuantized")
)
"""These, and operators that read weights which are stored in fewer bits."""


def too_old(model: Model, what: str, min_opset: int) -> str:
    opset = model.opsets.get("", 0)
    return f"{what} needs opset {min_opset}, and the model has {opset}" if opset < min_opset else ""


def may_not_lift(model: Model, ctx: Context, what: str, min_opset: int) -> str:
    """Why the model is not to be lifted as far as `what` needs it: the user's limit, if so."""
    opset = model.opsets.get("", 1)
    if opset >= min_opset or ctx.opset is None:
        return ""
    if ctx.opset != "keep" and ctx.opset >= min_opset:
        return ""
    return f"{what} needs opset {min_opset}, and the model is to stay at {opset}"


def lift(model: Model, ctx: Context, what: str, min_opset: int) -> str:
    """Lift the model to the opset that `what` needs; why it stays as it was, if so."""
    reason = may_not_lift(model, ctx, what, min_opset)
    if reason or model.opsets.get("", 1) >= min_opset:
        return reason
    start = model.journal.position
    Opset(to=min_opset).run(model, ctx)
    if model.opsets.get("", 1) >= min_opset:
        return ""
    model.journal.undo_to(start)
    return f"{what} needs opset {min_opset}, and the model cannot be lifted"


def quantized_already(model: Model, operators: Container[str] = ON_INTEGERS) -> str:
    made = next((node for node in model.nodes() if node.op_type in operators), None)
    return f"the model is quantized already: it has {nd.label(made)}" if made is not None else ""
