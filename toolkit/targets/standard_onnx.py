"""Any runtime of standard operators. Models are verified in onnxruntime, and no costs are known."""

from __future__ import annotations

from toolkit.runtime import MAX_IR, MAX_OPSET
from toolkit.targets.target import Target

TARGET = Target(
    name="onnx",
    summary="any runtime of standard ONNX operators",
    domains=("", "ai.onnx.ml"),
    max_opset=MAX_OPSET,
    max_ir=MAX_IR,
    number_formats=("float32", "float16", "int8", "uint8", "int4", "uint4"),
)
