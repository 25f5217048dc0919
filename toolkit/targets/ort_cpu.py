"""onnxruntime on a CPU, with its contrib operators."""

from __future__ import annotations

from toolkit.runtime import MAX_IR, MAX_OPSET
from toolkit.targets.target import CONTRIB, Target

TARGET = Target(
    name="ort-cpu",
    summary="onnxruntime on a CPU",
    domains=("", "ai.onnx.ml", CONTRIB, f"{CONTRIB}.nchwc", "com.ms.internal.nhwc"),
    max_opset=MAX_OPSET,
    max_ir=MAX_IR,
    number_formats=("float32", "float16", "int8", "uint8", "int4", "uint4"),
    lost_kernels={
        22: (
            "Bernoulli",
            "GlobalLpPool",
            "MaxRoiPool",
            "Multinomial",
            "RandomNormal",
            "RandomNormalLike",
            "RandomUniform",
            "RandomUniformLike",
            "RoiAlign",
        ),
        25: ("Swish",),
    },
    fuses_qdq=True,
    has_costs=True,
)
