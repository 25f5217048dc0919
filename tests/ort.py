"""onnxruntime for tests: a model as it is written, without anything the runtime would improve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime as ort
from onnx import ModelProto


def session(model: ModelProto) -> ort.InferenceSession:
    """The model on one CPU thread, graph optimizations off."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(
    model: ModelProto, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None
) -> list[Any]:
    """The named outputs, or all, for one feed."""
    return list(session(model).run(outputs, dict(feeds)))
