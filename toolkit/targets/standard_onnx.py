"""Any runtime of standard operators. Models are verified in onnxruntime, and no costs are known."""

from __future__ import annotations

from toolkit.targets.releases import installed_release
from toolkit.targets.target import Target

TARGET = Target(
    name="onnx",
    summary="any runtime of standard ONNX operators",
    domains=("", "ai.onnx.ml"),
    release=installed_release(),
    number_formats=("float32", "float16", "int8", "uint8", "int4", "uint4"),
)
