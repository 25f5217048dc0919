"""Why a model is not quantized at all: it is too old, or somebody has quantized it already.

One operator is enough to tell that.
"""

from __future__ import annotations

from collections.abc import Container

from toolkit import nodes as nd
from toolkit.model import Model

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


def quantized_already(model: Model, operators: Container[str] = ON_INTEGERS) -> str:
    made = next((node for node in model.nodes() if node.op_type in operators), None)
    return f"the model is quantized already: it has {nd.label(made)}" if made is not None else ""
