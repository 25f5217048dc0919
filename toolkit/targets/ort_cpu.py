"""onnxruntime on a CPU, with its contrib operators."""

from __future__ import annotations

from toolkit.targets.releases import installed_release
from toolkit.targets.target import CONTRIB, Target

TARGET = Target(
    name="ort-cpu",
    summary="onnxruntime on a CPU",
    domains=("", "ai.onnx.ml", CONTRIB, f"{CONTRIB}.nchwc", "com.ms.internal.nhwc"),
    release=installed_release(),
    number_formats=("float32", "float16", "int8", "uint8", "int4", "uint4"),
    fuses_qdq=True,
    has_costs=True,
)
